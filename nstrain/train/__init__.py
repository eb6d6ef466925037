"""One training update - planned, computed, recorded, saved - and the process that makes one after another."""
