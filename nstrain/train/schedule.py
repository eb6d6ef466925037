"""Learning rate and weight decay as pure functions of the position in tokens.

No launch, skip or restart can move them, since nothing is counted: position in, value out.
"""

from __future__ import annotations

import math

from nstrain.settings.run import EmaSettings, OptimizerSettings, RatePieces
from nstrain.train.plan import Update


def learning_rate(pieces: RatePieces, position_tokens: int) -> float:
    """The rate of the update that ends at `position_tokens` (so the first update of a warm-up is not at rate 0).

    That position belongs to the last piece that begins before it: an update that ends where the next piece begins is
    still of the piece it was trained in. At every edge the value is exactly the one named in run.json.
    """
    piece = pieces[0]
    for following in pieces[1:]:
        if following.from_tokens < position_tokens:
            piece = following
    if piece.to_tokens is None or piece.end is None or position_tokens <= piece.from_tokens:
        return piece.start
    if position_tokens >= piece.to_tokens:
        return piece.end
    way = (position_tokens - piece.from_tokens) / (piece.to_tokens - piece.from_tokens)
    return piece.start + (piece.end - piece.start) * _gone(piece.shape, way)


def _gone(shape: str, way: float) -> float:
    """How much of the rate's change is done after a share of a piece's way: 0 at its start, 1 at its end."""
    if shape == "linear":
        return way
    if shape == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * way))
    return math.sqrt(way)


def weight_decay(settings: OptimizerSettings, update_tokens: int) -> float:
    """The decoupled weight decay (before it is multiplied by the rate) of an update.

    With `weight_decay_batch` set the decay is in proportion to the update's own tokens, so that a token's worth of
    training decays the weights equally all along the ramp, and in the smaller update at a cycle's end too.
    """
    if settings.weight_decay_batch is None:
        return settings.weight_decay
    return settings.weight_decay * (update_tokens / settings.weight_decay_batch)


def ema_step(settings: EmaSettings | None, update: Update) -> float | None:
    """How far an update moves the weights' moving average: its tokens over the horizon; None where it does not.

    It moves from the first update on whose end is at `from_tokens` or beyond; the engine makes the first move that is
    applied a copy (were it counted here, a skip just there would leave the average without a beginning).
    """
    if settings is None or update.tokens_after < settings.from_tokens:
        return None
    return min(1.0, update.tokens / settings.horizon_tokens)
