"""What run.json and a data line's schedule give together and is allowed, but is hardly ever meant."""

from __future__ import annotations

import math

from nstrain.data.schedule import Schedule
from nstrain.settings.run import RunSettings
from nstrain.train.schedule import learning_rate


def schedule_notes(settings: RunSettings, schedule: Schedule) -> tuple[str, ...]:
    """A sentence for each such thing: updates that no cycle holds, ways of the rate that the schedule's end cuts, an
    average that never begins.
    """
    return (
        *_batches_beyond_cycles(settings, schedule),
        *_rates_beyond_the_end(settings, schedule),
        *_average_beyond_the_end(settings, schedule),
    )


def _batches_beyond_cycles(settings: RunSettings, schedule: Schedule) -> list[str]:
    notes = []
    first_cycle, begins = 1, schedule.fork_tokens
    for piece in schedule.pieces:
        ends = math.inf if piece.cycles is None else begins + piece.cycles * piece.cycle_tokens
        for batch in settings.batch_pieces:
            in_use = batch.from_tokens < ends and (batch.to_tokens is None or batch.to_tokens > begins)
            if in_use and batch.tokens > piece.cycle_tokens:
                notes.append(
                    f"updates of {batch.tokens:,} tokens are larger than a data cycle ({piece.cycle_tokens:,} tokens "
                    f"from cycle {first_cycle} on): an update ends with its cycle, so none is of that size"
                )
        first_cycle, begins = first_cycle + (piece.cycles or 0), begins + (piece.cycles or 0) * piece.cycle_tokens
    return notes


def _rates_beyond_the_end(settings: RunSettings, schedule: Schedule) -> list[str]:
    end, pieces = schedule.total_tokens, settings.learning_rate
    if end is None:
        return []
    rate = learning_rate(pieces, end)
    holds = next((piece for piece in reversed(pieces) if piece.from_tokens < end), None)
    if holds is None or holds.to_tokens is None or holds.to_tokens <= end:
        return []
    return [
        f"the learning rate is on its way from {holds.start:g} to {holds.end:g} at {holds.to_tokens:,} tokens, beyond "
        f"the schedule's end at {end:,}: it comes to {rate:.3g}"
    ]


def _average_beyond_the_end(settings: RunSettings, schedule: Schedule) -> list[str]:
    end, average = schedule.total_tokens, settings.ema
    if average is None or end is None or average.from_tokens < end:
        return []
    return [
        f"the weights' average would begin at {average.from_tokens:,} tokens (ema.from_tokens), the schedule ends at "
        f"{end:,}: there is none before its last update"
    ]
