"""What a trainer does with the GPU it is on: the memory it holds."""
