"""One file from a hub that fails in every way: the pinned bytes, or an error that names the cause."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import FILE_FAULTS, Crowd, FakeHub, Fault, HubFile, Request, SeededFaults

from nstrain.base.errors import DiskFull
from nstrain.data.hub import client, patience
from nstrain.data.hub.downloads import DownloadProgress, Downloads
from nstrain.data.hub.errors import AccessDenied, FileVanished, HubRefusal, WrongBytes
from nstrain.data.sources import PinnedFile, SourceSettings

REPO, PATH = "some/corpus", "data/a/part 1.parquet"
CONTENT = random.Random(5).randbytes(300_000)


def source(commit: str, **fields: object) -> SourceSettings:
    return SourceSettings(name="web", kind="hub", repo=REPO, revision=commit, include=("**/*",), **fields)  # type: ignore[arg-type]


def pinned(content: bytes = CONTENT, path: str = PATH) -> PinnedFile:
    return PinnedFile(path, len(content), hashlib.sha256(content).hexdigest(), 0, 0, len(content))


def once(*faults: Fault, what: str = "bytes") -> Callable[[Request], Fault | None]:
    """The first requests for a file's bytes fail in these ways, one after another."""
    left, lock = list(faults), threading.Lock()

    def fault(request: Request) -> Fault | None:
        with lock:
            return left.pop(0) if left and request.what == what else None

    return fault


def fetch(place: Path, settings: SourceSettings, file: PinnedFile) -> list[DownloadProgress]:
    seen: list[DownloadProgress] = []
    Downloads(place, settings, seen.append).fetch([file])
    assert (place / "web" / file.path).read_bytes() == CONTENT
    assert not list((place / ".parts").iterdir())
    return seen


@pytest.mark.parametrize("kind", [*FILE_FAULTS, "416"])
@pytest.mark.parametrize("start", [0, 100_000])
def test_a_file_comes_whole_after_any_fault(hub: FakeHub, place: Path, kind: str, start: int) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    faults = [Fault(kind, 0 if kind == "429" else 0.6)]
    if start:  # a fault of a resumed transfer: the first one is cut
        faults = [Fault("cut", start / len(CONTENT)), *faults]
    hub.fault = once(*faults)
    fetch(place, source(commit), pinned())
    assert sum(request.what == "bytes" for request in hub.requests) == len(faults) + 1 - (
        kind == "ignore_range" or (kind == "other_range" and not start)
    )


@pytest.mark.parametrize("kind", ["503", "429", "reset", "hang"])
def test_the_hub_itself_may_fail_too(hub: FakeHub, place: Path, kind: str) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = once(Fault(kind, 0), Fault(kind, 0), what="resolve")
    fetch(place, source(commit), pinned())


def test_a_storage_host_that_refuses_a_link_costs_no_byte(hub: FakeHub, place: Path) -> None:
    """Links are signed for a while; the hub gives another one, and the file goes on."""
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = once(Fault("cut", 0.5), Fault("403"), Fault("403"))
    fetch(place, source(commit), pinned())
    assert [r.range_start for r in hub.requests if r.what == "bytes"] == [0, 150_000, 150_000, 150_000]


@pytest.mark.parametrize("kind", ["page", "endless page", "no page", "longer", "gzip", "416"])
def test_an_answer_that_is_not_the_file_costs_no_byte(hub: FakeHub, place: Path, kind: str) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = once(Fault("cut", 0.5), Fault(kind), Fault(kind))
    fetch(place, source(commit), pinned())
    assert [r.range_start for r in hub.requests if r.what == "bytes"] == [0, 150_000, 150_000, 150_000]
    if kind == "no page":  # is tried for as long as it takes
        return

    hub.requests.clear()  # as long as it goes on, what has come stays
    downloads = Downloads(place, source(commit))
    (place / "web" / PATH).unlink()
    downloads._part(pinned()).write_bytes(CONTENT[:200_000])
    hub.fault = lambda request: Fault(kind) if request.what == "bytes" else None
    with pytest.raises(WrongBytes):
        downloads.fetch([pinned()])
    assert downloads._part(pinned()).read_bytes() == CONTENT[:200_000]
    hub.fault = lambda request: Fault("other_range") if request.what == "bytes" else None
    fetch(place, source(commit), pinned())  # at last it is asked for all of it


@pytest.mark.parametrize("kind", ["no address", "loop"])
def test_redirects_that_lead_nowhere_are_given_up_on(hub: FakeHub, place: Path, kind: str) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = lambda r: Fault(kind) if r.what == "resolve" else None
    with pytest.raises(WrongBytes, match="which is no web address|more than 5 redirects"):
        Downloads(place, source(commit)).fetch([pinned()])
    hub.fault = once(Fault(kind), what="resolve")
    fetch(place, source(commit), pinned())


def test_a_transfer_resumes_where_another_process_left_it(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    downloads = Downloads(place, source(commit))
    part = downloads._part(pinned())
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:250_000])
    downloads.fetch([pinned()])
    assert [r.range_start for r in hub.requests if r.what == "bytes"] == [250_000]
    assert (place / "web" / PATH).read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [b"x" + CONTENT[1:250_000], CONTENT + b"x", b"x" + CONTENT[1:]])
def test_a_damaged_part_is_thrown_away(hub: FakeHub, place: Path, damage: bytes) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    part = Downloads(place, source(commit))._part(pinned())
    part.parent.mkdir(parents=True)
    part.write_bytes(damage)
    fetch(place, source(commit), pinned())


def test_a_whole_file_is_verified_once_and_not_fetched_again(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    fetch(place, source(commit), pinned())
    asked = len(hub.requests)
    fetch(place, source(commit), pinned())
    assert len(hub.requests) == asked
    (place / "web" / PATH).write_bytes(b"y" + CONTENT[1:])
    fetch(place, source(commit), pinned())
    assert len(hub.requests) > asked


def test_trickling_bytes_are_a_stall(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = once(Fault("drip"))
    seen: list[DownloadProgress] = []
    began = time.monotonic()
    visible = dataclasses.replace(patience.PATIENCE, first_wait_s=1.0, longest_wait_s=1.0)
    Downloads(place, source(commit), seen.append, visible).fetch([pinned()])
    assert time.monotonic() - began < 4
    assert any("stalled" in (progress.trouble or "") for progress in seen)


def test_what_it_waits_for_and_how_far_it_is_are_told(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = once(Fault("cut", 0.5), Fault("429", 0))
    seen = fetch(place, source(commit), pinned())
    assert seen[-1].files_done == seen[-1].files == 1
    assert seen[-1].bytes_done == seen[-1].bytes == len(CONTENT)
    assert max(progress.bytes_per_s for progress in seen) > 0
    assert any("HTTP 429" in (progress.trouble or "") for progress in seen)


def test_a_rate_limit_is_waited_for(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = once(Fault("429", 1), what="resolve")
    began = time.monotonic()
    fetch(place, source(commit), pinned())
    assert 2.0 <= time.monotonic() - began < 4.0  # t=1, and a second more


@pytest.mark.parametrize("kind", ["404", "gone"])
def test_a_vanished_file_is_taken_from_another_revision_if_its_bytes_are_the_same(
    hub: FakeHub, place: Path, kind: str
) -> None:
    old = "1" * 40
    hub.add(REPO, {PATH: CONTENT})
    if kind == "404":
        hub.repos[REPO][old] = {}
    fetch(place, source(old), pinned())


def test_a_vanished_file_is_taken_from_a_mirror(hub: FakeHub, place: Path) -> None:
    hub.add(REPO, {"other": CONTENT})
    hub.add("copy/corpus", {PATH: CONTENT})
    fetch(place, source("1" * 40, mirrors=("copy/corpus@main",)), pinned())
    (place / "web" / PATH).unlink()
    commit = hub.add("some/other", {PATH: CONTENT})
    settings = source(commit, mirrors=(f"http://localhost:{hub.port}/",)).model_copy(update={"repo": "some/other"})
    hub.fault = lambda r: Fault("gone") if r.what == "resolve" and r.host.startswith("127.") else None
    fetch(place, settings, pinned())


def test_a_file_that_is_nowhere_is_named_with_what_every_place_said(hub: FakeHub, place: Path) -> None:
    hub.add(REPO, {PATH: b"other bytes" * 100})
    with pytest.raises(FileVanished, match=r"source web: some/corpus@1{12}/data/a/part 1.parquet .*RevisionNotFound.*"
                       r"some/corpus@main: it has another file there now.*Remedy.*mirrors"):  # fmt: skip
        Downloads(place, source("1" * 40)).fetch([pinned()])


def test_a_file_that_always_comes_with_other_bytes_is_named(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = lambda r: Fault("flip") if r.what == "bytes" else None
    with pytest.raises(WrongBytes, match=r"its bytes have sha256 [0-9a-f]{64}"):
        Downloads(place, source(commit)).fetch([pinned()])
    assert not (place / "web" / PATH).exists()
    assert sum(r.what == "bytes" for r in hub.requests) == 2 * patience.PATIENCE.wrong_fetches


def test_never_more_bytes_than_pinned_are_written(hub: FakeHub, place: Path) -> None:
    small = CONTENT[:1000]
    lying = HubFile.of(small)
    hub.add(REPO, {PATH: HubFile(lying.size, lying.sha256, lying.blob_id, CONTENT, True)}, "2" * 40)
    with pytest.raises(WrongBytes, match="says 300000 bytes follow, expected 1000"):
        Downloads(place, source("2" * 40)).fetch([pinned(small)])


def test_a_gated_repository_is_named_and_the_token_stays_with_the_hub(
    hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.tokens[REPO] = "hf_secret"
    with pytest.raises(AccessDenied, match="GatedRepo.*HF_TOKEN"):
        Downloads(place, source(commit)).fetch([pinned()])
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.requests.clear()
    fetch(place, source(commit), pinned())
    assert {(r.what, r.authorization) for r in hub.requests} == {("resolve", "Bearer hf_secret"), ("bytes", None)}


def test_a_server_that_is_not_there_is_waited_for(hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    monkeypatch.setattr(client, "endpoint", lambda: "http://127.0.0.1:9")
    back = threading.Timer(0.5, lambda: monkeypatch.setattr(client, "endpoint", lambda: hub.endpoint))
    seen: list[DownloadProgress] = []
    downloads = Downloads(place, source(commit), seen.append)

    class EnoughError(Exception):
        pass

    def look(progress: DownloadProgress) -> None:
        if progress.trouble and "failure 4" in progress.trouble:
            raise EnoughError(progress.trouble)

    with pytest.raises(EnoughError, match="Connection refused"):
        Downloads(place, source(commit), look).fetch([pinned()])
    back.start()
    back.join()
    downloads.fetch([pinned()])


def test_a_proxy_of_the_environment_is_used(hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    monkeypatch.setattr(client, "endpoint", lambda: "http://hub.example")
    monkeypatch.setenv("http_proxy", hub.endpoint)  # it takes whole addresses, as a proxy does
    monkeypatch.setenv("NO_PROXY", "elsewhere.example")
    fetch(place, source(commit), pinned())
    assert [r.host for r in hub.requests] == ["hub.example", f"localhost:{hub.port}"]


def test_a_proxy_of_another_kind_is_refused(hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(HubRefusal, match="the proxy for http is of kind socks5, expected http://HOST:PORT"):
        Downloads(place, source(commit)).fetch([pinned()])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    fetch(place, source(commit), pinned())


def test_a_stop_does_not_wait_for_a_server_that_does_not_answer(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = lambda r: Fault("hang")

    class StopError(Exception):
        pass

    began = time.monotonic()

    def stop(progress: DownloadProgress) -> None:
        if time.monotonic() - began > 0.5:
            raise StopError

    slow = dataclasses.replace(patience.PATIENCE, connect_s=60.0, read_s=60.0)
    with pytest.raises(StopError):
        Downloads(place, source(commit), stop, slow).fetch([pinned()])
    assert time.monotonic() - began < 3


def test_a_full_disk_is_said_before_it_is_full(hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    free = patience.PATIENCE
    monkeypatch.setattr(patience, "PATIENCE", dataclasses.replace(free, reserve_bytes=1 << 60))
    with pytest.raises(DiskFull, match="300,000"):
        Downloads(place, source(commit)).fetch([pinned()])
    assert not any(r.what == "bytes" for r in hub.requests)


def test_several_files_come_at_once_and_no_more_than_may_lie_unused(
    hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"d/{i:03d}": random.Random(i).randbytes(20_000 + i) for i in range(30)}
    commit = hub.add(REPO, contents)
    monkeypatch.setattr(patience, "PATIENCE", dataclasses.replace(patience.PATIENCE, ahead_files=5))
    downloads, crowd = Downloads(place, source(commit)), Crowd()
    hub.fault = crowd
    files = [PinnedFile(p, len(c), hashlib.sha256(c).hexdigest(), 0, 0, 0) for p, c in contents.items()]
    got, most = [], 0
    for batch in downloads.fetched(files):
        time.sleep(0.05)
        most = max(most, sum(1 for p in (place / "web").rglob("*") if p.is_file()))
        for file in batch:
            assert (place / "web" / file.path).read_bytes() == contents[file.path]
            downloads.release(file)
            got.append(file.path)
    assert sorted(got) == sorted(contents)
    assert 1 < most <= 5
    assert crowd.most == patience.PATIENCE.parallel_files
    assert not [path for path in (place / "web").rglob("*") if path.is_file()]


def test_files_come_while_others_are_used_until_too_many_lie_unused(
    hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"d/{i:03d}": random.Random(i).randbytes(20_000 + i) for i in range(12)}
    commit = hub.add(REPO, contents)
    monkeypatch.setattr(patience, "PATIENCE", dataclasses.replace(patience.PATIENCE, ahead_files=5))
    downloads = Downloads(place, source(commit))
    files = [PinnedFile(p, len(c), hashlib.sha256(c).hexdigest(), 0, 0, 0) for p, c in contents.items()]
    busy = True
    given: list[PinnedFile] = []
    with contextlib.closing(downloads.fetched(files, lambda: busy)) as coming:

        def take_until(count: int) -> None:
            """Take what comes; then look a while longer whether more does."""
            deadline = time.monotonic() + 10
            while len(given) < count and time.monotonic() < deadline:
                given.extend(next(coming))
            waited = 0.0
            for _ in range(10):
                began = time.monotonic()
                given.extend(next(coming))
                waited += time.monotonic() - began
                time.sleep(0.02)
            assert len(given) == count
            assert waited < 1.5, "it waits although its user is busy"

        take_until(5)
        for file in given[:2]:
            downloads.release(file)
        take_until(7)
        busy = False  # now nobody works on those that were given, and still there is no standstill
        for batch in coming:
            given.extend(batch)
    assert sorted(file.path for file in given) == sorted(contents)
    assert sum(1 for path in (place / "web").rglob("*") if path.is_file()) == 10
    downloads.clear()
    downloads.fetch(files)  # to stay: no limit
    assert sum(1 for path in (place / "web").rglob("*") if path.is_file()) == 12


def test_calling_off_is_quick_and_keeps_the_part(hub: FakeHub, place: Path) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    hub.fault = lambda r: Fault("stall", 0.5) if r.what == "bytes" else None

    class StopError(Exception):
        pass

    def stop(progress: DownloadProgress) -> None:
        if progress.bytes_done:
            raise StopError

    downloads = Downloads(place, source(commit), stop, dataclasses.replace(patience.PATIENCE, read_s=20.0))
    began = time.monotonic()
    with pytest.raises(StopError):
        downloads.fetch([pinned()])
    assert time.monotonic() - began < 2
    hub.fault = lambda r: None
    hub.requests.clear()
    fetch(place, source(commit), pinned())
    assert [r.range_start for r in hub.requests if r.what == "bytes"] == [150_000]


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_faults_leaves_the_pinned_bytes(hub: FakeHub, place: Path, seed: int) -> None:
    contents = {f"d/{i:03d}": random.Random(i).randbytes(200 + 7000 * i) for i in range(12)}
    commit = hub.add(REPO, contents)
    faults = hub.fault = SeededFaults(seed, 15, rate=0.6)
    files = [PinnedFile(p, len(c), hashlib.sha256(c).hexdigest(), 0, 0, 0) for p, c in contents.items()]
    for batch in Downloads(place, source(commit)).fetched(files):
        for file in batch:
            assert (place / "web" / file.path).read_bytes() == contents[file.path]
    assert sum(faults.made.values()) > 8, faults.made


def test_offline_is_named_and_the_library_s_cache_is_used(
    hub: FakeHub, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(REPO, {PATH: CONTENT})
    monkeypatch.setattr(client, "is_offline", lambda: True)
    with pytest.raises(Exception, match="HF_HUB_OFFLINE"):
        Downloads(place, source(commit)).fetch([pinned()])
    cache = Path(os.environ["HF_HOME"]) / "hub" / "datasets--some--corpus" / "snapshots" / commit
    (cache / PATH).parent.mkdir(parents=True)
    (cache / PATH).write_bytes(CONTENT)
    try:
        fetch(place, source(commit), pinned())
    finally:
        (cache / PATH).unlink()
    assert not hub.requests
