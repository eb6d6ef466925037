"""Continuing a text token by token: a smoke test of trained weights.

The draw of the n-th new token is a hash of (seed, n) and nothing else, so one seed gives one text from one model,
whatever ran before. Probabilities are formed in fp64 on the CPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from nstrain.base.errors import NstrainError, Refusal
from nstrain.train.model import DecodableModel


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises `Refusal` for a value that makes no sense."""

    temperature: float = 0.0
    """Logits are divided by it; 0: always the most probable token (of equals, the one with the lowest id)."""
    top_k: int | None = None
    """Only so many of the most probable tokens are drawn from; None: all."""
    seed: int = 0
    """Keys the draws."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise Refusal(f"temperature {self.temperature}: expected a finite number, 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise Refusal(f"top-k {self.top_k}: expected at least 1")

    def choose(self, logits_V: npt.NDArray[np.float64], place: int) -> int:
        """The id of the new token number `place`, from 0."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        ranked = np.argsort(-logits_V, kind="stable")[: self.top_k]
        above = np.exp((logits_V[ranked] - logits_V[ranked[0]]) / self.temperature).cumsum()
        return int(ranked[np.searchsorted(above, _uniform(self.seed, place) * above[-1], side="right")])


@dataclasses.dataclass(frozen=True)
class NewToken:
    """A token that was chosen."""

    id: int
    log_probability: float
    """In nats, as the model gives it: before temperature and top-k."""


def continue_tokens(
    model: DecodableModel, prompt: Sequence[int], tokens: int, sampling: Sampling, vocab_size: int, eos_id: int
) -> Iterator[NewToken]:
    """Up to `tokens` tokens that follow the prompt, one at a time; ids are below `vocab_size`. Ends after an `eos_id`.

    Raises `Refusal` for a prompt without tokens, or one that is longer with its continuation than the model reads, and
    `NstrainError` for logits that are not finite.
    """
    longest = int(model.config.rope_max_seq_len)
    if not prompt:
        raise Refusal("the prompt has no tokens; give it some text")
    if len(prompt) + tokens > longest:
        raise Refusal(
            f"the prompt's {len(prompt):,} tokens and {tokens:,} new ones are more than the model reads: its longest "
            f"row has {longest:,} tokens (rope_max_seq_len)"
        )
    return _continue(model, prompt, tokens, sampling, vocab_size, eos_id)


def _continue(
    model: DecodableModel, prompt: Sequence[int], tokens: int, sampling: Sampling, vocab_size: int, eos_id: int
) -> Iterator[NewToken]:
    device = next(model.named_parameters())[1].device
    with torch.no_grad():  # not around the yields: it would hold for the caller too
        logits_1V, state = model.prefill(torch.tensor([prompt], device=device))
    for place in range(tokens):
        logits_V = logits_1V[0].detach().double().cpu().numpy()
        if not np.isfinite(logits_V).all():
            raise NstrainError(f"the logits of new token {place} are not finite: these weights do not work")
        chosen = sampling.choose(logits_V[:vocab_size], place)
        highest = logits_V.max()
        log_total = highest + np.log(np.exp(logits_V - highest).sum())
        yield NewToken(chosen, float(logits_V[chosen] - log_total))
        if chosen == eos_id or place == tokens - 1:
            return
        with torch.no_grad():
            logits_1V, state = model.step(torch.tensor([chosen], device=device), state)


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for a place: the first 53 bits of a hash of (seed, place)."""
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
