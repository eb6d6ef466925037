"""A line whose journal is copied to a tracker, while processes are killed and the service comes and goes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from cli_line import UPDATES, Running, make_line, nstrain, updates_recorded, wait_until
from wandb_stub import WandbStub


@pytest.mark.slow  # each part has quick tests: tests/mirror, tests/supervise/test_mirroring.py, test_whole_lines.py
def test_whatever_is_killed_the_copy_is_whole_in_the_end(tmp_path: Path) -> None:
    """The mirror, the trainer and the supervisor are killed, the service is away in between; then a rollback."""
    draw = random.Random(random.SystemRandom().random())
    targets = sorted(draw.sample(range(3, 26), 4))
    run = make_line(tmp_path, "--wandb-project", "lines")
    with WandbStub() as service:
        there = service.environment(tmp_path)
        running = Running(run, **there)
        for target, victim in zip(targets, ("mirror_pid", "trainer_pid", "service", "pid"), strict=True):
            wait_until(lambda u=target: updates_recorded(run) >= u, f"update {target}")
            if victim == "service":
                service.down()
            else:
                wait_until(lambda v=victim: _pid(run, v) is not None, victim)
                running.kill(victim)
        running.end()
        service.up()
        assert Running(run, **there).end() == 0
        assert _same(run, there), f"killed at updates {targets}"
        assert len(service.runs) == 1, "it went on in its run"

        nstrain("rollback", run, "--to", 20)
        assert Running(run, **there).end() == 0
        assert _same(run, there)
        old, new = service.runs.values()
        assert (old.tags, new.tags) == (["superseded"], [])
        generations = [[row["generation"] for row in copy.rows()] for copy in (old, new)]
        assert generations == [[1] * (UPDATES + 1), [1] * 21 + [2] * (UPDATES - 20)], "filled from the journal"
        assert json.loads(nstrain("status", run, "--json"))["differences"] == 0


def _pid(run: Path, name: str) -> int | None:
    found = json.loads((run / "supervisor.json").read_text())[name]
    return found if found is None else int(found)


def _same(run: Path, there: dict[str, str]) -> bool:
    """Whether every row of the journal stands on the service, each once."""
    found = json.loads(nstrain("mirror", run, "--json", **there))
    return bool(found["same"]) and found["updates"] == UPDATES + 1
