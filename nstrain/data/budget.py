"""Whether a schedule can be met, as far as bytes alone can tell."""

from __future__ import annotations

from collections.abc import Sequence

from nstrain.base.errors import Exhausted
from nstrain.data.encode import Encoder
from nstrain.data.line import PinnedSource
from nstrain.data.schedule import Schedule


def refuse_too_small(schedule: Schedule, sources: Sequence[PinnedSource], encoder: Encoder) -> None:
    """Refuse a schedule that takes more of a source than its bytes can hold as tokens.

    Proven for text trees, whose files are one document each; bytes of rows may be compressed and prove nothing. An
    open-ended piece counts as one cycle. Raises `Exhausted`.
    """
    for source in sources:
        if source.settings.reader != "text":
            continue
        name = source.settings.name
        need = schedule.tokens_of(name) + 1
        most = encoder.max_tokens(source.bytes, source.files)
        if most is not None and most < need:
            cycles = "one cycle" if schedule.cycle_count is None else f"{schedule.cycle_count} cycles"
            raise Exhausted(
                f"source {name}: {cycles} of the schedule take {need:,} tokens of it, but its {source.bytes:,} pinned "
                f"bytes give at most {most:,}; give it a smaller share, fewer or smaller cycles, or make a line with "
                "more text"
            )
