"""`nstrain tune`: the fastest micro-batch shape of each row length that fits the device (tuner.py tells how)."""
