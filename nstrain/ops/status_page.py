"""A line's status as a page for people: `nstrain status` prints it, `nstrain run --foreground` keeps it up to date."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nstrain.base.units import human_bytes, human_count, human_seconds
from nstrain.ops.status import State, Status

STATE_STYLE: dict[State, str] = {
    "new": "cyan",
    "running": "green",
    "waiting": "yellow",
    "stopped": "yellow",
    "failed": "bold red",
    "done": "bold green",
}
"""The colour of each state."""

BAR_COLUMNS = 40


def render(status: Status) -> RenderableType:
    """The page: state, progress, losses, data, checkpoints and what they take on disk."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(status):
        table.add_row(name, Text(value) if isinstance(value, str) else value)  # a plain string would be read as markup
    return Group(_title(status), Padding(Group(*_bar(status), table), (0, 0, 0, 2)))


def _title(status: Status) -> Text:
    title = Text(status.run, style="bold")
    title.append(f"  {status.preset}  ", style="dim")
    title.append(status.state, style=STATE_STYLE[status.state])
    if status.stopping and status.state in ("running", "waiting"):
        title.append(", asked to stop", style="yellow")
    return title


def _bar(status: Status) -> list[RenderableType]:
    """How much of the schedule is trained; nothing for an open-ended one."""
    if status.tokens_total is None:
        return []
    grid = Table.grid(padding=(0, 2))
    left = "" if status.eta_s is None or status.state == "done" else f"{human_seconds(status.eta_s)} left"
    bar = ProgressBar(total=max(1, status.tokens_total), completed=status.tokens, width=BAR_COLUMNS)
    grid.add_row(bar, f"{100 * status.tokens / max(1, status.tokens_total):.1f} %", left)
    return [grid]


def _rows(status: Status) -> list[tuple[str, RenderableType]]:
    """The page's lines: what each is about, and its text."""
    rows: list[tuple[str, RenderableType]] = []
    if status.reason:
        rows.append(("why", Text(status.reason, style="red" if status.state == "failed" else "")))
    if status.waiting_for:
        since = "" if status.waiting_since is None else f", for {human_seconds(time.time() - status.waiting_since)}"
        rows.append(("waiting for", Text(status.waiting_for + since, style="yellow")))
    if status.stage is not None:
        rows.append(("stage", status.stage.replace("_", " ")))
    rows.append(("update", _training(status)))
    if status.validation:
        readings = [f"{name} {_loss(value)}" for name, value in _shown_validation(status)]
        rows.append((f"valid. u{status.validated_update}", "  ".join(readings)))
    rows.append(("data", _data(status)))
    rows.append(("checkpoints", _checkpoints(status)))
    disk = status.disk
    rows.append(
        (
            "disk",
            f"checkpoints {human_bytes(disk.checkpoints_bytes)}, journal {human_bytes(disk.journal_bytes)}, "
            f"data cycles {human_bytes(disk.cycles_bytes)}; {human_bytes(disk.free_bytes)} free",
        )
    )
    if status.differences:
        text = (
            f"{status.differences} replayed updates differed from their first record; both versions are in the journal"
        )
        rows.append(("replays", Text(text, style="bold red")))
    return rows


def _training(status: Status) -> str:
    total = "" if status.tokens_total is None else f" of {human_count(status.tokens_total)}"
    parts = [f"{status.update:,}", f"{human_count(status.tokens)}{total} tokens"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.learning_rate is not None:
        parts.append(f"rate {status.learning_rate:.3g}")
    if status.tokens_per_s is not None:
        parts.append(f"{human_count(status.tokens_per_s)} tokens/s")
    return "  ".join(parts)


def _shown_validation(status: Status) -> list[tuple[str, float | None]]:
    """The readings' short names: the length once, the mix and the mean first."""
    first = {"mix": 0, "mean": 1}
    names = sorted(status.validation, key=lambda name: (first.get(name.rpartition("/")[2], 2), name))
    lengths = {name.partition("/")[0] for name in names}
    short = {name: name.partition("/")[2] if len(lengths) == 1 else name for name in names}
    return [(short[name], status.validation[name]) for name in names]


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _data(status: Status) -> str:
    count = "" if status.cycle_count is None else f" of {status.cycle_count}"
    parts = []
    if status.cycle is not None:
        trained = "" if status.cycle_progress is None else f" ({100 * status.cycle_progress:.0f} % trained)"
        parts.append(f"cycle {status.cycle}{count}{trained}")
    ahead = sum(1 for cycle in status.cycles_ready if status.cycle is None or cycle > status.cycle)
    parts.append(f"{ahead} ready ahead")
    if status.preparer is not None:
        parts.append(f"preparer: {status.preparer}")
    return ", ".join(parts)


def _checkpoints(status: Status) -> str:
    if status.checkpoint is None:
        return "none yet"
    return f"{status.checkpoint} is the newest of {len(status.checkpoints)}"
