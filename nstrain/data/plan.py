"""`nstrain data plan`: what the schedule takes of every source, and what it costs, before anything is read."""

from __future__ import annotations

import dataclasses
from typing import Any

from nstrain.data.line import DataLine
from nstrain.data.manifest import states_before
from nstrain.data.opening import expected_left

OPEN_ENDED_CYCLES = 10_000
"""Cycles of an open-ended schedule that are looked at; what lasts longer is said to last."""


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """One source under the schedule; tokens are estimates wherever files have not been opened."""

    source: str
    left_tokens: int
    """Trainable tokens left after what is prepared."""
    cycle_tokens: int
    """What the next cycle takes of it (0 if its recipe leaves it out)."""
    takes_tokens: int | None
    """What the cycles not yet prepared take of it; None if the schedule is open-ended."""
    runs_out_in_cycle: int | None
    """The first cycle that it is not expected to fill; None if it lasts."""

    @property
    def short(self) -> bool:
        """Whether the closed schedule takes more than there is."""
        return self.takes_tokens is not None and self.runs_out_in_cycle is not None


@dataclasses.dataclass(frozen=True)
class LinePlan:
    """A data line's schedule from the first cycle that is not prepared."""

    next_cycle: int
    cycle_count: int | None
    cycle_bytes: int
    """Token files of the next cycle (a cycle in use and one ahead are on disk together)."""
    prepare_s: float
    """Seconds to encode it with one process, at the speed of the calibration."""
    sources: tuple[SourcePlan, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def plan_line(line: DataLine) -> LinePlan | None:
    """Look ahead; None if every cycle of the schedule is prepared. No source's file is read."""
    calibration = line.calibration()
    count = line.cycle_count
    upcoming = 1
    while line.manifest_path(upcoming).exists():
        upcoming += 1
    if count is not None and upcoming > count:
        return None
    before = states_before(line, upcoming)
    plans = []
    for name in line.source_names:
        rates = calibration.rates(line.source(name), line.listing(name))
        left = expected_left(line.listing(name), before[name], rates)
        takes, out_in = 0, None
        for cycle in range(upcoming, (count or upcoming + OPEN_ENDED_CYCLES) + 1):
            plan = line.cycle_plan(cycle)
            targets = dict(zip(plan.sources, plan.source_tokens, strict=True)).get(name, 0)
            takes += targets
            if targets and takes + 1 > left and out_in is None:
                out_in = cycle
                if count is None:
                    break
        first = line.cycle_plan(upcoming)
        in_first = dict(zip(first.sources, first.source_tokens, strict=True)).get(name, 0)
        plans.append(SourcePlan(name, left, in_first, takes if count is not None else None, out_in))
    first = line.cycle_plan(upcoming)
    return LinePlan(
        next_cycle=upcoming,
        cycle_count=count,
        cycle_bytes=(first.tokens + len(first.sources)) * line.token_dtype.itemsize,
        prepare_s=first.tokens / calibration.tokens_per_s,
        sources=tuple(plans),
    )
