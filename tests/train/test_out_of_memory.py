"""An update that lacks memory: the line is saved as before it, says the remedy, and goes on with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_line import journal_summary, make_data_line, make_run, prepare, run_here, state_of, tensors_of

from nstrain.base.errors import ExitCode
from nstrain.gpu.arena import ArenaTooSmall
from nstrain.train import engine as engine_module
from nstrain.train import loop
from nstrain.train.adamw import adamw_update
from nstrain.train.engine import Engine, TokenRows, UpdateReadings, train_update
from nstrain.train.memory_errors import OutOfMemory, first_line, memory_told, want_of_memory

LAST_UPDATE = 13


def failing(
    make_error: Callable[[], BaseException], at_update: int, micro_batch: int, in_apply: bool
) -> Callable[..., UpdateReadings]:
    """`train_update`, but for one update that fails after some micro-batches (3: after all, before its end).

    Or `in_apply`, with the first group's weights written and the others' not.
    """
    seen = 0

    def adamw_once(*arguments: Any) -> None:
        adamw_update(*arguments)
        raise make_error()

    def update(engine: Engine, rows: TokenRows, micro_rows: int, *rates: float) -> UpdateReadings:
        nonlocal seen
        seen += 1
        if seen != at_update:
            return train_update(engine, rows, micro_rows, *rates)
        for first in range(0, micro_batch * micro_rows, micro_rows):
            engine.accumulate(rows[first : first + micro_rows], 1e6)
        if in_apply:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine_module, "adamw_update", adamw_once)
                return train_update(engine, rows, micro_rows, *rates)
        try:
            raise make_error()
        except Exception as error:
            raise RuntimeError("operation not permitted when stream is capturing") from error  # as a capture's end does

    return update


@pytest.mark.parametrize(
    ("micro_batch", "in_apply"), [(0, False), pytest.param(1, False, marks=pytest.mark.slow), (3, False), (0, True)]
)
def test_the_state_before_the_update_is_saved_and_the_line_goes_on_from_it(
    micro_batch: int, in_apply: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for an update that was being applied: then it goes on from the checkpoint before."""
    data = make_data_line(tmp_path / "data", 1)
    prepare(data.work, 1)
    through, line = (make_run(tmp_path / name, data) for name in ("through", "line"))
    assert run_here(through) == ExitCode.DONE
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nSee documentation for more")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_update", failing(lambda: error, 7, micro_batch, in_apply))
        with pytest.raises(OutOfMemory) as raised:
            run_here(line)
    assert str(raised.value) == (
        "update 7, with micro-batches of 2 x 32 tokens, did not find the memory that it needs: CUDA out of memory. "
        "Tried to allocate 20 GiB. Set fewer micro_rows, or recompute more, in run.json's lengths['32']; "
        "`nstrain tune RUN` finds the fastest that fits (with --measure-only for a line that has trained)"
    )
    if in_apply:
        assert line.checkpoint_updates() == [0, 4]
    else:
        assert (state_of(line, 6)["reason"], state_of(line, 6)["kept"]) == ("stop", False)
        assert tensors_of(line, 6).keys() == tensors_of(through, LAST_UPDATE).keys()
    assert run_here(line) == ExitCode.DONE
    assert journal_summary(line) == journal_summary(through)
    assert tensors_of(line, LAST_UPDATE) == tensors_of(through, LAST_UPDATE)


def test_a_line_that_cannot_be_opened_for_want_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"
        )

    monkeypatch.setattr("nstrain.train.opening._make_trainer", fail)
    with pytest.raises(OutOfMemory, match="^the line, as it was opened, did not find .* 4096 bytes. .*`ulimit -v`"):
        run_here(make_run(tmp_path / "run", make_data_line(tmp_path / "data", 1)))


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="^an illegal address$"), memory_told("work", "help"):
        raise RuntimeError("an illegal address")
    for words in ("CUDA error: an illegal memory access was encountered", "CUDA error: uncorrectable ECC error"):
        assert want_of_memory(RuntimeError(words)) is None
    beside_the_allocator = (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",  # a graph is instantiated
        "Triton Error [CUDA]: out of memory",  # a kernel is loaded
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    )
    others = [RuntimeError(words) for words in ("DefaultCPUAllocator: not enough memory", *beside_the_allocator)]
    for error in (ArenaTooSmall("too small"), MemoryError(), *others):
        with pytest.raises(OutOfMemory, match="^work did not find .* help$"), memory_told("work", "help"):
            raise error
    assert want_of_memory(ValueError()) is None
    assert first_line(MemoryError()) == "out of memory"


CHILD = """
import sys, torch
sys.path[:0] = sys.argv[1:]
from test_graphs import neuronspark, random_rows, state_bytes
from train_helpers import optimizer_settings
from nstrain.settings.run import LengthSettings
from nstrain.train.engine import train_update
from nstrain.train.graphs import GraphEngine
from nstrain.train.memory_errors import OutOfMemory, memory_told

how, engine = "{how}", GraphEngine(neuronspark(), optimizer_settings(), {hold}, with_ema=True)
engine.set_length(LengthSettings(micro_rows=2))
if {before}:
    train_update(engine, random_rows(4, 64, vocab_size=256), 2, 1e-3, 0.1, 0.5)
before = state_bytes(engine)
free, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + {room}) / total)
engine.set_length(LengthSettings(micro_rows={rows}))
if how == "in the capture":
    micro_batch = engine._micro_batch

    def fails_at_its_end(tokens):
        micro_batch(tokens)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory, made up")

    engine._micro_batch = fails_at_its_end
try:
    with memory_told("update 2", "use less"):
        train_update(engine, random_rows({rows}, 2048, vocab_size=256), {rows}, 1e-3, 0.1, 0.5)
except OutOfMemory as error:
    print("told:", error)
else:
    raise SystemExit("it fitted")
assert state_bytes(engine) == before
print("the state is whole", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("before", [False, True], ids=["first capture", "later capture"])
@pytest.mark.parametrize("how", ["no memory", "a small arena", "in the capture"])
def test_on_a_card_the_state_can_be_read_after_a_capture_that_failed(how: str, before: bool) -> None:
    """In a process of its own: what a failed capture took is lost to it."""
    room, rows = {"no memory": (64 << 20, 64), "a small arena": (16 << 30, 64), "in the capture": (16 << 30, 2)}[how]
    script = CHILD.format(how=how, hold=1 << 30, before=before, room=room, rows=rows)
    here = Path(__file__).parent
    child = subprocess.run(
        [sys.executable, "-c", script, str(here), str(here.parents[1]), str(here.parent / "helpers")],
        env=os.environ,
        capture_output=True,
        text=True,
    )
    told = f"exit code {child.returncode}: {child.stdout[-1000:]} {child.stderr[-3000:]}"
    assert "told: update 2 did not find the memory that it needs" in child.stdout, told
    assert child.stdout.endswith("the state is whole\n"), told
