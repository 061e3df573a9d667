"""Timer messages: delivered at a time that the sender chose (docs/concepts/timer.md)."""
