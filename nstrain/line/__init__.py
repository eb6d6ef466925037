"""A training line's directory: its files, checkpoints and notices, without a process of its own."""
