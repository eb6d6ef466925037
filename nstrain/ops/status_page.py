"""A line's status as a page for people: `nstrain status` prints it, `nstrain run --foreground` keeps it up to date."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nstrain.base.commands import typed
from nstrain.base.errors import Interrupted
from nstrain.base.units import human_bytes, human_count, human_seconds
from nstrain.ops.status import State, Status
from nstrain.ops.status import status as read_status
from nstrain.ops.status_disk import DiskUse
from nstrain.ops.status_life import how_to_go_on, silence
from nstrain.ops.status_mirror import TrackerNow
from nstrain.record.alarms import in_short

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

WATCH_S = 1.0
"""How often a page that is watched is drawn."""

BARS = "▁▂▃▄▅▆▇█"


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
        since = (
            "" if status.waiting_since is None else f", for {human_seconds(max(0, time.time() - status.waiting_since))}"
        )
        rows.append(("waiting for", Text(status.waiting_for + since, style="yellow")))
    if status.stop_at_cycle_end is not None:
        rows.append(("asked", Text(f"to stop at the end of cycle {status.stop_at_cycle_end}", style="yellow")))
    if status.failures:
        text = f"{status.failures} launches in a row failed: {status.last_failure}"
        rows.append(("failures", Text(text, style="bold red")))
    if status.preparer_failures:
        text = f"failed {_times(status.preparer_failures)} in a row and is tried again; the last time: "
        rows.append(("preparer", Text(text + (status.preparer_failure or "run.log says why"), style="bold red")))
    if status.stage is not None:
        beside = "" if status.gpu_others is None else f", beside {status.gpu_others}"
        rows.append(("stage", status.stage.replace("_", " ") + beside))
    if status.silent_s is not None:
        rows.append(("", Text(silence(status.silent_s, status.budget_s), style="yellow")))
    if status.stopped_pids:
        rows.append(("", Text(how_to_go_on(status.stopped_pids), style="yellow")))
    rows.append(("update", _training(status)))
    if status.losses:
        rows.append(("loss", _loss_curve(status)))
    rows += _validation(status)
    rows += [("alarm", Text(alarm, style="bold red")) for alarm in in_short(list(status.alarms))]
    rows.append(("data", _data(status)))
    rows.append(("checkpoints", _checkpoints(status)))
    if status.slow_saving is not None:
        rows.append(("", Text(f"they stop the line, {status.slow_saving}", style="yellow")))
    rows.append(("disk", _disk(status.disk)))
    if status.differences:
        text = (
            f"{status.differences} replayed updates differed from their first record; both versions are in the journal"
        )
        rows.append(("replays", Text(text, style="bold red")))
    if status.tracker is not None:
        rows.append((status.tracker.service, _tracker(status.tracker, status)))
    if status.generation > 1:
        rows.append(("generation", f"{status.generation}: went back {_times(status.generation - 1)}"))
    if status.branch_of is not None:
        rows.append(("branch of", status.branch_of))
    if status.branches:
        rows.append(("branches", ", ".join(status.branches)))
    return rows


def _tracker(tracker: TrackerNow, status: Status) -> Text:
    """How far the copy is, where it is seen, and what is wrong with it."""
    through = "nothing sent yet"
    if tracker.pushed_through is not None:
        through = f"through update {tracker.pushed_through:,}"
    behind = "" if not tracker.behind_updates else f", {tracker.behind_updates:,} behind"
    text = Text(through + behind + ("" if tracker.url is None else f"  {tracker.url}"))
    if tracker.error is not None:
        now = time.time()
        since = "" if tracker.failing_since is None else f" for {human_seconds(max(0, now - tracker.failing_since))}"
        text.append(f"\nfailing{since}: {tracker.error}", style="yellow")
    if behind and tracker.pid is None and status.state not in ("running", "waiting"):
        text.append(f"\n`{typed('nstrain', 'mirror', status.run)}` sends the rest")
    if tracker.differences:
        rows = "an update" if tracker.differences == 1 else f"{tracker.differences:,} updates"
        text.append(f"\nit has another row than the journal of {rows}", style="bold red")
    return text


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


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


def _loss_curve(status: Status) -> Text:
    """The last losses as a row of bars, and where they go."""
    low, high = min(status.losses), max(status.losses)
    step = (high - low) / (len(BARS) - 1) or 1.0
    text = Text("".join(BARS[round((loss - low) / step)] for loss in status.losses), style="cyan")
    if status.loss_trend is not None:
        number = status.trend_updates
        text.append(f"  {status.loss_trend:+.4f}, the last {number} updates against the {number} before", style="")
    return text


def _validation(status: Status) -> list[tuple[str, RenderableType]]:
    """A line for each row length and kind of weights: the mix and the mean first, then the sources."""
    groups: dict[str, list[str]] = {}
    for name in status.validation:
        groups.setdefault(name.rpartition("/")[0], []).append(name)
    rows: list[tuple[str, RenderableType]] = []
    order = {"mix": 0, "mean": 1}
    for group in sorted(groups, key=lambda group: (group.startswith("ema/"), len(group), group)):
        names = sorted(groups[group], key=lambda name: (order.get(name.rpartition("/")[2], 2), name))
        shown = "  ".join(f"{name.rpartition('/')[2]} {_loss(status.validation[name])}" for name in names)
        # The mean, not the mix: that steps where the mixture changes.
        before, now = status.validation_before.get(f"{group}/mean"), status.validation.get(f"{group}/mean")
        if before is not None and now is not None:
            shown += f"  (mean {now - before:+.4f} since u{status.validated_before})"
        label = group.replace("val_", "").replace("ema/", "average, ")
        rows.append((f"valid. u{status.validated_update}" if not rows else "", f"{label}: {shown}"))
    return rows


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
    if status.ahead_tokens:
        lasts = "" if status.ahead_s is None else f", {human_seconds(status.ahead_s)} at this speed"
        parts.append(f"{human_count(status.ahead_tokens)} tokens prepared{lasts}")
    if status.preparer is not None:
        parts.append(f"preparer: {status.preparer}")
    return ", ".join(parts)


def _checkpoints(status: Status) -> str:
    if status.checkpoint is None:
        return "none yet"
    age = "" if status.checkpoint_at is None else f", {human_seconds(max(0, time.time() - status.checkpoint_at))} old"
    rolling = len(status.checkpoints) - status.kept_checkpoints
    return f"{status.checkpoint} is the newest{age}; {status.kept_checkpoints} kept, {rolling} rolling"


def _disk(disk: DiskUse) -> str:
    kinds = {
        "kept checkpoints": disk.kept_bytes,
        "rolling": disk.rolling_bytes,
        "set aside": disk.set_aside_bytes,
        "journal": disk.journal_bytes,
        "logs": disk.logs_bytes,
        "tune": disk.tune_bytes,
        "tracker": disk.tracker_bytes,
        "data cycles": disk.cycles_bytes,
        "opened files": disk.opened_bytes,
        "fetched files": disk.downloads_bytes,
    }
    taken = ", ".join(f"{name} {human_bytes(size)}" for name, size in kinds.items() if size)
    coming = "" if not disk.end_bytes else f", checkpoints will take up to {human_bytes(disk.end_bytes)} more"
    left = f" ({human_bytes(disk.reserved_bytes)} of it the preparer leaves for checkpoints)"
    free = f"{human_bytes(disk.free_bytes)} free{left if disk.reserved_bytes else ''}"
    return f"{taken or 'nothing yet'}; {free}{coming}"


def watch_page(run: Path, console: Console) -> None:
    """Keep a line's page up to date on a console until the reader has seen enough (Ctrl-C)."""
    with contextlib.suppress(Interrupted, KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(render(read_status(run)), refresh=True)
            time.sleep(WATCH_S)
