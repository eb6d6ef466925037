"""The command line: each command parses, calls one function, prints. No logic lives here."""
