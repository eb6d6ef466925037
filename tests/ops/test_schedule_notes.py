"""What is allowed and hardly meant: updates that no cycle holds, ways of the rate that the schedule's end cuts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from small_lines import CYCLE_TOKENS, CYCLES

from nstrain.data.schedule import Piece, Schedule
from nstrain.line.paths import LinePaths
from nstrain.ops.check import check_line
from nstrain.ops.schedule_notes import schedule_notes
from nstrain.settings.run import RunSettings, load_run

UNIT_TOKENS = 64
FORK_TOKENS = 128


def schedule(*pieces: tuple[int | None, int], fork_tokens: int = 0) -> Schedule:
    """Pieces of so many cycles of so many tokens."""
    parts = (Piece(cycles=n, cycle_tokens=tokens, segment_units=1, recipe={"a": 1}) for n, tokens in pieces)
    return Schedule(tuple(parts), UNIT_TOKENS, fork_tokens)


def changed(paths: LinePaths, **fields: Any) -> RunSettings:
    """The line's settings with other fields."""
    value = json.loads(paths.run_json.read_text()) | fields
    return RunSettings.model_validate_json(json.dumps(value))


def ramp(*pieces: tuple[int, int | None, int]) -> list[dict[str, int | None]]:
    return [{"from": begins, "to": ends, "tokens": tokens} for begins, ends, tokens in pieces]


@pytest.mark.parametrize(
    ("batch", "pieces", "fork_tokens", "noted"),
    [
        (512, [(2, 512)], 0, []),
        (576, [(2, 512)], 0, [(576, 512, 1)]),
        (576, [(None, 512)], 0, [(576, 512, 1)]),
        (576, [(2, 512), (1, 640)], 0, [(576, 512, 1)]),
        (576, [(2, 640), (1, 512)], 0, [(576, 512, 3)]),
        (ramp((0, 1280, 64), (1280, None, 576)), [(2, 640), (1, 512)], 0, [(576, 512, 3)]),
        (ramp((0, 1280, 576), (1280, None, 64)), [(2, 640), (1, 512)], 0, []),
        (ramp((0, 128, 1024), (128, None, 64)), [(2, 512)], FORK_TOKENS, []),
        (ramp((0, 129, 1024), (129, None, 64)), [(2, 512)], FORK_TOKENS, [(1024, 512, 1)]),
    ],
)
def test_updates_larger_than_cycles(
    paths: LinePaths, batch: Any, pieces: Any, fork_tokens: int, noted: list[tuple[int, int, int]]
) -> None:
    settings = changed(paths, tokens_per_update=batch, learning_rate=[{"from": 0, "shape": "constant", "start": 0.1}])
    assert list(schedule_notes(settings, schedule(*pieces, fork_tokens=fork_tokens))) == [
        f"updates of {tokens:,} tokens are larger than a data cycle ({cycle:,} tokens from cycle {first} on): "
        "an update ends with its cycle, so none is of that size"
        for tokens, cycle, first in noted
    ]


@pytest.mark.parametrize(("ends", "noted"), [(1024, False), (1025, True)])
def test_a_warm_up_that_the_schedule_ends(paths: LinePaths, ends: int, noted: bool) -> None:
    rise = {"from": 0, "to": ends, "shape": "linear", "start": 0.0, "end": 0.1}
    after = {"from": ends, "shape": "constant", "start": 0.1}
    settings = changed(paths, tokens_per_update=64, learning_rate=[rise, after])
    notes = schedule_notes(settings, schedule((2, 512)))
    assert len(notes) == noted
    if noted:
        assert "from 0 to 0.1 at 1,025 tokens, beyond the schedule's end at 1,024: it comes to 0.0999" in notes[0]
    assert schedule_notes(settings, schedule((None, 512))) == (), "an open-ended schedule cuts nothing"


@pytest.mark.parametrize(("begins", "noted"), [(1023, False), (1024, True), (5000, True)])
def test_an_average_that_the_schedule_ends_before(paths: LinePaths, begins: int, noted: bool) -> None:
    settings = changed(paths, tokens_per_update=64, ema={"horizon_tokens": 64, "from_tokens": begins})
    notes = schedule_notes(settings, schedule((2, 512)))
    assert [f"would begin at {begins:,} tokens (ema.from_tokens)" in note for note in notes] == [True] * noted
    assert schedule_notes(settings, schedule((None, 512))) == ()


def test_check_and_new_say_so(paths: LinePaths) -> None:
    settings = load_run(paths.run_json)

    def updates() -> str:
        (found,) = (found for found in check_line(paths.root, quick=True) if found.name == "updates")
        assert found.ok
        return found.message

    assert updates() == "of 512 tokens"
    value = json.loads(paths.run_json.read_text())
    value["tokens_per_update"] = 2 * CYCLE_TOKENS
    paths.run_json.write_text(json.dumps(value))
    assert updates().startswith(
        f"of {2 * CYCLE_TOKENS:,} tokens; NOTE: updates of {2 * CYCLE_TOKENS:,} tokens are larger"
    )
    run = paths.root.with_name("other")
    options = ("--model", "tiny-32k", "--data", settings.data.work, "--peak-lr", "1e-3", "--device", "cpu")
    options = (*options, "--warmup-tokens", str(2 * CYCLES * CYCLE_TOKENS))
    command = [sys.executable, "-m", "nstrain.cli.main", "new", str(run), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "note: the learning rate is on its way from 0 to 0.001" in ran.stdout
