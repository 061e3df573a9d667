"""What every popmq process shares; imports no other popmq package."""
