"""The data line: pinned text in, tokenized cycles out; everything a function of pinned inputs and a position."""
