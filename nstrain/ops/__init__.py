"""What is done to a line from outside it: made, checked, branched, rolled back, stopped, looked at."""
