"""The journal of a line: what it measured, an update a row, read, checked, exported and drawn."""
