"""What a repository holds at a revision: through the real client library, pages, failures, and lies."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Fault, HubFile, Request

import nstrain
from nstrain.base.errors import Refusal
from nstrain.data.hub import client, patience
from nstrain.data.hub.errors import AccessDenied, FileVanished, HubRefusal, NotOnHub, UntrustedListing
from nstrain.data.hub.listing import list_files, resolve_revision, starting_directories
from nstrain.data.hub.patience import asked_wait_s
from nstrain.data.hub.pin import list_hub, pin_revision
from nstrain.data.sources import FileStrata, SourceSettings

REPO = "some/corpus"


def files(count: int, directory: str = "data") -> dict[str, bytes | HubFile]:
    return {f"{directory}/{i % 7}/{i:05d}.parquet": random.Random(i).randbytes(70 + i) for i in range(count)}


def source(**fields: Any) -> SourceSettings:
    return SourceSettings(**{"name": "web", "kind": "hub", "repo": REPO, "include": ("**/*.parquet",), **fields})


def test_a_listing_in_pages_is_whole_and_sorted(hub: FakeHub) -> None:
    contents = files(350)
    commit = hub.add(REPO, {**contents, "README.md": b"x" * 100, "data/1/_SUCCESS": b""})
    found = list_files(REPO, commit, ["data/**/*.parquet"], ["data/6/*"])
    expected = sorted(path for path in contents if not path.startswith("data/6/"))
    assert [file.path for file in found] == expected
    assert [file.sha256 for file in found] == [hashlib.sha256(contents[path]).hexdigest() for path in expected]  # type: ignore[arg-type]
    assert sum(request.what == "tree" for request in hub.requests) == 4
    assert all(request.path == "data" for request in hub.requests)


@pytest.mark.parametrize(
    ("globs", "starts"),
    [
        (["data/a/*/x"], ["data/a"]),
        (["data/a/*/x", "data/b/*", "data/*/c"], ["data"]),
        (["data/a/*", "data/ab/*"], ["data/a", "data/ab"]),
        (["*.parquet", "data/a/*"], [""]),
        (["data/one.parquet"], ["data"]),
        (["da?a/x/*"], [""]),
    ],
)
def test_only_the_directories_before_the_first_wildcard_are_listed(globs: list[str], starts: list[str]) -> None:
    assert starting_directories(globs) == starts


def test_a_branch_is_pinned_once_and_a_commit_stays(hub: FakeHub) -> None:
    first = hub.add(REPO, files(3))
    pinned = pin_revision(source())
    hub.add(REPO, files(5))
    assert pinned.revision == first == pin_revision(pinned).revision
    assert list_hub(pinned, 0).count == 3
    assert pinned.identity == source(revision="other").identity != source(repo="some/other").identity


def test_small_files_are_pinned_by_sha256_too(hub: FakeHub) -> None:
    contents = {"a/large.txt": b"large " * 100, "a/small.txt": b"small", "b/empty.txt": b""}
    hub.add(REPO, contents)
    listing = list_hub(pin_revision(source(include=("**/*.txt",), reader="text")), 0)
    pins = {file.path: (file.size, file.sha256) for stratum in listing.files for file in stratum}
    assert pins == {path: (len(c), hashlib.sha256(c).hexdigest()) for path, c in contents.items()}
    assert listing.strata == ("a", "b")
    assert [r.path for r in hub.requests if r.what == "bytes"] == ["a/small.txt"]


def test_a_small_file_with_other_bytes_than_git_s_is_fetched_again(hub: FakeHub) -> None:
    hub.add(REPO, {"small.txt": b"small"})
    left = [Fault("flip"), Fault("cut"), Fault("503")]
    hub.fault = lambda r: left.pop(0) if r.what == "bytes" and left else None
    listing = list_hub(pin_revision(source(include=("*.txt",), reader="text", stratum=FileStrata(by="file"))), 0)
    assert listing.files[0][0].sha256 == hashlib.sha256(b"small").hexdigest()
    assert listing.strata == ("small.txt",)


@pytest.mark.parametrize(("kind", "error"), [("404", FileVanished), ("403", AccessDenied)])
def test_a_small_file_that_is_listed_and_not_to_be_had_is_named_at_once(
    hub: FakeHub, kind: str, error: type[HubRefusal]
) -> None:
    hub.add(REPO, {"small.txt": b"small"})
    hub.fault = lambda r: Fault(kind) if r.what == "resolve" else None
    with pytest.raises(error, match=f"source web: some/corpus@.*/small.txt: .* answers HTTP {kind}"):
        list_hub(pin_revision(source(include=("*.txt",), reader="text", stratum=FileStrata(by="file"))), 0)
    assert sum(request.what == "resolve" for request in hub.requests) == 1


@pytest.mark.parametrize("kind", ["503", "429", "cut", "reset"])
def test_a_failing_page_is_asked_for_again(hub: FakeHub, kind: str) -> None:
    commit = hub.add(REPO, files(250))
    left, lock = [None, Fault(kind, 0.5 if kind == "cut" else 0)], threading.Lock()

    def fault(request: Request) -> Fault | None:
        with lock:
            return left.pop(0) if left and request.what == "tree" else None

    hub.fault = fault
    told: list[str] = []
    assert len(list_files(REPO, commit, ["data/**/*"], [], told.append)) == 250
    assert told or kind in ("cut", "reset")  # the library itself tries those again, and says nothing


def test_a_hanging_page_does_not_hang_the_listing(hub: FakeHub) -> None:
    commit = hub.add(REPO, files(10))
    left = [Fault("stall", 0.5)]
    hub.fault = lambda r: left.pop(0) if r.what == "tree" and left else None
    began = time.monotonic()
    assert len(list_files(REPO, commit, ["data/**/*"], [])) == 10
    assert time.monotonic() - began < 4.5  # the server would stall for 5 s


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "../up.parquet"}, "leads out"),
        ({"path": "data/../../up.parquet"}, "leads out"),
        ({"path": "/etc/x.parquet"}, "leads out"),
        ({"path": "data//x.parquet"}, "leads out"),
        ({"path": "data/./x.parquet"}, "leads out"),
        ({"path": "data/a\nb.parquet"}, "control character"),
        ({"path": "data/\x9bb.parquet"}, "control character"),
        ({"path": "data/\ud800.parquet"}, "not UTF-8"),
        ({"path": "data\\..\\x.parquet"}, "elsewhere"),
        ({"path": "C:x.parquet"}, "elsewhere"),
        ({"path": "data/" + "x" * 250 + ".parquet"}, "too long"),
        ({"path": "d/" * 600 + "x.parquet"}, "too long"),
        ({"path": "data/x.parquet.partial"}, "unfinished"),
        ({"path": "data/0/00000.parquet"}, "listed twice"),
        ({"path": "data/0/00000.parquet/x.parquet"}, "both as a file and as a directory"),
        ({"size": -1}, "size"),
        ({"size": 1 << 60}, "size"),
        ({"size": "12"}, "size"),
        ({"size": 10, "lfs": {"oid": "a" * 64, "size": 11, "pointerSize": 1}}, "size"),
        ({"lfs": {"oid": "A" * 64, "size": 100, "pointerSize": 1}}, "sha256"),
        ({"lfs": {"oid": "../../x", "size": 100, "pointerSize": 1}}, "sha256"),
        ({"oid": "zz"}, "blob id"),
    ],
)
def test_nothing_listed_is_trusted(hub: FakeHub, entry: dict[str, Any], words: str) -> None:
    hub.add(REPO, files(3))
    whole = {"type": "file", "oid": "0" * 40, "size": 100, "path": "data/9/x.parquet",
             "lfs": {"oid": "a" * 64, "size": entry.get("size", 100), "pointerSize": 1}}  # fmt: skip
    hub.extra_entries[REPO] = [{**whole, **entry}]
    with pytest.raises(UntrustedListing, match=words):
        list_hub(pin_revision(source()), 0)


@pytest.mark.parametrize(
    "entries", [["data/x.parquet"], [{"type": "file", "size": 1, "oid": "0" * 40}], [7], {"error": "no"},
                [{"type": "file", "path": "data/x", "size": 9, "oid": "0" * 40, "lfs": {"oid": "a" * 64}}]]
)  # fmt: skip
def test_an_answer_that_the_api_does_not_have_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, entries: Any
) -> None:
    commit = hub.add(REPO, files(3))
    monkeypatch.setattr(hub, "tree", lambda *_: entries if isinstance(entries, list) else [entries])
    with pytest.raises(UntrustedListing, match=r"some/corpus.*/data: http://127.0.0.1:\d+ answers with what its API"):
        list_files(REPO, commit, ["data/**/*"], [])


@pytest.mark.parametrize("kind", ["flood", "bomb"])
@pytest.mark.parametrize("what", ["info", "tree"])
def test_an_answer_without_end_takes_no_memory(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    """Neither one that goes on and on nor one that unpacks to a thousand times its size."""
    hub.add(REPO, files(3))
    hub.fault = lambda r: Fault(kind) if r.what == what else None
    monkeypatch.setattr(client, "MOST_ANSWER_BYTES", 3 << 20)
    before = tracemalloc.start() or tracemalloc.get_traced_memory()[0]
    try:
        with pytest.raises(UntrustedListing, match="an answer of more than 3,145,728 bytes"):
            list_files(REPO, resolve_revision(REPO, "main"), ["data/**/*"], [])
        assert tracemalloc.get_traced_memory()[1] - before < (16 << 20 if kind == "flood" else 160 << 20)
    finally:
        tracemalloc.stop()


def test_globs_that_match_nothing_are_named_with_what_is_there(hub: FakeHub) -> None:
    hub.add(REPO, {**files(9, "data/real"), "README.md": b"x" * 100})
    with pytest.raises(HubRefusal, match=r"no file matches \['data/wrong/\*/\*.parquet'\].*under data: data/real/"):
        list_hub(pin_revision(source(include=("data/wrong/*/*.parquet",))), 0)
    with pytest.raises(HubRefusal, match=r"under its root: README.md, data/"):
        list_hub(pin_revision(source(include=("train/*",))), 0)


def test_what_is_not_there_or_not_allowed_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, files(3))
    with pytest.raises(NotOnHub, match="no such repository"):
        resolve_revision("no/where", "main")
    with pytest.raises(NotOnHub, match="no such revision"):
        resolve_revision(REPO, "nobranch")
    hub.tokens[REPO] = "hf_t"
    with pytest.raises(AccessDenied, match="terms"):
        resolve_revision(REPO, "main")
    monkeypatch.setenv("HF_TOKEN", "hf_t")
    assert resolve_revision(REPO, "main")


def test_empty_files_alone_are_refused(hub: FakeHub) -> None:
    hub.add(REPO, {"a.parquet": b""})
    with pytest.raises(Refusal, match="are empty"):
        list_hub(pin_revision(source()), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repo": None}, "needs a repo"),
        ({"path": "/x"}, "path is for kind local"),
        ({"kind": "local", "path": "/x"}, "for kind hub"),
        ({"mirrors": ("ftp://x",)}, "mirror"),
        ({"stratum": {"by": "column", "column": "language"}}, "strata by column"),
        ({"repo": "../up"}, "repo"),
    ],
)
def test_settings_that_do_not_fit_the_kind_are_refused(fields: dict[str, Any], words: str) -> None:
    from nstrain.settings.model import validate

    value = {"name": "web", "kind": "hub", "repo": REPO, "include": ["*"], "reader": "parquet", "text_column": "c"}
    with pytest.raises(Refusal, match=words):
        validate(SourceSettings, {**value, **fields}, "recipe")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"RateLimit": '"api";r=0;t=55'}, 56.0),
        ({"RateLimit": '"api";r=3;t=55'}, None),
        ({"RateLimit": '"api";r=3;t=55', "Retry-After": "7"}, 7.0),
        ({"Retry-After": "2.5"}, 2.5),
        ({"Retry-After": "Fri, 01 Jan 1999 00:00:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({}, None),
    ],
)
def test_what_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_wait_s(headers) == seconds


def in_process(hub: FakeHub, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = f"{Path(__file__).parent}:{Path(nstrain.__file__).parents[1]}"
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", program], env={**environment, **variables},
                          capture_output=True, text=True, timeout=60)  # fmt: skip


def test_offline_mode_is_refused_at_once_and_xet_is_off_unless_asked_for(hub: FakeHub) -> None:
    program = "from nstrain.data.hub.listing import resolve_revision as r; r('some/corpus', 'main')"
    done = in_process(hub, program, HF_HUB_OFFLINE="1")
    assert "Offline: some/corpus@main has to be listed, but HF_HUB_OFFLINE is set" in done.stderr
    program = (
        "from nstrain.data.hub.client import library, endpoint, hub_headers; import os; library();"
        "from huggingface_hub import constants as c; print(c.HF_HUB_DISABLE_XET, endpoint(),"
        " hub_headers().get('authorization'))"
    )
    tokens = {"HF_TOKEN": "hf_mine", "HF_ENDPOINT": "https://mirror.example/"}
    assert in_process(hub, program, **tokens).stdout.split() == ["True", "https://mirror.example", "Bearer", "hf_mine"]
    shown = in_process(hub, "from nstrain.data.hub.client import is_offline as o; print(o())", HF_HUB_OFFLINE="1")
    assert shown.stdout.strip() == "True"
    assert in_process(hub, program, HF_HUB_DISABLE_XET="0", **tokens).stdout.startswith("False")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HF_ENDPOINT": "hub.example"}, "HF_ENDPOINT: expected the hub's address, https://HOST, found 'hub.example'"),
        ({"HF_ENDPOINT": "ftp://hub.example"}, "HF_ENDPOINT: expected"),
        ({"HF_TOKEN": "hf_“mine”"}, "HF_TOKEN, or the stored token, has characters that no token has"),
        ({"HF_TOKEN": "hf_mine\nX-Other: 1"}, "HF_TOKEN, or the stored token, has characters that no token has"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(hub: FakeHub, variables: dict[str, str], words: str) -> None:
    """And no token is shown."""
    program = """
from nstrain.data.hub.downloads import places
from nstrain.data.hub.errors import HubRefusal
from nstrain.data.hub.listing import resolve_revision
from nstrain.data.sources import SourceSettings
source = SourceSettings(name="w", kind="hub", repo="a/b", revision="main", include=("*",))
for call in (lambda: resolve_revision("a/b", "main"), lambda: places(source, "x")[0]()):
    try:
        call()
    except HubRefusal as refused:
        print(refused)
"""
    done = in_process(hub, program, **variables)
    assert done.stdout.count(words) == 2, done
    assert "mine" not in done.stdout + done.stderr
    assert not hub.requests


def test_a_read_timeout_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("", 30.0), ("45", 45.0), (" 30.5 ", 30.5)):
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", text)
        assert patience.patience().read_s == (patience.PATIENCE.read_s if not text else seconds)
    for text in ("abc", "0", "-1", "1e9", "nan"):
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", text)
        with pytest.raises(HubRefusal, match=f"HF_HUB_DOWNLOAD_TIMEOUT: expected seconds, like 30, found '{text}'"):
            patience.patience()


def test_the_token_of_hf_home_is_used(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_stored\n")
    program = "from nstrain.data.hub.client import hub_headers; print(hub_headers().get('authorization'))"
    assert in_process(hub, program, HF_HOME=str(tmp_path)).stdout.strip() == "Bearer hf_stored"
    off = in_process(hub, program, HF_HOME=str(tmp_path), HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
    assert off.stdout.strip() == "None"


@pytest.mark.parametrize("count", [16_000, pytest.param(64_000, marks=pytest.mark.slow)])
def test_a_listing_of_many_files_is_quick_and_small(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    digest: Callable[[int], str] = lambda i: hashlib.sha256(b"%d" % i).hexdigest()  # noqa: E731
    contents = {
        f"data/web/CC-MAIN-{2013 + i % 110}/part-{i:05d}-of-64000.parquet": HubFile(
            85_000_000 + i, digest(i), "0" * 40, None, True
        )
        for i in range(count)
    }
    commit = hub.add(REPO, contents)
    monkeypatch.setattr(hub, "page_entries", 1000)
    program = f"""
import time
from hub_lines import peak_mib
from nstrain.data.hub import client; client.library()
from nstrain.data.hub.pin import list_hub
from nstrain.data.sources import DirectoryStrata, SourceSettings
before, began = peak_mib(), time.monotonic()
source = SourceSettings(name="web", kind="hub", repo="{REPO}", revision="{commit}", include=("data/web/*/*.parquet",),
                        stratum=DirectoryStrata(depth=3))
listing = list_hub(source, 0)
assert listing.count == {count} and len(listing.strata) == 110, listing.count
print(peak_mib() - before, time.monotonic() - began)
"""
    done = in_process(hub, program)
    assert done.returncode == 0, done.stderr
    megabytes, seconds = map(float, done.stdout.split())
    print(f"{count:,} files listed in {seconds:.1f} s with {megabytes:.0f} MiB")
    assert count / 8000 < megabytes < 40 + count / 400
    assert seconds < 60
