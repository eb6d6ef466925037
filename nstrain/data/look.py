"""`nstrain data status`: where a data line stands, from its small files alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from nstrain.base.disk import bytes_below
from nstrain.data.consumers import Consumer, read_consumers
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import PreparerStatus, preparer_lock, read_status
from nstrain.data.room import DiskRoom, disk_room
from nstrain.data.supply import DOWNLOADS


@dataclasses.dataclass(frozen=True)
class DataStatus:
    """A data line at one moment."""

    work: str
    cycle_count: int | None
    """Cycles of the schedule; None: open-ended."""
    prepared_cycles: int
    """Cycles that have a manifest."""
    cycles_on_disk: tuple[int, ...]
    """Those whose tokens lie there now."""
    held_out: bool
    """Whether `data val` has run."""
    preparing: bool
    """Whether a preparer runs."""
    preparer: PreparerStatus | None
    """What it does, or the last one did."""
    consumers: tuple[Consumer, ...]
    cycles_bytes: int
    open_bytes: int
    """The cache of opened files."""
    downloads_bytes: int
    """Files of hub sources that were fetched and are not open yet."""
    disk: DiskRoom

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = {**vars(self), "disk": dataclasses.asdict(self.disk)}
        plain["consumers"] = [consumer.model_dump(mode="json") for consumer in self.consumers]
        return {**plain, "preparer": None if self.preparer is None else dataclasses.asdict(self.preparer)}


def data_status(line: DataLine) -> DataStatus:
    """Look at a data line."""
    prepared = 0
    while line.manifest_path(prepared + 1).exists():
        prepared += 1
    return DataStatus(
        work=str(line.work),
        cycle_count=line.cycle_count,
        prepared_cycles=prepared,
        cycles_on_disk=tuple(cycles_on_disk(line)),
        held_out=(line.work / "val" / "index.json").exists(),
        preparing=preparer_lock(line.work).held_elsewhere(),
        preparer=read_status(line.work),
        consumers=tuple(read_consumers(line.work)),
        cycles_bytes=bytes_below(line.work / "cycles"),
        open_bytes=bytes_below(line.work / "open"),
        downloads_bytes=bytes_below(line.work / DOWNLOADS),
        disk=disk_room(line),
    )
