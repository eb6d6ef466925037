"""The process that keeps a line alive: its children, the watchdog, waits, and what a person sees of it."""
