"""Whatever goes wrong between a line and its tracker, in any order: in the end the copy is the journal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_tracker import FakeClock, FakeService, Killed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mirror_lines import Line, copier, fast_directory

from nstrain.mirror import state as state_module
from nstrain.mirror.clock import MirrorPace
from nstrain.mirror.comparing import differing
from nstrain.mirror.state import MirrorState, read_state
from nstrain.mirror.whole import send_and_compare
from nstrain.record.journal_reader import Row

PACE = MirrorPace(poll_s=20.0, verify_s=300.0)
CALM_LIMIT_S = 12 * 3600.0

number, share, seconds = st.integers(1, 5), st.floats(0, 1), st.floats(1, 20_000)
events = st.one_of(
    st.just(("nothing",)),
    st.tuples(st.just("train"), number),
    st.tuples(st.just("roll back"), share),
    st.tuples(st.just("away"), seconds),
    st.tuples(st.just("refuse"), seconds),
    st.tuples(st.just("fail"), st.sampled_from(["open", "send", "read", "close", "supersede"])),
    st.tuples(st.just("work"),),
    st.tuples(st.just("lag"), st.floats(0, 150)),
    st.tuples(st.just("drop"), number),
    st.tuples(st.just("lose newest"), number),
    st.tuples(st.just("lose"), share),
    st.tuples(st.just("alter"), share),
    st.tuples(st.just("kill"), st.integers(0, 12)),
    st.just(("copy the journal",)),
    st.just(("put the copy back",)),
)  # fmt: skip


class World:
    """A line, its service, and what happens to them while the mirror waits."""

    def __init__(self, root: Path, script: list[tuple[Any, ...]]) -> None:
        self.line = Line(root / "line")
        self.clock = FakeClock(self.event)
        self.service = FakeService(self.clock)
        self.script = list(script)
        self.version = 0
        self.copy = root / "copy.db"
        self.lineages: dict[int, dict[int, list[Row]]] = {}
        """By generation and update the rows that the journal has had while that was its newest generation."""
        self.altered: set[tuple[str, int]] = set()
        self.calm_since: float | None = None
        self.line.train(3)
        self.take_note()

    def take_note(self) -> None:
        generation = max(self.generation(), 1)
        for update, row in self.line.rows().items():
            known = self.lineages.setdefault(generation, {}).setdefault(update, [])
            if row not in known:
                known.append(row)

    def generation(self) -> int:
        from nstrain.mirror.tail import newest_generation

        return newest_generation(self.line.paths.journal) or 0

    def event(self) -> bool:
        """The next event, or calm; whether the mirror is to end, since the copy is whole."""
        if self.script:
            self.apply(*self.script.pop(0))
            return False
        service = self.service
        if self.calm_since is None:
            self.calm_since = self.clock.time
            service.lag_s = service.away_until = service.refuses_until = 0.0
            service.drops, service.kill_in = 0, None
            service.away_for.clear()
        assert self.clock.time < self.calm_since + CALM_LIMIT_S, "the copy does not become whole"
        state = self.state()
        whole = state is not None and state.verified_through == max(self.line.rows())
        return whole and state.failing_since is None and all(run.marked for run in state.superseded)

    def state(self) -> MirrorState | None:
        return read_state(self.line.paths)

    def apply(self, what: str, *how: Any) -> None:
        service, line = self.service, self.line
        if what == "train":
            self.version += 1
            line.train(how[0], self.version)
            self.take_note()
        elif what == "roll back":
            line.roll_back(int(how[0] * max(line.rows())))
            self.take_note()
        elif what == "away":
            service.away_until = self.clock.time + how[0]
        elif what == "refuse":
            service.refuses_until = self.clock.time + how[0]
        elif what == "fail":
            service.away_for.add(how[0])
        elif what == "work":
            service.away_for.clear()
        elif what == "lag":
            service.lag_s = how[0]
        elif what == "drop":
            service.drops = how[0]
        elif what == "kill":
            service.kill_in = how[0]
        elif what == "copy the journal":
            shutil.copy(line.paths.journal, self.copy)
        elif what == "put the copy back" and self.copy.exists():
            shutil.copy(self.copy, line.paths.journal)
            self.take_note()
        else:
            self.apply_to_run(what, *how)

    def apply_to_run(self, what: str, *how: Any) -> None:
        state = self.state()
        if state is None or state.run_id not in self.service.runs:
            return
        rows = self.service.runs[state.run_id].rows
        if not rows:
            return
        if what == "lose newest":
            self.service.lose_newest(state.run_id, how[0])
        elif what == "lose":
            self.service.lose(state.run_id, sorted(rows)[int(how[0] * (len(rows) - 1))])
        elif what == "alter":
            update = sorted(rows)[int(how[0] * (len(rows) - 1))]
            self.service.alter(state.run_id, update, tokens=-1)
            self.altered.add((state.run_id, update))

    def mirror(self) -> None:
        """Mirrors, one after the other as they are killed, until one is told to end."""
        while True:
            mirror = copier(self.line, self.service, self.clock, PACE)
            try:
                mirror.run()
                mirror.end()
                return
            except Killed:
                self.service.kill_in = None


@contextmanager
def killed_between_writes(service: FakeService) -> Iterator[None]:
    """The instants before and after wandb_run.json is written are some at which the mirror may be killed."""
    write = state_module.write_state

    def watched(*arguments: Any) -> None:
        service.instant()
        write(*arguments)
        service.instant()

    with mock.patch.object(state_module, "write_state", watched):
        yield


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(script=st.lists(events, max_size=25))
def test_whatever_happens_the_copy_becomes_the_journal(script: list[tuple[Any, ...]]) -> None:
    check(script)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=st.lists(events, max_size=40))
def test_whatever_happens_the_copy_becomes_the_journal_often(script: list[tuple[Any, ...]]) -> None:
    check(script)


def check(script: list[tuple[Any, ...]]) -> None:
    with fast_directory() as directory:
        world = World(directory, script)
        with killed_between_writes(world.service):
            world.mirror()
        service, line = world.service, world.line
        world.clock.time += PACE.replacement_s  # whatever was replaced, may be again
        found = send_and_compare(copier(line, service, world.clock, PACE), line.paths)
        assert service.wrongs == []

        # The run is the journal, but for what was changed on either side since, which was found.
        rows, run = line.rows(), service.runs[found.run_id]
        differ = {update for update, row in rows.items() if differing(row, run.rows[update])}
        assert (found.updates, found.sent <= len(rows), found.different) == (len(rows), True, len(differ))
        assert found.beyond == max(0, run.top - max(rows))

        # No row of any run is one that the line did not have in the run's generation, but for altered ones.
        for run_id, one in service.runs.items():
            for update, row in one.rows.items():
                known = world.lineages[one.generation].get(update, [])
                fits = any(not differing(row, other) for other in known)
                assert fits or (run_id, update) in world.altered, (run_id, update, row, known)

        # Every run but the last is marked with what took its place.
        state = world.state()
        assert state is not None
        assert state.run_id == found.run_id
        assert {run.run_id for run in state.superseded} | {state.run_id} >= set(service.runs)
        ids = [*(run.run_id for run in state.superseded), state.run_id]
        for number, old in enumerate(state.superseded):
            if old.run_id in service.runs:
                by, why = service.runs[old.run_id].superseded or ("", "")
                assert by in ids[number + 1 :]
                assert why == old.why
