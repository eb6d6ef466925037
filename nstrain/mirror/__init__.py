"""The copy of a line's journal on an experiment tracker: a process of its own, which training never waits for."""
