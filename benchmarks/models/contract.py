"""Both model packages held to the trainer's contract, by mypy: with this file it reads each as a `ModelPackage`."""

from __future__ import annotations

# The modules beside the packages: without them mypy's cache would miss a change of what the packages take from them.
import baselines.config
import baselines.model
import baselines.presets

import neuronspark.config
import neuronspark.model
import neuronspark.presets
from nstrain.train.model import ModelPackage

NEURONSPARK: ModelPackage = neuronspark
BASELINES: ModelPackage = baselines
