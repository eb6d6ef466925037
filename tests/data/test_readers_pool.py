"""The opener pool: real processes, any number of them, killed and failing ones; always the bytes of this process."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_helpers import EOS, contents, environment, many_rows_tree, prose, write_tree
from reader_files import request, source_of, write_texts

from nstrain.base.errors import DiskFull, NstrainError, Refusal
from nstrain.base.killpoints import VARIABLE
from nstrain.data import opener_pool
from nstrain.data.encode import Encoder, load_encoder
from nstrain.data.entries import FileRequest, load_entry, open_file
from nstrain.data.opened import OpenedFiles, OpenerPool
from nstrain.data.readers import BadUpload, ChangedFile
from nstrain.data.sources import Listing, PinnedFile


@pytest.fixture(scope="module")
def encoder(tokenizer: Path) -> Encoder:
    return load_encoder(tokenizer, EOS)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while (left := worker_pids()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def worker_pids() -> list[int]:
    """The workers that run below this process."""
    children = psutil.Process().children(recursive=True)
    return [c.pid for c in children if c.status() != "zombie" and "nstrain.data.opener_worker" in c.cmdline()]


def requests_of(root: Path, into: str, files: int = 12) -> list[FileRequest]:
    """Text files and files of rows, small and larger ones."""
    tree = root / "tree"
    if not tree.exists():
        write_tree(tree, many_rows_tree(1, {"a": files - 3, "b": 1}))
        write_texts(tree / "rows.parquet", [prose(n, n) + " </s><think>" for n in range(200)], row_group_size=50)
        write_texts(tree / "rows.jsonl.zst", [prose(n, n) for n in range(200)])
    found = []
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        reader = {".parquet": "parquet", ".zst": "jsonl"}.get(path.suffix, "text")
        found.append(
            request(
                source_of(tree, reader, held_out=0.1),
                path,
                root / into / path.relative_to(tree).as_posix().replace("/", "-"),
            )
        )
    return found


def here(root: Path, encoder: Encoder) -> dict[str, bytes]:
    """The entries as this process makes them, one by one."""
    for asked in requests_of(root, "here"):
        open_file(asked, encoder)
    return contents(root / "here")


# ------------------------------------------------------------------ the same bytes


@pytest.mark.parametrize("task_bytes", [1, 2000, 4 << 20])
def test_any_number_of_workers_gives_the_same_entries(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, task_bytes: int
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", task_bytes)
    expected = here(tmp_path, encoder)
    for workers in (0, 1, 2, 3):
        asked = requests_of(tmp_path, f"with-{workers}")
        with OpenerPool(encoder, workers) as pool:
            pool.open(asked[:5])
            pool.open(asked[5:])
            pool.open([])
            assert len(worker_pids()) <= workers
        assert contents(tmp_path / f"with-{workers}") == expected
    assert len(expected) == 12


@pytest.mark.slow  # the pool's other tests are in every run
def test_recycled_workers_give_the_same_entries(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    monkeypatch.setattr(opener_pool, "RECYCLE_TASKS", 4)
    expected, pids = here(tmp_path, encoder), set()
    with OpenerPool(encoder, 1) as pool:
        pool.open(requests_of(tmp_path, "pool"), lambda done, total: pids.update(worker_pids()))
    assert contents(tmp_path / "pool") == expected
    assert len(pids) == 3
    monkeypatch.setattr(opener_pool, "RECYCLE_BYTES", 1)  # every worker has grown beyond that
    with OpenerPool(encoder, 2) as pool:
        pool.open(requests_of(tmp_path, "again"))
        assert worker_pids() == []
    assert contents(tmp_path / "again") == expected


def test_opened_files_finds_what_its_pool_made(tmp_path: Path, encoder: Encoder) -> None:
    asked = [r for r in requests_of(tmp_path, "unused") if r.source.reader == "text"]
    files = tuple(PinnedFile(r.file.path, r.file.size, r.file.sha256, 0, n, r.file.size) for n, r in enumerate(asked))
    opened_here: list[int] = []

    def opened_files(pool: OpenerPool | None) -> OpenedFiles:
        listing = Listing((".",), (files,))
        return OpenedFiles(tmp_path / "open", asked[0].source, listing, encoder, lambda: opened_here.append(0), pool)

    with OpenerPool(encoder, 2) as pool:
        cache = opened_files(pool)
        cache.prefetch([(0, n) for n in range(6)])
        ticks = len(opened_here)
        assert ticks > 0
        assert pool.encoded_tokens == sum(len(cache.get(0, n).tokens) for n in range(6))
        made = contents(tmp_path / "open")
        assert len(made) == 6
        assert [cache.get(0, n).file for n in range(6)] == list(files[:6])
        cache.prefetch([(0, n) for n in range(6)])  # all there: no worker is asked
        assert len(opened_here) == ticks
    cache = opened_files(None)
    assert cache.get(0, 7).file == files[7]
    assert len(opened_here) == ticks + 2, "as it begins and as it ends"
    assert made.items() <= contents(tmp_path / "open").items()


# ------------------------------------------------------------------ files that come one after another


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_files_are_opened_as_they_come(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The next file comes only when the one before it is opened: waiting for all of them would take for ever."""
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    asked, opened_so_far = requests_of(tmp_path, "pool"), []
    deadline = time.monotonic() + 60
    with OpenerPool(encoder, workers) as pool:

        def arrivals() -> Iterator[list[FileRequest]]:
            yield []
            for number, one in enumerate(asked):
                yield [one]
                while len(opened_so_far) <= number:
                    assert pool.busy
                    assert time.monotonic() < deadline
                    yield []
            assert not pool.busy

        pool.open_as_they_come(arrivals(), opened=opened_so_far.extend)
    assert opened_so_far == asked
    assert contents(tmp_path / "pool") == here(tmp_path, encoder)


def test_every_worker_has_something_to_do_as_soon_as_there_is_something(
    tmp_path: Path, encoder: Encoder, long_work: list[FileRequest]
) -> None:
    """A file that takes a minute does not hold up the others that come in that minute."""
    asked, opened_so_far = requests_of(tmp_path, "pool"), []

    def arrivals() -> Iterator[list[FileRequest]]:
        yield long_work[:1]
        for one in asked:
            yield [one]
        while len(opened_so_far) < len(asked):
            yield []
        raise TimeoutError

    with OpenerPool(encoder, 2) as pool, pytest.raises(TimeoutError):
        pool.open_as_they_come(arrivals(), opened=opened_so_far.extend)
    assert worker_pids() == []
    assert sorted(r.entry.name for r in opened_so_far) == sorted(r.entry.name for r in asked)


@pytest.mark.parametrize("workers", [0, 2])
def test_after_an_error_no_more_files_are_asked_for(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    asked, opened_so_far = requests_of(tmp_path, "pool"), []
    Path(asked[1].source.path, asked[1].file.path).write_bytes(b"other")

    def arrivals() -> Iterator[list[FileRequest]]:
        yield asked[:2]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            yield []
        raise AssertionError("asked again and again")

    with OpenerPool(encoder, workers) as pool, pytest.raises(ChangedFile, match=f"{asked[1].file.path} has changed"):
        pool.open_as_they_come(arrivals(), opened=opened_so_far.extend)
    assert asked[1] not in opened_so_far


def test_a_worker_that_dies_while_files_come_changes_nothing(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are opened in the end, and told to be open once."""
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    expected, asked = here(tmp_path, encoder), requests_of(tmp_path, "pool")
    opened_so_far: list[FileRequest] = []
    monkeypatch.setenv(VARIABLE, "open:10")
    with OpenerPool(encoder, 2) as pool:
        pool.open_as_they_come(([one] for one in asked), opened=opened_so_far.extend)
    found = contents(tmp_path / "pool")
    assert {name: data for name, data in found.items() if not name.endswith(".partial")} == expected
    assert sorted(r.entry.name for r in opened_so_far) == sorted(r.entry.name for r in asked)


# ------------------------------------------------------------------ workers that die


@pytest.mark.slow  # test_workers_killed_from_outside is in every run
def test_a_worker_killed_now_and_then_changes_nothing(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker dies at its 10th kill point, when it has opened three files and the tokens of the fourth."""
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    expected = here(tmp_path, encoder)
    monkeypatch.setenv(VARIABLE, "open:10")
    for workers in (1, 2, 3):
        with OpenerPool(encoder, workers) as pool:
            pool.open(requests_of(tmp_path, f"with-{workers}"))
        found = contents(tmp_path / f"with-{workers}")
        assert {name: data for name, data in found.items() if not name.endswith(".partial")} == expected


def test_workers_killed_from_outside_change_nothing(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    expected, killed = here(tmp_path, encoder), []

    def kill_one(done: int, total: int) -> None:
        if (pids := worker_pids()) and len(killed) < 3 and pids[0] not in killed and done > 0:
            killed.append(pids[0])  # one that works, or one that starts
            os.kill(pids[0], signal.SIGKILL)

    with OpenerPool(encoder, 2) as pool:
        pool.open(requests_of(tmp_path, "one"), kill_one)
        for pid in worker_pids():  # while they have nothing to do
            os.kill(pid, signal.SIGKILL)
        pool.open(requests_of(tmp_path, "two"))
    assert len(killed) >= 1
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == expected


def test_workers_take_no_notice_of_signals_to_the_group(tmp_path: Path, encoder: Encoder) -> None:
    asked = requests_of(tmp_path, "pool")
    with OpenerPool(encoder, 1) as pool:
        pool.open(asked[:1])
        (pid,) = worker_pids()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        pool.open(asked)
        assert worker_pids() == [pid]


def test_a_file_that_kills_its_worker_is_a_bad_upload(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests_of(tmp_path, "pool")[:4]
    monkeypatch.setenv(VARIABLE, "open:1")
    for workers in (1, 3):
        with (
            OpenerPool(encoder, workers) as pool,
            pytest.raises(
                BadUpload, match=rf"source web: .*{asked[0].file.path}: opening it: two worker .*SIGKILL"
            ) as error,
        ):
            pool.open(asked)
        assert (error.value.source, error.value.path) == ("web", asked[0].file.path)
        assert error.value.may_pass, "it may have been for lack of memory: that is tried again"
        assert "damaged before it was uploaded" not in str(error.value)


def test_workers_that_cannot_start_are_no_fault_of_a_file(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        OpenerPool(encoder, 2) as pool,
        pytest.raises(NstrainError, match="end as they start: exit status 1") as error,
    ):
        pool.open(requests_of(tmp_path, "pool"))
    assert not isinstance(error.value, Refusal)
    with pytest.raises(Refusal, match="-1 worker processes"):
        OpenerPool(encoder, -1)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_first_of_several_errors_is_raised_and_the_pool_works_on(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    asked = requests_of(tmp_path, "pool")
    in_order = sorted(asked, key=lambda r: -r.file.size)
    for bad in (in_order[3], in_order[4], in_order[9]):
        Path(bad.source.path, bad.file.path).write_bytes(b"other")
    with OpenerPool(encoder, workers) as pool:
        with pytest.raises(ChangedFile, match=f"{in_order[3].file.path} has changed"):
            pool.open(asked)
        pool.open([in_order[0], in_order[11]])
        assert load_entry(in_order[11].entry, in_order[11].file, verify=True) is not None


def test_an_error_that_comes_later_in_time_but_earlier_in_order_is_the_one_raised(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    slow = write_texts(tmp_path / "tree" / "slow.jsonl", [prose(n, 600) for n in range(1000)])
    slow.write_bytes(slow.read_bytes()[:-5])  # found at its end
    fast = write_texts(tmp_path / "tree" / "fast.jsonl", [prose(n, 600) for n in range(900)])
    asked = [request(source_of(tmp_path / "tree", "jsonl"), path, tmp_path / path.name) for path in (fast, slow)]
    fast.write_bytes(b"other")
    with OpenerPool(encoder, 2) as pool, pytest.raises(BadUpload, match=r"slow.jsonl: line 1,000: the file ends"):
        pool.open(asked)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_is_named(tmp_path: Path, encoder: Encoder, workers: int) -> None:
    asked = requests_of(tmp_path, "pool")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with OpenerPool(encoder, workers) as pool, pytest.raises(DiskFull, match="cannot be written"):
            pool.open(asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("when", [lambda done: done == 0, lambda done: done > 0])
def test_progress_may_stop_the_pool(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, workers: int, when: Callable[[int], bool]
) -> None:
    monkeypatch.setattr(opener_pool, "TASK_BYTES", 1)
    asked = requests_of(tmp_path, "pool")

    def stop(done: int, total: int) -> None:
        assert 0 <= done < total == sum(r.file.size for r in asked)
        if when(done):
            raise KeyboardInterrupt

    with OpenerPool(encoder, workers) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.open(asked, stop)
        assert worker_pids() == []
        pool.open(asked)
    made = contents(tmp_path / "pool")
    assert {name: data for name, data in made.items() if not name.endswith(".partial")} == here(tmp_path, encoder)


# ------------------------------------------------------------------ processes and signals

PROGRAM = """
import pathlib, pickle, sys
from nstrain.data.encode import load_encoder
from nstrain.data.opener_pool import OpenerPool
requests = pickle.loads(pathlib.Path(sys.argv[2]).read_bytes())
with OpenerPool(load_encoder(pathlib.Path(sys.argv[1]), 1), 2) as pool:
    print("open", flush=True)
    pool.open(requests, lambda done, total: print(done, flush=True))
    print("done", flush=True)
"""


def start(tmp_path: Path, tokenizer: Path, asked: list[FileRequest], **options: Any) -> subprocess.Popen[str]:
    (tmp_path / "requests").write_bytes(pickle.dumps(asked))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tokenizer), str(tmp_path / "requests")],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def busy_workers(pid: int) -> list[psutil.Process]:
    """The two workers of a process, once they have read their tasks."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        workers = [c for c in psutil.Process(pid).children() if "nstrain.data.opener_worker" in c.cmdline()]
        if len(workers) == 2 and all(w.cpu_times().user > 0.5 for w in workers):
            time.sleep(0.3)
            return workers
        time.sleep(0.02)
    raise AssertionError("the workers did not start")


@pytest.fixture
def long_work(tmp_path: Path) -> list[FileRequest]:
    """Two files whose encoding takes a minute each."""
    text = "".join(prose(seed, 1000) + "\n" for seed in range(20)) * 1000
    paths = [tmp_path / "big" / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [request(source_of(tmp_path / "big"), path, tmp_path / "open" / path.name) for path in paths]


def test_workers_die_with_their_parent(tmp_path: Path, tokenizer: Path, long_work: list[FileRequest]) -> None:
    process = start(tmp_path, tokenizer, long_work)
    workers = busy_workers(process.pid)
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(workers, timeout=3)
    assert (len(gone), alive) == (2, [])


def test_ctrl_c_ends_all_processes_of_the_group_quietly(
    tmp_path: Path, tokenizer: Path, long_work: list[FileRequest]
) -> None:
    process = start(tmp_path, tokenizer, long_work, start_new_session=True)
    workers = busy_workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert psutil.wait_procs(workers, timeout=3)[1] == []
    assert errors.count("Traceback") == 1  # this program's own
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_the_pool_ends_busy_workers_at_once(encoder: Encoder, long_work: list[FileRequest]) -> None:
    began: list[float] = []

    def stop(done: int, total: int) -> None:
        if began or (len(worker_pids()) == 2 and all(psutil.Process(p).cpu_times().user > 0.5 for p in worker_pids())):
            began.append(time.monotonic())
            raise TimeoutError

    with OpenerPool(encoder, 2) as pool, pytest.raises(TimeoutError):
        pool.open(long_work, stop)
    assert time.monotonic() - began[0] < 1.0
    assert worker_pids() == []
