"""What a line will take of its disks next, beside what is free there."""

from __future__ import annotations

import shutil
from pathlib import Path

from nstrain.base.errors import Refusal
from nstrain.base.units import human_bytes
from nstrain.data.line import DataLine
from nstrain.data.room import bytes_to_open, disk_room
from nstrain.data.tables import cycle_tables_bytes
from nstrain.line.checkpoint import TENSOR_FILES
from nstrain.line.listing import forecast_of, keeping_of, list_checkpoints
from nstrain.line.paths import LinePaths
from nstrain.settings.model import dump
from nstrain.settings.run import RunSettings


def states_of_a_checkpoint(settings: RunSettings) -> int:
    """fp32 tensors that a checkpoint holds for each parameter: value, two moments, and the average if one is kept."""
    return len(TENSOR_FILES) + (settings.ema is not None)


def refuse_small_disk(paths: LinePaths, settings: RunSettings, line: DataLine, parameters: int) -> str:
    """Compare what the line takes next with what is free; say what it will take by the schedule's end.

    Checkpoints: those up to the next one that is kept (`disk_forecast`). Data: the cycle in use, those ahead and the
    one being made, and the files that are opened for the next one; beside them the preparer leaves room for
    checkpoints, also of other lines on the data line. Raises `Refusal` for a disk without that room.
    """
    usage = shutil.disk_usage(paths.root)
    one = states_of_a_checkpoint(settings) * 4 * parameters
    checkpoints = list_checkpoints(paths)
    forecast = forecast_of(checkpoints, keeping_of(dump(settings)), line.cycle_count, one, usage.free)
    done = next((item.cycle - 1 for item in checkpoints if item.latest and item.cycle), 0)
    left = settings.data.ahead_cycles + 2 if line.cycle_count is None else line.cycle_count - done
    cycles = range(done + 1, done + 1 + min(settings.data.ahead_cycles + 2, left))
    to_make = [number for number in cycles if not line.is_ready(number)]
    data_bytes = sum(line.cycle_bytes(number) for number in to_make)
    if to_make:  # how long documents are is known as of the first
        data_bytes += bytes_to_open(line, to_make[0]) + cycle_tables_bytes(line, to_make[0]) * len(to_make)
    others = {run: room for run, room in disk_room(line).for_checkpoints.items() if Path(run) != paths.root}
    beside = f" and room for the next checkpoints of {', '.join(others)}" if others else ""
    needs = [
        (paths.root, forecast.next_bytes, f"checkpoints of {human_bytes(forecast.checkpoint_bytes)}"),
        (line.work, data_bytes + sum(others.values()), f"{len(cycles)} data cycles with opened files{beside}"),
    ]
    one_disk = paths.root.stat().st_dev == line.work.stat().st_dev
    if one_disk:
        needs = [(paths.root, needs[0][1] + needs[1][1], f"{needs[0][2]} and {needs[1][2]}")]
    for place, needed_bytes, what in needs:
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < needed_bytes:
            raise Refusal(
                f"{place}: the line will soon take {human_bytes(needed_bytes)} more ({what}), "
                f"{human_bytes(free_bytes)} are free there; free space, or keep less "
                "(checkpoints.keep_last, data.ahead_cycles in run.json)"
            )
    soon = "; ".join(f"{human_bytes(needed)} more soon ({what})" for _, needed, what in needs if needed)
    if forecast.end_bytes is None:
        end = f"each data cycle keeps another checkpoint: {forecast.cycles_that_fit:,} fit"
    elif forecast.fits_end:
        end = f"checkpoints up to the schedule's end: {human_bytes(forecast.end_bytes)}"
    else:
        end = (
            f"the schedule's end does NOT fit: its checkpoints take {human_bytes(forecast.end_bytes)}, "
            f"{forecast.cycles_that_fit:,} more cycles do (remove some with `nstrain checkpoints` on the way)"
        )
    first = "; the preparer leaves the checkpoints their part" if one_disk and forecast.next_bytes else ""
    return f"{soon or 'no more soon'}{first}; {human_bytes(usage.free)} free; {end}"
