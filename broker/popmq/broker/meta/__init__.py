"""Topics, consumer groups, users and offsets, kept as records of the log."""
