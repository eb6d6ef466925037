"""nstrain: pre-training of NeuronSpark language models on streamed text, exactly resumable and unattended."""

__version__ = "0.1.0"
