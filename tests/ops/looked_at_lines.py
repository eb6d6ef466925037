"""Lines as `status` may find them: the files that processes leave, and the page as text."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from small_lines import ROW_TOKENS, UPDATE_TOKENS

from nstrain.base.disk import atomic_write_json
from nstrain.base.process import this_process
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    write_heartbeat,
    write_supervisor,
)
from nstrain.ops.status import Status
from nstrain.ops.status_page import render
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, load_run


def work_of(paths: LinePaths) -> Path:
    """The line's data line."""
    return Path(load_run(paths.run_json).data.work)


def page(look: Status) -> str:
    """The page as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(render(look))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def record(paths: LinePaths, updates: int, loss: float = 2.5) -> None:
    """Rows up to an update, every eighth with a validation."""
    with Journal.open(paths.journal, METRICS_VERSION) as journal:
        first = journal.last_update()
        for update in range(0 if first is None else first + 1, updates + 1):
            row = {"tokens": update * UPDATE_TOKENS, "cycle": 1 + update // 9, "row_tokens": ROW_TOKENS, "rows": 8}
            if update:
                row |= {"train/loss": loss, "train/learning_rate": 1e-3, "perf/tokens_per_s": 1000.0}
            if update % 8 == 0:
                losses = {"mix": 3.0 + update, "mean": 4.0 + update / 2, "prose": 2.0 + update}
                row |= {f"val_{ROW_TOKENS}/{name}": loss for name, loss in losses.items()}
            journal.commit(update, row)


def supervise(paths: LinePaths, **fields: Any) -> None:
    """supervisor.json of this process."""
    write_supervisor(paths, SupervisorState(this_process(), time.time(), **fields))


def beat(paths: LinePaths, pid: int, **fields: Any) -> None:
    """A trainer's heartbeat of now."""
    values: dict[str, Any] = {"stage": "training", "update": 5, "tokens": 5 * UPDATE_TOKENS, **fields}
    write_heartbeat(paths, Heartbeat(time=time.time(), pid=pid, **values))


def save(paths: LinePaths, update: int) -> None:
    """A checkpoint as far as status looks into one."""
    paths.checkpoint(update).mkdir(parents=True)
    (paths.checkpoint(update) / "weights.safetensors").write_bytes(b"x" * 1000)
    state = {"update": update, "tokens": update * UPDATE_TOKENS}
    atomic_write_json(paths.checkpoint(update) / "state.json", state)
    paths.latest.write_text(paths.checkpoint(update).name + "\n")
