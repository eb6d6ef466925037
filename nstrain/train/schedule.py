"""Learning rate and weight decay as pure functions of the position in tokens.

No launch, skip or restart can move them, since nothing is counted: position in, value out.
"""

from __future__ import annotations

import math

from nstrain.settings.run import DecayPiece, LearningRate, OptimizerSettings


def learning_rate(settings: LearningRate, position_tokens: int) -> float:
    """The rate of the update that ends at `position_tokens` (so the first update of a warm-up is not at rate 0).

    Warm-up: peak * position / warmup_tokens. Decay: from `peak` at from_tokens to `final` at to_tokens, where it stays.
    At every edge the value is exactly the one named in run.json.
    """
    if position_tokens < settings.warmup_tokens:
        return settings.peak * (position_tokens / settings.warmup_tokens)
    decay = settings.decay
    if decay is None or position_tokens <= decay.from_tokens:
        return settings.peak
    if position_tokens >= decay.to_tokens:
        return decay.final
    return decay.final + (settings.peak - decay.final) * _share_left(decay, position_tokens)


def _share_left(decay: DecayPiece, position_tokens: int) -> float:
    """What is left of peak - final inside the decay: 1 at its start, 0 at its end."""
    way = (position_tokens - decay.from_tokens) / (decay.to_tokens - decay.from_tokens)
    if decay.shape == "linear":
        return 1.0 - way
    if decay.shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * way))
    return 1.0 - math.sqrt(way)


def weight_decay(settings: OptimizerSettings, batch_tokens: int) -> float:
    """The decoupled weight decay (before it is multiplied by the rate) of an update.

    `batch_tokens` is what the ramp says at the position before the update: the smaller update at a cycle's end decays
    like its neighbours. With `weight_decay_batch` set the decay is in proportion to the batch, so that a token's worth
    of training decays the weights equally all along the ramp.
    """
    if settings.weight_decay_batch is None:
        return settings.weight_decay
    return settings.weight_decay * (batch_tokens / settings.weight_decay_batch)
