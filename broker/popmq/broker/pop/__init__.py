"""Pop delivery: check points, acks, revival and FIFO order."""
