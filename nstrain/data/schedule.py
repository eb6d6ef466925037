"""The schedule of a data line: an append-only list of pieces, each so many cycles of one size and one recipe.

A cycle is a whole number of segments; a segment holds exactly share * m units of each source, so every cut that
matters - segment, cycle, update - falls on a row's edge and the shares are exact at every segment's end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pydantic

from nstrain.base.errors import Refusal
from nstrain.base.units import Tokens
from nstrain.data.order import reduced_shares
from nstrain.settings.model import Positive, Settings, Whole

MAX_CYCLE_TOKENS = 30 << 30
"""A drawing multiplies a source's tokens of a cycle by shares of 2^28, exactly, in 64 bits."""


class Piece(Settings):
    """Cycles of one size and one recipe."""

    cycles: Positive | None
    """How many; null in the last piece alone: until the sources are used up."""
    cycle_tokens: Positive = pydantic.Field(le=MAX_CYCLE_TOKENS)
    """Target tokens of a cycle, already rounded to whole segments."""
    segment_units: Positive
    """m: a segment holds share * m units of each source."""
    recipe: dict[str, Whole]
    """Share of each source, as whole numbers in the line's order of sources; only their proportions matter."""

    @pydantic.model_validator(mode="after")
    def _positive(self) -> Piece:
        if not self.recipe:
            raise ValueError("the recipe names no source")
        if any(share <= 0 for share in self.recipe.values()):
            raise ValueError("a share must be a positive whole number; leave a source out to give it none")
        return self

    def describe_mixture(self, sources: Sequence[str]) -> str:
        """Each source's share of the text, and which of a line's sources have none; for people."""
        total = sum(self.recipe.values())
        shares = ", ".join(f"{name} {100 * share / total:.3g} %" for name, share in self.recipe.items())
        without = ", ".join(name for name in sources if name not in self.recipe)
        return f"mixture: {shares}" + (f"; nothing of {without}" if without else "")


@dataclasses.dataclass(frozen=True)
class CyclePlan:
    """What the schedule says of one cycle."""

    cycle: int
    """Its number, from 1."""
    piece: int
    """Index of the schedule's piece it belongs to."""
    tokens: Tokens
    """Target tokens of all its sources together."""
    first_token: Tokens
    """The position at its start: target tokens before it, a trunk's before the fork included."""
    sources: tuple[str, ...]
    """The recipe's sources, in the line's order."""
    shares: tuple[int, ...]
    """Their shares, divided by the greatest common divisor."""
    segment_units: int
    segments: int
    unit_tokens: int

    @property
    def segment_tokens(self) -> tuple[int, ...]:
        """Target tokens of each source in one segment."""
        return tuple(share * self.segment_units * self.unit_tokens for share in self.shares)

    @property
    def source_tokens(self) -> tuple[int, ...]:
        """Target tokens of each source in the cycle."""
        return tuple(tokens * self.segments for tokens in self.segment_tokens)


def make_piece(
    recipe: dict[str, int],
    cycle_tokens: int,
    unit_tokens: int,
    cycles: int | None,
    segment_units: int | None = None,
) -> Piece:
    """A piece with its cycle size rounded to whole segments.

    Without `segment_units` a cycle has about sixteen segments, as far as the unit and the shares allow. Raises
    `Refusal` if one period of the shares, K units, is more than the cycle can be rounded to.
    """
    shares = reduced_shares(tuple(recipe.values()))
    period_tokens = sum(shares) * unit_tokens
    if period_tokens > 2 * cycle_tokens:
        raise Refusal(
            f"shares {list(recipe.values())} have a period of K = {sum(shares):,} units of {unit_tokens:,} tokens, "
            f"{period_tokens:,} tokens, but a cycle has only {cycle_tokens:,}; use coarser shares (a smaller sum after "
            f"division by their common divisor), a smaller unit, or cycles of at least {period_tokens:,} tokens"
        )
    if segment_units is None:
        segment_units = max(1, cycle_tokens // (16 * period_tokens))
    segment_tokens = segment_units * period_tokens
    if segment_units < 1 or segment_tokens > 2 * cycle_tokens:
        raise Refusal(
            f"segment_units {segment_units} makes segments of {segment_tokens:,} tokens, a cycle has {cycle_tokens:,}; "
            f"use a whole number from 1 to {max(1, cycle_tokens // period_tokens)}"
        )
    segments = max(1, (2 * cycle_tokens + segment_tokens) // (2 * segment_tokens))
    if segments * segment_tokens > MAX_CYCLE_TOKENS:
        raise Refusal(f"cycles of {segments * segment_tokens:,} tokens: use cycles of at most {MAX_CYCLE_TOKENS:,}")
    return Piece(cycles=cycles, cycle_tokens=segments * segment_tokens, segment_units=segment_units, recipe=recipe)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All pieces of a line, and the questions the other rooms ask of them."""

    pieces: tuple[Piece, ...]
    unit_tokens: int
    fork_tokens: int = 0
    """Position at which cycle 1 begins: 0, or for a branch that of the fork."""

    def __post_init__(self) -> None:
        if not self.pieces:
            raise Refusal("the schedule has no piece")
        if any(piece.cycles is None for piece in self.pieces[:-1]):
            raise Refusal("only the schedule's last piece may be open-ended (cycles null)")
        for piece in self.pieces:
            period = sum(reduced_shares(tuple(piece.recipe.values()))) * piece.segment_units * self.unit_tokens
            if piece.cycle_tokens % period:
                raise Refusal(
                    f"the schedule's cycle_tokens {piece.cycle_tokens:,} is not a whole number of segments of "
                    f"{period:,} tokens"
                )

    @property
    def cycle_count(self) -> int | None:
        """All its cycles, or None if it is open-ended."""
        counts = [piece.cycles for piece in self.pieces]
        return None if counts[-1] is None else sum(count or 0 for count in counts)

    @property
    def total_tokens(self) -> int | None:
        """The position at its end (a branch's counts from its trunk's start), or None if it is open-ended."""
        if self.cycle_count is None:
            return None
        return self.fork_tokens + sum(piece.cycle_tokens * (piece.cycles or 0) for piece in self.pieces)

    def cycle(self, number: int) -> CyclePlan:
        """The plan of a cycle, from 1. Raises `Refusal` if the schedule has no such cycle."""
        first_cycle, first_token = 1, self.fork_tokens
        for index, piece in enumerate(self.pieces):
            if number >= 1 and (piece.cycles is None or number < first_cycle + piece.cycles):
                shares = reduced_shares(tuple(piece.recipe.values()))
                period = sum(shares) * piece.segment_units * self.unit_tokens
                return CyclePlan(
                    cycle=number,
                    piece=index,
                    tokens=Tokens(piece.cycle_tokens),
                    first_token=Tokens(first_token + (number - first_cycle) * piece.cycle_tokens),
                    sources=tuple(piece.recipe),
                    shares=shares,
                    segment_units=piece.segment_units,
                    segments=piece.cycle_tokens // period,
                    unit_tokens=self.unit_tokens,
                )
            first_cycle += piece.cycles or 0
            first_token += piece.cycle_tokens * (piece.cycles or 0)
        raise Refusal(f"the schedule has cycles 1 ... {self.cycle_count}; asked for cycle {number}")

    def tokens_of(self, source: str) -> int:
        """Target tokens that the closed part of the schedule takes of a source; of an open piece, one cycle."""
        total = 0
        for piece in self.pieces:
            if source in piece.recipe:
                whole = sum(piece.recipe.values())
                total += piece.cycle_tokens * piece.recipe[source] // whole * (piece.cycles or 1)
        return total
