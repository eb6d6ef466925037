"""The tracker against the real client and a server that fails as it is told (wandb_stub.py)."""

from __future__ import annotations

import math
import random
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from wandb_driver import Away, Driver, Refuses, Row
from wandb_stub import ENTITY, WandbStub


def row(update: int) -> Row:
    """A row of a line's journal."""
    return {"update": update, "generation": 1, "tokens": 512 * update, "train/loss": 1 / (update + 3), "time/wall": 1e9}


def rows(first: int, last: int) -> list[Row]:
    return [row(update) for update in range(first, last + 1)]


def equal(ours: Row, theirs: Row) -> bool:
    """The same names, and the same numbers; NaN is NaN."""
    return ours.keys() == theirs.keys() and all(
        value == theirs[name] or (math.isnan(value) and math.isnan(theirs[name])) for name, value in ours.items()
    )


@pytest.fixture(scope="module")
def server() -> Iterator[WandbStub]:
    with WandbStub() as stub:
        yield stub


@pytest.fixture
def stub(server: WandbStub) -> Iterator[WandbStub]:
    """A server without faults."""
    yield server
    server.heal()
    if not server.listening:
        server.up()


@pytest.fixture(scope="module")
def environment(server: WandbStub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As a person has it who has logged in: the key stands in netrc. And with the remains of that person's scripts."""
    home = tmp_path_factory.mktemp("home")
    found = server.environment(home)
    key = found.pop("WANDB_API_KEY")
    (home / "netrc").write_text(f"machine {server.url.removeprefix('http://')}\n  login user\n  password {key}\n")
    theirs = {"WANDB_MODE": "offline", "WANDB_RUN_ID": "theirs", "WANDB_PROJECT": "theirs", "WANDB_SERVICE": "9-tcp-x"}
    return {**found, **theirs}


def _is_client_of(server: WandbStub, process: psutil.Process) -> bool:
    try:
        return process.name() == "wandb-core" and process.environ().get("WANDB_BASE_URL") == server.url
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def start(server: WandbStub, environment: dict[str, str]) -> Iterator[Callable[[], Driver]]:
    """Starts drivers. In the end no process of theirs may be left."""
    started = []

    def start_one() -> Driver:
        started.append(Driver(environment))
        return started[-1]

    yield start_one
    for one in started:
        one.kill()
    left = [process for process in psutil.process_iter(["name"]) if _is_client_of(server, process)]
    _, left = psutil.wait_procs(left, timeout=10)  # they end when their process is gone
    for process in left:
        process.kill()
    assert not left


@pytest.fixture(scope="module")
def shared(start: Callable[[], Driver]) -> Driver:
    """A process that goes through all sessions of this module, as a mirror does."""
    driver = start()
    driver("patience", poll_s=0.1)
    return driver


class Line:
    """One run of a driver."""

    def __init__(self, driver: Driver, stub: WandbStub, directory: Path, name: str) -> None:
        self.driver, self.stub, self.directory, self.id = driver, stub, directory, name

    def open(self, known: bool = True) -> dict[str, Any]:
        opened: dict[str, Any] = self.driver("open", run_id=self.id, directory=str(self.directory), known=known)
        return opened

    def send(self, first: int, last: int) -> None:
        self.driver("send", rows=rows(first, last))

    def whole(self, last: int) -> bool:
        """Whether the service has each row up to the last one, once."""
        return self.stub.runs[self.id].steps() == list(range(last + 1))


@pytest.fixture
def line(shared: Driver, stub: WandbStub, tmp_path: Path, request: pytest.FixtureRequest) -> Line:
    return Line(shared, stub, tmp_path / "wandb", "".join(c if c.isalnum() else "-" for c in request.node.name))


def test_a_run_is_taken_and_given_back_as_it_was(line: Line, stub: WandbStub) -> None:
    before = line.driver("left_behind")
    opened = line.open(known=False)
    assert opened["floor"] == 0
    assert Path(opened["directory"]).is_relative_to(line.directory)
    doubles = random.Random(0)
    odd: Row = {**row(1), "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "zero": -0.0, "many": 2**53}
    while len(odd) < 300:
        (value,) = struct.unpack("<d", doubles.randbytes(8))
        odd[f"optimizer/any_{len(odd)}"] = value
    sent = [row(0), odd, row(2), {**row(3), "time/wall": 1234567890.25}]
    line.driver("send", rows=sent)
    line.driver("close")

    stored = stub.runs[line.id]
    assert (stored.project, stored.entity, stored.group) == ("brains", ENTITY, "line-1")
    assert (stored.display_name, stored.state) == (f"name of {line.id}", "finished")
    assert stored.settings() == {"seed": 7, "nstrain": {"line": "line-1", "generation": 1}}
    assert stored.rows()[3]["_timestamp"] == 1234567890.25

    opened = line.open()
    assert (opened["floor"], opened["url"]) == (4, f"{stub.url}/{ENTITY}/brains/runs/{line.id}")
    found = line.driver("read", first=0, last=100)
    assert len(found) == 4
    assert all(map(equal, sent, found))
    assert [r["update"] for r in line.driver("read", first=1, last=2)] == [1, 2]
    line.send(4, 6)
    line.driver("close")
    assert line.whole(6)
    assert set(stub.runs[line.id].x_axes().values()) == {"tokens"}, "the charts of a resumed run have lost their x axis"
    after = line.driver("left_behind")
    assert after["files"] <= before["files"] + 2
    assert {**after, "files": 0} == {**before, "files": 0}
    assert "WANDB_MODE" in after["environment"], "another's environment is put back"


def test_a_row_below_the_floor_is_never_dropped_silently(line: Line) -> None:
    line.open(known=False)
    line.send(0, 3)
    with pytest.raises(RuntimeError, match="update 3 after 3"):
        line.send(3, 3)
    line.driver("close")


@pytest.mark.parametrize(
    ("endpoint", "status", "body", "kind"),
    [
        ("RunResumeStatus", 401, "invalid API key", Refuses),
        ("UpsertBucket", 403, "permission denied", Refuses),
        pytest.param("UpsertBucket", 404, "no such project", Refuses, marks=pytest.mark.slow),
        ("RunResumeStatus", 200, "<html>pay for your Wi-Fi</html>", Away),
        pytest.param("UpsertBucket", None, "", Away, marks=pytest.mark.slow),
    ],
)
def test_what_a_person_must_mend_is_told_from_what_passes(
    line: Line, stub: WandbStub, endpoint: str, status: int | None, body: str, kind: type[Exception]
) -> None:
    if status is None:
        stub.drop(endpoint)
    else:
        stub.fail(endpoint, status, body=body)
    with pytest.raises(kind, match=body if kind is Refuses else None):
        line.open(known=False)
    assert not list(line.directory.rglob("run-*")), "what a failed start has left would add up"
    stub.heal()
    assert line.open(known=False)["floor"] == 0
    line.driver("close")


@pytest.mark.slow
def test_a_run_that_is_gone_is_not_made_again(line: Line, stub: WandbStub) -> None:
    with pytest.raises(Refuses, match="does not exist"):
        line.open(known=True)
    line.open(known=False)
    line.driver("close")
    stub.delete(line.id)
    with pytest.raises(Refuses, match="does not exist"):
        line.open(known=True)
    with pytest.raises(Refuses, match="previously created and deleted"):
        line.open(known=False)


def test_the_clients_process_may_be_killed(line: Line, stub: WandbStub) -> None:
    line.open(known=False)
    line.send(0, 4)
    stub.wait_for(line.id, 5)
    (service,) = line.driver.service_processes()
    service.kill()
    while service.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(Away):
        line.driver("send", rows=rows(5, 1000))
    with pytest.raises(Away):
        line.driver("read", first=0, last=4)
    with pytest.raises(Away):
        line.driver("close")
    assert not line.driver.service_processes()
    assert line.open()["floor"] == 5
    line.send(5, 7)
    line.driver("close")
    assert line.whole(7)


@pytest.mark.slow
def test_killed_before_its_rows_are_taken_the_next_one_finds_where_to_go_on(
    line: Line, stub: WandbStub, start: Callable[[], Driver]
) -> None:
    first = Line(start(), stub, line.directory, line.id)
    first.open(known=False)
    first.send(0, 2)
    stub.wait_for(line.id, 3)
    (service,) = first.driver.service_processes()
    service.suspend()  # it takes the rows, and outlives its process
    first.send(3, 9)
    first.driver.kill()
    assert line.open()["floor"] == 3, "a start that was cut off finds its run, and what it lacks"
    assert not service.is_running(), "it could have sent its rows once the run was opened again"
    line.send(3, 12)
    line.driver("close")
    assert line.whole(12)


@pytest.mark.parametrize("cause", ["fatal", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_session_that_was_ended_on_the_service_fails_at_the_next_row(line: Line, stub: WandbStub, cause: str) -> None:
    line.open(known=False)
    line.send(0, 2)
    stub.wait_for(line.id, 3)
    if cause == "fatal":
        stub.fail("file_stream", 413, times=1)
    else:
        stub.stop_asked = True
    with pytest.raises(Away, match="the service has ended the session") as told:
        line.driver("send", rows=rows(3, 1000), pause_s=0.02)
    (update,) = map(int, re.findall(r"sending update (\d+)", str(told.value)))
    with pytest.raises(Away):
        line.driver("close")
    stub.heal()
    floor = line.open()["floor"]
    if cause == "fatal":
        assert floor == 3
    else:
        assert floor == update, "what was given before Stop was pressed is taken"
    line.send(floor, update)
    line.driver("close")
    assert line.whole(update)


@pytest.mark.slow
def test_failures_that_pass_lose_nothing(line: Line, stub: WandbStub) -> None:
    line.open(known=False)
    stub.fail("file_stream", 503, times=2)
    stub.drop("file_stream", times=1)
    stub.fail("file_stream", 429, times=1, Retry_After="0", RateLimit_Remaining="0", RateLimit_Reset="0")
    line.send(0, 5)
    line.driver("close")
    assert line.whole(5)
    assert stub.requests["file_stream"] > 4


@pytest.mark.slow
def test_closing_has_a_limit_while_the_service_is_away(line: Line, stub: WandbStub) -> None:
    line.open(known=False)
    line.send(0, 2)
    stub.wait_for(line.id, 3)
    stub.down()
    line.send(3, 4)
    begun = time.monotonic()
    with pytest.raises(Away, match="no end after 1 s"):
        line.driver("close", limit_s=1)
    assert time.monotonic() - begun < 5
    assert not line.driver.service_processes()
    with pytest.raises(Away):
        line.open()
    stub.up()
    assert line.open()["floor"] == 3
    line.send(3, 4)
    line.driver("close")
    assert line.whole(4)


@pytest.mark.slow
def test_a_client_that_takes_nothing_more_is_given_up(line: Line, stub: WandbStub) -> None:
    line.driver("patience", SEND_LIMIT_S=0.5)
    try:
        line.open(known=False)
        (service,) = line.driver.service_processes()
        service.suspend()
        wide = {f"wide/{number}": 0.1 for number in range(1000)}
        with pytest.raises(Away, match=r"sending update \d+: no end after 0.5 s"):
            line.driver("send", rows=[{**row(update), **wide} for update in range(100)])
    finally:
        line.driver("patience", SEND_LIMIT_S=120.0)
    assert line.open()["floor"] == 0
    line.driver("close")


def test_reading_tells_what_is_there_and_nothing_else(line: Line, stub: WandbStub) -> None:
    line.open(known=False)
    line.send(0, 9)
    stub.wait_for(line.id, 10)
    stub.last_step_lag = 2

    def steps() -> list[float]:
        return [found["update"] for found in line.driver("read", first=2, last=9)]

    assert steps() == [2, 3, 4, 5, 6, 7]
    stub.last_step_lag = 0
    stub.alter(line.id, 4, "train/loss", 5.0)
    assert line.driver("read", first=4, last=4) == [{**row(4), "train/loss": 5.0}]
    stub.lose_step(line.id, 6)
    assert steps() == [2, 3, 4, 5, 7, 8, 9]
    stub.lose_newest(line.id, 2)
    assert steps() == [2, 3, 4, 5, 7]
    stub.fail("HistoryPage", 403)
    with pytest.raises(Away, match="reading back"):
        steps()
    stub.heal()
    assert steps() == [2, 3, 4, 5, 7]
    line.driver("close")
    assert line.open()["floor"] == 8
    line.driver("close")


@pytest.mark.slow
def test_a_run_is_marked_as_superseded_open_or_not(line: Line, stub: WandbStub) -> None:
    line.open(known=False)
    line.send(0, 1)
    line.driver("close")
    by = Line(line.driver, stub, line.directory, line.id + "-2")
    by.open(known=False)
    stub.fail("UpsertBucket", 403, times=1)
    with pytest.raises(Refuses, match="as the test asked"):
        line.driver("supersede", run_id=line.id, by=by.id, why="a rollback to update 1")
    stub.heal()
    line.driver("supersede", run_id=line.id, by=by.id, why="a rollback to update 1")
    by.send(0, 1)
    line.driver("close")
    assert by.whole(1), "the open run goes on"
    marked = {"line": "line-1", "generation": 1, "superseded_by": by.id, "why": "a rollback to update 1"}
    assert stub.runs[line.id].tags == ["superseded"]
    assert stub.runs[line.id].settings() == {"seed": 7, "nstrain": marked}
    assert line.whole(1)
    line.driver("supersede", run_id=by.id, by="c", why="with no run open")
    line.driver("supersede", run_id=by.id, by="c", why="again")
    assert stub.runs[by.id].tags == ["superseded"]
    line.driver("supersede", run_id="never-there", by="c", why="nothing")
    assert "never-there" not in stub.runs


@pytest.mark.slow
def test_a_mirror_that_fails_does_not_wait_for_uploads(
    line: Line, stub: WandbStub, start: Callable[[], Driver]
) -> None:
    other = Line(start(), stub, line.directory, line.id)
    other.open(known=False)
    stub.down()
    other.send(0, 3)
    services = other.driver.service_processes()
    assert other.driver.leave(limit_s=10) == 1
    assert services
    assert not any(service.is_running() for service in services)


@pytest.mark.slow
def test_weeks_of_sessions_leave_nothing_behind(line: Line, stub: WandbStub) -> None:
    line.open(known=False)
    line.driver("close")
    before = line.driver("left_behind")
    for number in range(40):
        line.open()
        line.send(number, number)
        if number % 2:
            stub.wait_for(line.id, number + 1)
            for service in line.driver.service_processes():
                service.kill()
            with pytest.raises(Away):
                line.driver("close")
        else:
            line.driver("close")
    time.sleep(3)  # threads of the library that find out only now
    after = line.driver("left_behind")
    assert after["files"] <= before["files"] + 5
    assert {**after, "files": 0} == {**before, "files": 0}
    assert line.whole(39)


@pytest.mark.slow
def test_a_long_line_is_backfilled_and_read_back(line: Line) -> None:
    sent = [
        {**row(update), **{f"optimizer/part_{part}": update / (part + 1) for part in range(100)}}
        for update in range(3000)
    ]
    line.open(known=False)
    line.driver("send", rows=sent)
    line.driver("close", limit_s=60)
    assert line.whole(2999)
    assert line.open()["floor"] == 3000
    found = line.driver("read", first=0, last=2999)
    assert len(found) == 3000
    assert all(map(equal, sent, found))
    line.driver("close")
