"""What a branch trains: its stages, as they were asked for and as its data line can hold them.

A stage is a number of tokens at one row length: `decay` at the trunk's, while the learning rate falls to its end;
`long` at the longest rows, at the rate that the decay ended with or one of its own. A stage ends with a cycle of the
branch's data line, so its tokens are rounded to whole segments of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from nstrain.base.errors import Refusal
from nstrain.base.units import parse_tokens
from nstrain.data.line import DataLine
from nstrain.data.order import reduced_shares
from nstrain.data.schedule import Piece, make_piece
from nstrain.settings.model import dump
from nstrain.settings.run import RunSettings
from nstrain.train.schedule import learning_rate

StageKind = Literal["decay", "long"]

FINAL_SHARE = 0.1
"""A decay ends at this share of the rate it begins at, unless a final rate is given."""

MOST_CYCLES = 4_000_000
"""A stage of more data cycles is a slip of the hand; their ends are listed."""


@dataclasses.dataclass(frozen=True)
class AskedStage:
    """A stage as it was typed."""

    kind: StageKind
    tokens: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage as it is trained."""

    kind: StageKind
    asked_tokens: int
    tokens: int
    """Whole cycles of the branch's data line."""
    first_cycle: int
    """Of the branch's data line."""
    cycles: int
    first_token: int
    """The position at which it begins."""
    row_tokens: int
    rate_start: float
    """The learning rate at its first token."""
    rate_end: float
    """And after its last."""


@dataclasses.dataclass(frozen=True)
class StageOptions:
    """What may be said of the stages beside their tokens; None: as `Stage` or branch.py says."""

    long_row_tokens: int | None = None
    decay_shape: str | None = None
    """None: linear."""
    final_lr: float | None = None
    long_lr: float | None = None
    tokens_per_update: int | None = None


def parse_plan(text: str) -> tuple[AskedStage, ...]:
    """The stages of `decay:10e9,long:2e9`. Raises `Refusal` for anything else."""
    stages: list[AskedStage] = []
    for part in text.split(","):
        kind, separator, tokens = part.strip().partition(":")
        if not separator or kind not in get_args(StageKind):
            raise Refusal(f"--plan: expected stages like decay:10e9,long:2e9, found {part.strip()!r} in {text!r}")
        stages.append(AskedStage(kind, int(parse_tokens(tokens, f"--plan: tokens of {kind}"))))  # type: ignore[arg-type]
    kinds = [stage.kind for stage in stages]
    if kinds not in (["decay"], ["long"], ["decay", "long"]):
        raise Refusal(f"--plan: expected a decay, a long stage, or a decay followed by a long stage, found {text!r}")
    return tuple(stages)


def stage_cycles(
    stages: Sequence[AskedStage], recipe: dict[str, int], longest_cycle_tokens: int, unit_tokens: int
) -> tuple[tuple[Piece, ...], ...]:
    """A data line's pieces for each stage: its tokens rounded to whole segments, however many cycles it takes, in as
    few cycles as are no longer than the trunk's. A stage's cycles differ by one segment at most, the longer ones first.

    Raises `Refusal` for a stage that is shorter than the recipe's period, or that takes more than MOST_CYCLES.
    """
    of_stages = []
    period_tokens = sum(reduced_shares(tuple(recipe.values()))) * unit_tokens
    for stage in stages:
        fewest = -(-stage.tokens // longest_cycle_tokens)
        try:  # with long rows a period may be longer than the trunk's cycles
            about = make_piece(
                recipe, max(-(-stage.tokens // fewest), min(stage.tokens, period_tokens)), unit_tokens, 1
            )
        except Refusal as error:
            raise Refusal(f"--plan: {stage.kind}:{stage.tokens}: {error}") from None
        segment_tokens = about.segment_units * period_tokens
        segments = max(1, (2 * stage.tokens + segment_tokens) // (2 * segment_tokens))
        cycles = -(-segments // max(1, longest_cycle_tokens // segment_tokens))
        if cycles > MOST_CYCLES:
            raise Refusal(
                f"--plan: the {stage.kind} stage would take more than {MOST_CYCLES:,} data cycles as long as the "
                f"trunk's longest ({longest_cycle_tokens:,} tokens); plan fewer tokens"
            )
        each, longer = divmod(segments, cycles)
        of_stages.append(
            tuple(
                make_piece(recipe, size * segment_tokens, unit_tokens, count, about.segment_units)
                for count, size in ((longer, each + 1), (cycles - longer, each))
                if count
            )
        )
    return tuple(of_stages)


def place_stages(
    asked: Sequence[AskedStage],
    data: DataLine,
    parent: RunSettings,
    at_cycle: int,
    options: StageOptions,
    longest: int,
    made_for: Sequence[Sequence[Piece]] | None = None,
) -> tuple[Stage, ...]:
    """The stages in the cycles of the branch's data line: those that were `made_for` each (`stage_cycles`), or in a
    line that was there before up to the cycle whose end is nearest.

    `longest` is the length of long rows unless `options` say another. Raises `Refusal` if the line does not end with
    the plan, or has no cycle for a stage, for a rate that cannot be, and for what is said of a stage that is not there.
    """
    _refuse_idle_options(asked, options)
    fork = data.settings.fork
    assert fork is not None, "the data line of a branch is a fork"
    if data.cycle_count is None:
        raise Refusal(f"{data.work}: its schedule is open-ended; a branch's data line ends with the branch's plan")
    sizes = (itertools.repeat(piece.cycle_tokens, piece.cycles or 0) for piece in data.settings.schedule)
    ends = list(itertools.accumulate(itertools.chain.from_iterable(sizes)))
    rate = learning_rate(parent.learning_rate, fork.tokens)
    stages: list[Stage] = []
    done_cycles = done = 0
    for stage, last in zip(asked, _last_cycles(asked, ends, made_for, data.work), strict=True):
        rate, end_rate = _rates(stage.kind, rate, options)
        row_tokens = parent.row_tokens_at(at_cycle) if stage.kind == "decay" else options.long_row_tokens or longest
        stages.append(
            Stage(
                kind=stage.kind,
                asked_tokens=stage.tokens,
                tokens=ends[last - 1] - done,
                first_cycle=done_cycles + 1,
                cycles=last - done_cycles,
                first_token=fork.tokens + done,
                row_tokens=row_tokens,
                rate_start=rate,
                rate_end=end_rate,
            )
        )
        rate, done_cycles, done = end_rate, last, ends[last - 1]
    return tuple(stages)


def _last_cycles(
    asked: Sequence[AskedStage], ends: Sequence[int], made_for: Sequence[Sequence[Piece]] | None, work: Path
) -> list[int]:
    """The cycle that each stage ends with; `ends` are the cycles', in tokens after the fork. Raises `Refusal`."""
    found: list[int] = []
    done_asked = done_cycles = 0
    for index, stage in enumerate(asked):
        done_asked += stage.tokens
        if made_for is not None:
            last = done_cycles + sum(piece.cycles or 0 for piece in made_for[index])
        else:
            last = _nearest(ends, done_asked) + 1
        if last <= done_cycles:
            raise Refusal(
                f"{work}: no cycle ends near the {stage.kind} stage's; its cycles end at {_list(ends)} tokens"
            )
        found.append(last)
        done_cycles = last
    if done_cycles != len(ends):
        raise Refusal(
            f"{work} goes on after the plan: its cycles end at {_list(ends)} tokens after the fork, the plan at "
            f"{done_asked:,}; plan as much as it has, or name a new directory"
        )
    return found


def _rates(kind: StageKind, rate: float, options: StageOptions) -> tuple[float, float]:
    """The learning rates that a stage begins and ends with; `rate` is the one before it. Raises `Refusal`."""
    if kind == "decay":
        end = FINAL_SHARE * rate if options.final_lr is None else options.final_lr
        if not 0 <= end <= rate:
            raise Refusal(f"a decay cannot end at the rate {end:g}: the trunk's is {rate:g} at the fork")
        return rate, end
    rate = rate if options.long_lr is None else options.long_lr
    if not rate > 0:
        raise Refusal(
            f"the long stage would learn nothing at the rate {rate:g}: say another for it (--long-lr), or let "
            "the decay before it end above 0 (--final-lr)"
        )
    return rate, rate


def _refuse_idle_options(asked: Sequence[AskedStage], options: StageOptions) -> None:
    """Raise `Refusal` for what is said of a stage that is not planned."""
    kinds = {stage.kind for stage in asked}
    said: dict[StageKind, dict[str, Any]] = {
        "decay": {"--decay-shape": options.decay_shape, "--final-lr": options.final_lr},
        "long": {"--long-row-tokens": options.long_row_tokens, "--long-lr": options.long_lr},
    }
    for kind, values in said.items():
        idle = [name for name, value in values.items() if value is not None]
        if kind not in kinds and idle:
            raise Refusal(f"{idle[0]} is of a {kind} stage, and the plan has none; leave it out, or plan {kind}:TOKENS")


def _nearest(ends: Sequence[int], tokens: int) -> int:
    """Index of the end that is nearest; of two equally near, the earlier."""
    return min(range(len(ends)), key=lambda index: (abs(ends[index] - tokens), index))


def _list(numbers: Sequence[int]) -> str:
    """The numbers, of many the first and the last ones."""
    texts = [f"{number:,}" for number in numbers]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:4], "...", *texts[-4:]])


def branch_settings(
    parent: RunSettings, stages: Sequence[Stage], shape: str, tokens_per_update: int | None
) -> dict[str, Any]:
    """The fields of the branch's run.json that follow from its stages, as JSON values.

    Rate and batch are the parent's up to the fork. Raises `Refusal` for a batch that long rows do not divide.
    """
    fork = stages[0].first_token
    rates = [piece for piece in dump(parent)["learning_rate"] if piece["from"] < fork]
    rows: list[dict[str, int]] = []
    lengths = dump(parent)["lengths"]
    recompute = lengths[str(parent.rows[-1].row_tokens)]["recompute"]
    for stage in stages:
        if stage.kind == "decay":
            to = stage.first_token + stage.tokens
            ends = {"to": to, "shape": shape, "start": stage.rate_start, "end": stage.rate_end}
            rates.append({"from": stage.first_token, **ends})
        else:
            rates.append({"from": stage.first_token, "shape": "constant", "start": stage.rate_start})
        if not rows or rows[-1]["row_tokens"] != stage.row_tokens:
            rows.append({"from_cycle": stage.first_cycle, "row_tokens": stage.row_tokens})
        lengths.setdefault(str(stage.row_tokens), {"micro_rows": 1, "recompute": recompute})
    return {
        "learning_rate": rates,
        "tokens_per_update": _batch(parent, fork, tokens_per_update, max(stage.row_tokens for stage in stages)),
        "rows": rows,
        "lengths": {length: lengths[length] for length in sorted(lengths, key=int)},
    }


def _batch(parent: RunSettings, fork: int, tokens_per_update: int | None, longest_row: int) -> Any:
    """The parent's batch, or its ramp up to the fork and then another batch."""
    value = dump(parent)["tokens_per_update"]
    if tokens_per_update is not None:
        ramp = [piece.model_dump(mode="json", by_alias=True) for piece in parent.batch_pieces]
        before = [piece for piece in ramp if piece["from"] < fork]
        before[-1]["to"] = fork
        value = [*before, {"from": fork, "to": None, "tokens": tokens_per_update}]
        in_use = [tokens_per_update]
    else:
        in_use = [piece.tokens for piece in parent.batch_pieces if piece.to_tokens is None or piece.to_tokens > fork]
    for tokens in in_use:
        if tokens % longest_row:
            raise Refusal(
                f"updates of {tokens:,} tokens are not a whole number of rows of {longest_row:,}; say how many tokens "
                "an update of the branch takes (--tokens-per-update), or use shorter long rows (--long-row-tokens)"
            )
    return value
