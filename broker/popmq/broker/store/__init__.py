"""The commit log and the files derived from it."""
