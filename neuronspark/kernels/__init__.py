"""The model's operators, one a file, as differentiable functions with hand-written backward passes.

Each takes and returns tensors and knows nothing of layers. Gradients of parameters leave through `gradient.py` alone.
"""
