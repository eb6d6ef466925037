"""Whether a schedule can be met, as far as bytes alone can tell."""

from __future__ import annotations

from collections.abc import Mapping

from nstrain.base.errors import Exhausted
from nstrain.data.encode import Encoder
from nstrain.data.schedule import Schedule


def refuse_too_small(schedule: Schedule, sizes: Mapping[str, tuple[int, int]], encoder: Encoder) -> None:
    """Refuse a schedule that takes more of a source than its bytes can hold as tokens.

    `sizes` is each source's (bytes, documents at most). An open-ended piece counts as one cycle. Raises `Exhausted`.
    """
    for name, (size, documents) in sizes.items():
        need = schedule.tokens_of(name) + 1
        most = encoder.max_tokens(size, documents)
        if most is not None and most < need:
            cycles = "one cycle" if schedule.cycle_count is None else f"{schedule.cycle_count} cycles"
            raise Exhausted(
                f"source {name}: {cycles} of the schedule take {need:,} tokens of it, but its {size:,} pinned bytes "
                f"give at most {most:,}; give it a smaller share, take fewer or smaller cycles, or more text"
            )
