"""A cycle comes out the same whatever happened on the way, and from nothing else than what is pinned."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    EOS,
    contents,
    environment,
    make_line,
    manifest_of,
    prepare,
    prepared,
    prose_tree,
    source,
    start_preparer,
    write_tree,
)

from nstrain.base.disk import canonical_json, sha256_bytes, sha256_file
from nstrain.base.errors import NeedsOperator, NstrainError, Refusal
from nstrain.data.consumers import write_consumer
from nstrain.data.cycles import prepare_cycle
from nstrain.data.draw import SHARE_ONE
from nstrain.data.encode import ENCODING_VERSION
from nstrain.data.line import DataLine
from nstrain.data.manifest import last_prepared, load_manifest, states_before
from nstrain.data.order import ORDER_VERSION
from nstrain.data.preparer import read_status, run_preparer
from nstrain.data.rows import CycleRows, row_order

CYCLES = 3


@pytest.fixture(scope="module")
def original(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A line of two sources and three cycles, made but not prepared."""
    base = tmp_path_factory.mktemp("original")
    sources = [
        source("web", write_tree(base / "web", prose_tree(1, {"a": 60, "b": 25, "c": 3}, words=40)), 2, held_out=0.05),
        source("code", write_tree(base / "code", prose_tree(2, {"x": 40, "y": 20}, words=40)), held_out=0.05),
    ]
    return make_line(base / "line", tokenizer, sources, 960, CYCLES)


@pytest.fixture(scope="module")
def straight(original: DataLine) -> dict[str, bytes]:
    """What preparing it without any trouble gives."""
    line = copy_of(original, original.work.with_name("straight"))
    prepare(line)
    return prepared(line)


def copy_of(line: DataLine, work: Path) -> DataLine:
    shutil.copytree(line.work, work)
    return DataLine.open(work)


@pytest.fixture
def line(original: DataLine, tmp_path: Path) -> DataLine:
    """A copy of it for this test."""
    return copy_of(original, tmp_path / "line")


# ------------------------------------------------------------------ the same bytes


def test_a_cycle_prepared_again_gives_the_same_bytes(line: DataLine, straight: dict[str, bytes]) -> None:
    prepare(line)
    for cycle in (2, 1, 3):
        shutil.rmtree(line.cycle_directory(cycle))
        shutil.rmtree(line.work / "open")
        prepare_cycle(line, cycle, line.encoder())
    assert prepared(line) == straight


def test_another_hash_seed_other_threads_and_another_place_give_the_same_bytes(
    original: DataLine, tokenizer: Path, tmp_path: Path, straight: dict[str, bytes]
) -> None:
    program = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from data_helpers import make_line, prepare, source
base = pathlib.Path(sys.argv[2])
sources = [source("web", base / "web", 2, held_out=0.05), source("code", base / "code", held_out=0.05)]
line = make_line(pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4]), sources, 960, 3)
prepare(line)
"""
    for number, variables in enumerate(
        ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1", "LC_ALL": "C", "TZ": "Asia/Tokyo"})
    ):
        moved = tmp_path / f"text{number}"
        for name in ("code", "web"):  # made in another order, so a directory lists them otherwise
            files = contents(original.work.parent / name)
            write_tree(moved / name, dict(sorted(files.items(), key=lambda f: f[1])))
        work = tmp_path / f"line{number}"
        subprocess.run(
            [sys.executable, "-c", program, str(Path(__file__).parent), str(moved), str(work), str(tokenizer)],
            env=environment(**variables),
            check=True,
        )
        assert DataLine.open(work).id == original.id
        assert prepared(DataLine.open(work)) == straight


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut", "header", "counts", "tokens", "swapped"])
def test_the_cache_of_opened_files_may_be_lost_or_damaged(
    line: DataLine, straight: dict[str, bytes], damage: str
) -> None:
    for cycle in range(1, CYCLES + 1):
        prepare(line, cycle)
        entries = sorted((line.work / "open").rglob("*.tokens"))
        assert cycle == CYCLES or entries
        for entry in entries:
            data = bytearray(entry.read_bytes())
            start = 8 + int.from_bytes(data[:8], "little")
            if damage == "deleted":
                entry.unlink()
                continue
            if damage == "emptied":
                data = bytearray()
            elif damage == "cut":
                data = data[: len(data) * 2 // 3]
            elif damage == "header":
                data[3] ^= 0xFF
            elif damage == "counts":
                data = data.replace(b'"rows":1', b'"rows":7', 1)
            elif damage == "tokens" and len(data) > start:
                data[-1] ^= 1
            elif damage == "swapped":
                data = bytearray(entries[0].read_bytes())
            entry.write_bytes(data)
    assert prepared(line) == straight


@pytest.mark.slow  # test_kills_at_random_instants is in every run
def test_every_kill_point_is_survived(line: DataLine, straight: dict[str, bytes]) -> None:
    """One launch for each instant of two cycles: two sources written, manifest written, renamed."""
    for cycle, point in itertools.product((1, 2), range(1, 5)):
        child = start_preparer(line.work, "--ahead", "9", NSTRAIN_KILL_POINT=f"cycle:{point}")
        child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
        assert line.is_ready(cycle) == (point == 4)
        assert line.manifest_path(cycle).exists() == (point >= 3)
        assert not line.is_ready(cycle + 1)
    child = start_preparer(line.work, "--ahead", "9")
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert prepared(line) == straight


def test_kills_at_random_instants_are_survived(line: DataLine, straight: dict[str, bytes]) -> None:
    for _launch in range(4):
        child = start_preparer(line.work, "--ahead", "9")
        deadline = time.monotonic() + 60
        while (status := read_status(line.work)) is None or status.pid != child.pid:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(random.SystemRandom().uniform(0, 0.15))  # the whole takes about 0.4 s
        child.kill()
        child.communicate(timeout=60)
    child = start_preparer(line.work, "--ahead", "9")
    child.communicate(timeout=60)
    assert child.returncode == 0
    assert prepared(line) == straight


def test_a_kill_during_deletion_leaves_no_half_cycle(line: DataLine, tmp_path: Path) -> None:
    prepare(line, 2)
    write_consumer(line.work, "run", 2, 0, 960, tmp_path)
    child = start_preparer(line.work, NSTRAIN_KILL_POINT="cycle:1")
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert not line.is_ready(1)
    assert not line.cycle_directory(1).exists()
    prepare(line)
    assert sorted(p.name for p in (line.work / "cycles").iterdir()) == ["000002", "000003"]


# ------------------------------------------------------------------ what a manifest says


def test_a_manifest_pins_everything_the_cycle_came_from(line: DataLine) -> None:
    prepare(line)
    manifest = manifest_of(line, 2)
    plan = line.cycle_plan(2)
    assert canonical_json(manifest) + b"\n" == line.manifest_path(2).read_bytes()
    assert manifest["line"] == line.id
    assert manifest["order_version"] == ORDER_VERSION
    assert manifest["encoding_version"] == ENCODING_VERSION
    assert manifest["tokenizer_sha256"] == sha256_file(line.work / "tokenizer.json")
    assert manifest["eos_id"] == EOS
    assert manifest["previous"] == sha256_file(line.manifest_path(1))
    assert manifest_of(line, 1)["previous"] is None
    assert (manifest["piece"], manifest["first_token"], manifest["cycle_tokens"]) == (0, plan.tokens, plan.tokens)
    assert manifest["order"] == ["web", "code"]
    assert manifest["recipe"] == {"web": 2, "code": 1}
    before = states_before(line, 2)
    for name, record in manifest["sources"].items():
        assert record["listing_sha256"] == line.listing(name).digest
        assert sum(record["shares"]) == SHARE_ONE
        assert record["tail_in"] == before[name].to_json()["tail"]
        for ending in ("bin", "idx"):
            path = line.cycle_directory(2) / f"{name}.{ending}"
            assert record["files"][ending] == {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for stratum, opened in enumerate(record["opened"]):
            files = line.listing(name).files[stratum]
            for file in opened["open"]:
                pinned = files[file["order"]]
                assert (file["path"], file["size"], file["sha256"]) == (pinned.path, pinned.size, pinned.sha256)
    ready = json.loads((line.cycle_directory(2) / "READY").read_bytes())
    assert ready == {"manifest_sha256": sha256_bytes(line.manifest_path(2).read_bytes())}
    rows = CycleRows.open(line, 2, 16)
    assert rows.manifest_sha256 == ready["manifest_sha256"]
    assert row_order(manifest, 16).digest() == rows.order_digest


def test_a_cycle_follows_from_the_manifest_before_it_alone(line: DataLine, straight: dict[str, bytes]) -> None:
    prepare(line, 2)
    for name in ("cycles", "open"):
        shutil.rmtree(line.work / name)
    edit_json(line.work / "state.json", lambda value: value.pop("prepared_cycles"))  # the calibration is an input
    line.manifest_path(1).unlink()
    prepare_cycle(line, 3, line.encoder())
    assert line.manifest_path(3).read_bytes() == straight["manifests/000003.json"]
    assert contents(line.cycle_directory(3)) == {
        name.removeprefix("cycles/000003/"): data
        for name, data in straight.items()
        if name.startswith("cycles/000003/")
    }


# ------------------------------------------------------------------ inputs that are no longer what was pinned


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def first_file(line: DataLine, name: str) -> Path:
    return Path(line.source(name).path) / line.listing(name).files[0][0].path


@pytest.mark.parametrize("how", ["appended", "same size", "missing"])
def test_a_changed_source_file_is_refused_by_name(
    original: DataLine, tokenizer: Path, tmp_path: Path, how: str
) -> None:
    for name in ("web", "code"):
        shutil.copytree(original.work.parent / name, tmp_path / name)
    sources = [source("web", tmp_path / "web", 2, held_out=0.05), source("code", tmp_path / "code", held_out=0.05)]
    line = make_line(tmp_path / "line", tokenizer, sources, 960, CYCLES)
    path = first_file(line, "code")
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data + b"x" if how == "appended" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(Refusal) as caught:
        prepare(line)
    assert str(path) in str(caught.value)
    assert "source code" in str(caught.value)
    assert line.listing("code").files[0][0].sha256 in str(caught.value)
    assert not line.manifest_path(1).exists()
    assert not line.is_ready(1)
    path.write_bytes(data)
    prepare(line)


FIXED_EDITS: dict[str, Callable[[Any], None]] = {
    "seed": lambda v: v.update(seed=v["seed"] + 1),
    "eos_id": lambda v: v.update(eos_id=0),
    "unit_tokens": lambda v: v.update(unit_tokens=16),
    "open_files": lambda v: v.update(open_files=3),
    "id": lambda v: v.update(id="0" * 16),
    "tokenizer": lambda v: v["tokenizer"].update(sha256="0" * 64),
    "canary": lambda v: v["tokenizer"].update(canary_sha256="0" * 64),
    "listing": lambda v: v["sources"][0].update(listing_sha256="0" * 64),
    "held_out": lambda v: v["sources"][0]["settings"].update(held_out=0.01),
    "name": lambda v: v["sources"][0]["settings"].update(name="web2"),
    "markers": lambda v: v["sources"][0]["settings"].update(markers=["<|im_start|>"]),
    "include": lambda v: v["sources"][0]["settings"].update(include=["*.txt"]),
    "order of sources": lambda v: v["sources"].reverse(),
}


@pytest.mark.parametrize("what", FIXED_EDITS)
def test_a_line_json_edited_in_what_never_changes_is_refused(line: DataLine, what: str) -> None:
    edit_json(line.work / "line.json", FIXED_EDITS[what])
    with pytest.raises(Refusal, match=r"line.json: was edited.*put back the original"):
        DataLine.open(line.work)


def test_versions_gate(line: DataLine) -> None:
    for field, ours in (("order_version", ORDER_VERSION), ("encoding_version", ENCODING_VERSION)):
        before = (line.work / "line.json").read_text()
        edit_json(line.work / "line.json", lambda v, field=field: v.update({field: 9}))
        with pytest.raises(Refusal, match=rf"{field.upper()} 9, this nstrain has {ours}"):
            DataLine.open(line.work)
        (line.work / "line.json").write_text(before)


def test_the_place_of_a_local_source_may_move(line: DataLine, tmp_path: Path, straight: dict[str, bytes]) -> None:
    prepare(line, 1)
    for number, name in enumerate(("web", "code")):
        shutil.copytree(line.source(name).path, tmp_path / name)
        edit_json(
            line.work / "line.json",
            lambda v, n=number, name=name: v["sources"][n]["settings"].update(path=str(tmp_path / name)),
        )
    moved = DataLine.open(line.work)
    assert moved.source("web").path == str(tmp_path / "web")
    prepare(moved)
    assert prepared(moved) == straight


PIECE_EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "recipe": (lambda p: p.update(recipe={"web": 1, "code": 2}), "recipe"),
    "cycle_tokens": (lambda p: p.update(cycle_tokens=p["cycle_tokens"] * 2), "cycle_tokens"),
    "segment_units": (lambda p: p.update(segment_units=p["segment_units"] * 2), "segment_units"),
    "a source left out": (lambda p: p.update(recipe={"web": 1}), "recipe"),
}


@pytest.mark.parametrize("what", PIECE_EDITS)
def test_an_edit_of_a_prepared_cycle_is_refused_naming_the_difference(line: DataLine, what: str) -> None:
    prepare(line, 1)
    edit, field = PIECE_EDITS[what]
    edit_json(line.work / "line.json", lambda v: edit(v["schedule"][0]))
    edited = DataLine.open(line.work)
    for act in (
        lambda: run_preparer(line.work, until_cycle=2, workers=0),
        lambda: prepare_cycle(edited, 2, edited.encoder()),
        lambda: CycleRows.open(edited, 1, 16),
    ):
        with pytest.raises(Refusal, match=f"cycle 1 was prepared with {field} .*, found "):
            act()
    assert not line.manifest_path(2).exists()


def test_an_edit_of_an_earlier_cycle_is_refused_even_if_the_last_is_as_it_was(line: DataLine) -> None:
    prepare(line, 2)

    def split(value: Any) -> None:
        (piece,) = value["schedule"]
        first = {**piece, "cycles": 1, "recipe": {"web": 1, "code": 2}}
        value["schedule"] = [first, {**piece, "cycles": 2}]

    edit_json(line.work / "line.json", split)
    with pytest.raises(Refusal, match="cycle 1 was prepared with recipe"):
        run_preparer(line.work, until_cycle=3, workers=0)


@pytest.mark.parametrize("recipe", [{"code": 1, "web": 2}, {"web": 2, "nope": 1}])
def test_a_schedule_of_unknown_or_reordered_sources_is_refused(line: DataLine, recipe: dict[str, int]) -> None:
    edit_json(line.work / "line.json", lambda v: v["schedule"][0].update(recipe=recipe))
    with pytest.raises(Refusal, match="in their order: web, code"):
        DataLine.open(line.work)


def test_another_tokenizer_is_refused(line: DataLine) -> None:
    prepare(line, 1)
    path = line.work / "tokenizer.json"
    data = path.read_bytes()
    path.write_bytes(data + b"\n")
    with pytest.raises(Refusal, match=r"tokenizer.json: has sha256 .*, the line was made with .*put the original back"):
        prepare(line, 2)
    path.unlink()
    with pytest.raises(Refusal, match=r"tokenizer.json: missing"):
        prepare(line, 2)
    path.write_bytes(data)
    prepare(line, 2)


def test_an_edited_listing_is_refused(line: DataLine) -> None:
    path = line.work / "sources" / "web" / "files.parquet"
    data = path.read_bytes()
    shutil.copy(line.work / "sources" / "code" / "files.parquet", path)
    with pytest.raises(Refusal, match=r"web/files.parquet: its content has digest .*, line.json pins"):
        prepare(DataLine.open(line.work))
    for broken in (b"", data[: len(data) // 2]):
        path.write_bytes(broken)
        with pytest.raises(Refusal, match=r"web/files.parquet: the pinned file list cannot be read"):
            prepare(DataLine.open(line.work))
    path.unlink()
    with pytest.raises(Refusal, match="cannot be read"):
        prepare(DataLine.open(line.work))
    path.write_bytes(data)
    prepare(DataLine.open(line.work), 1)


def test_a_damaged_manifest_is_refused(line: DataLine) -> None:
    prepare(line, 1)
    path = line.manifest_path(1)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"cycle":1', b'"cycle":2'))
    with pytest.raises(Refusal, match="READY: expected .*one of the two is damaged"):
        CycleRows.open(line, 1, 16)
    for broken in (b"", b"{}", b"[]", data[:-5], json.dumps(json.loads(data)).encode()):
        path.write_bytes(broken)
        with pytest.raises(Refusal, match=r"not a manifest|was prepared with"):
            prepare_cycle(line, 2, line.encoder())
    path.unlink()
    with pytest.raises(Refusal, match="no such manifest; restore it from a copy"):
        load_manifest(path)


def test_a_cycle_that_comes_out_otherwise_than_its_manifest_is_refused(line: DataLine) -> None:
    prepare(line, 1)
    shutil.rmtree(line.cycle_directory(1))
    manifest = json.loads(line.manifest_path(1).read_bytes())
    shares = manifest["sources"]["web"]["shares"]
    shares[0], shares[1] = shares[0] - 2**25, shares[1] + 2**25
    line.manifest_path(1).write_bytes(canonical_json(manifest) + b"\n")
    with pytest.raises(Refusal, match="gives another manifest"):
        prepare_cycle(line, 1, line.encoder())
    assert not line.is_ready(1)


def test_a_cycle_whose_token_file_has_another_size_is_refused(line: DataLine) -> None:
    prepare(line, 1)
    path = line.cycle_directory(1) / "web.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(NeedsOperator, match=r"web.bin: expected [\d,]+ bytes, found"):
        CycleRows.open(line, 1, 16)
    path.unlink()
    with pytest.raises(NeedsOperator, match="found no file"):
        CycleRows.open(line, 1, 16)


def test_any_trace_of_a_cycle_says_that_it_was_prepared(line: DataLine) -> None:
    """What is left out is left out from the cycle after it on, though its manifest and its tokens be lost."""
    state = json.loads((line.work / "state.json").read_text())
    (line.work / "state.json").write_text(json.dumps({**state, "prepared_cycles": 3}))
    assert last_prepared(line) == 3
    line.cycle_directory(4).mkdir(parents=True)
    (line.work / "cycles" / ".000009.partial").mkdir()
    assert last_prepared(line) == 4
    line.manifest_path(6).write_text("")
    assert last_prepared(line) == 6
    (line.work / "state.json").write_text("{")
    assert last_prepared(line) == 6


def test_a_cycle_that_is_not_there_says_why(line: DataLine) -> None:
    with pytest.raises(Refusal, match=r"cycle 1 is not on disk .it has not been prepared"):
        CycleRows.open(line, 1, 16)
    prepare(line, 1)
    shutil.rmtree(line.cycle_directory(1))
    with pytest.raises(Refusal, match="its tokens were deleted"):
        CycleRows.open(line, 1, 16)
    with pytest.raises(NstrainError, match="is not a data line"):
        DataLine.open(line.work / "val")
