"""A cycle again from its manifest alone, and every kind of damage to a line found and named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import contents, manifest_of, prepare, prepared
from mixed_line import mixed_line
from typer.testing import CliRunner

from nstrain.base.disk import canonical_json
from nstrain.base.errors import Refusal
from nstrain.cli.data import app
from nstrain.data.branch import branch_line
from nstrain.data.consumers import write_consumer
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import run_preparer
from nstrain.data.rebuild import rebuild_cycle, rebuild_in_line
from nstrain.data.val import collect_held_out
from nstrain.data.verify import verify_line

CYCLES = 4


@pytest.fixture(scope="module")
def original(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """Four prepared cycles over sources of every reader, held-out rows, a training line in the second cycle."""
    line = mixed_line(tmp_path_factory.mktemp("mixed"), tokenizer, unit_tokens=16, cycles=CYCLES)
    collect_held_out(line)
    prepare(line)
    write_consumer(line.work, "run", 2, 1, 1300, line.work)
    return line


@pytest.fixture
def line(original: DataLine, tmp_path: Path) -> DataLine:
    """A copy of the line; its sources lie where they were."""
    shutil.copytree(original.work, tmp_path / "line")
    return DataLine.open(tmp_path / "line")


@pytest.fixture
def places(original: DataLine, tmp_path: Path) -> dict[str, Path]:
    """A copy of the sources."""
    root = tmp_path / "machine"
    for name in original.source_names:
        shutil.copytree(original.source(name).path or "", root / name)
    return {name: root / name for name in original.source_names}


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    """Edit a file and keep its canonical form."""
    value = json.loads(path.read_bytes())
    edit(value)
    path.write_bytes(canonical_json(value) + b"\n")


# ------------------------------------------------------------------ rebuilding


@pytest.mark.parametrize("cycle", range(1, CYCLES + 1))
def test_a_cycle_is_rebuilt_in_its_line(line: DataLine, cycle: int) -> None:
    everything = prepared(line)
    shutil.rmtree(line.cycle_directory(cycle))
    shutil.rmtree(line.work / "open")
    assert rebuild_in_line(line, cycle, workers=0) == line.cycle_directory(cycle)
    assert prepared(line) == everything
    assert not [p for p in (line.work / "cycles").iterdir() if p.name.startswith(".")]


def test_a_cycle_on_disk_is_not_replaced_but_rebuilt_beside_it(line: DataLine, tmp_path: Path) -> None:
    before = contents(line.work)
    with pytest.raises(Refusal, match="exists already"):
        rebuild_in_line(line, 2, workers=0)
    assert contents(line.work) == before
    rebuild_in_line(line, 2, tmp_path / "beside")
    assert contents(tmp_path / "beside") == contents(line.cycle_directory(2))
    assert contents(line.work) == before


@pytest.mark.parametrize("cycle", range(1, CYCLES + 1))
def test_a_cycle_is_rebuilt_on_an_empty_machine(
    line: DataLine, places: dict[str, Path], tmp_path: Path, cycle: int
) -> None:
    """Manifest, tokenizer and sources are all there is."""
    expected = contents(line.cycle_directory(cycle))
    machine = tmp_path / "machine"
    shutil.copyfile(line.manifest_path(cycle), machine / "manifest.json")
    shutil.copyfile(line.work / "tokenizer.json", machine / "tokenizer.json")
    shutil.rmtree(line.work)
    rebuild_cycle(machine / "manifest.json", machine / "tokenizer.json", places, machine / "out", workers=0)
    assert contents(machine / "out") == expected
    assert sorted(p.name for p in machine.iterdir()) == [
        "manifest.json", "nested", "out", "rows", "tokenizer.json", "tree",
    ]  # fmt: skip


def test_only_the_files_that_the_cycle_reads_are_needed(
    line: DataLine, places: dict[str, Path], tmp_path: Path
) -> None:
    for name, record in manifest_of(line, 2)["sources"].items():
        named = {file["path"] for stratum in record["opened"] for file in stratum["open"]}
        named.add(record["tail_in"]["path"])
        for path in places[name].rglob("*"):
            if path.is_file() and path.relative_to(places[name]).as_posix() not in named:
                path.unlink()
    rebuild_cycle(line.manifest_path(2), line.work / "tokenizer.json", places, tmp_path / "out", workers=0)
    assert contents(tmp_path / "out") == contents(line.cycle_directory(2))


def test_a_branchs_first_cycle_is_rebuilt_too(line: DataLine, places: dict[str, Path], tmp_path: Path) -> None:
    branch = branch_line(tmp_path / "branch", line.work, 2, 320, 1, unit_tokens=8)
    prepare(branch)
    rebuild_cycle(branch.manifest_path(1), branch.work / "tokenizer.json", places, tmp_path / "out", workers=0)
    assert contents(tmp_path / "out") == contents(branch.cycle_directory(1))


def test_a_cycle_deleted_behind_a_training_line_that_goes_back_is_made_again_from_its_manifest(line: DataLine) -> None:
    """With nothing else left of it: no open files, no earlier manifest's state is asked."""
    everything = prepared(line)
    write_consumer(line.work, "run", 4, 0, 4000, line.work)
    run_preparer(line.work, until_cycle=CYCLES, workers=0)
    assert cycles_on_disk(line) == [4]
    shutil.rmtree(line.work / "open")
    write_consumer(line.work, "run", 2, 3, 1400, line.work)
    run_preparer(line.work, until_cycle=CYCLES, workers=0)
    assert cycles_on_disk(line) == [2, 3, 4]
    assert prepared(line) == {name: data for name, data in everything.items() if not name.startswith("cycles/000001")}


def refuse_rebuild(
    line: DataLine, places: dict[str, Path], tmp_path: Path, match: str, tokenizer: Path | None = None
) -> None:
    """Rebuilding cycle 2 is refused and leaves nothing."""
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(Refusal, match=match):
        rebuild_cycle(
            line.manifest_path(2), tokenizer or line.work / "tokenizer.json", places, tmp_path / "out", workers=0
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("how", ["appended", "same size", "missing"])
@pytest.mark.parametrize("name", ["rows", "nested", "tree"])
def test_a_changed_file_is_refused_by_name(
    line: DataLine, places: dict[str, Path], tmp_path: Path, name: str, how: str
) -> None:
    record = manifest_of(line, 2)["sources"][name]
    file = places[name] / record["tail_in"]["path"]
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data + b"x" if how == "appended" else data[:-1] + bytes([data[-1] ^ 1]))
    refuse_rebuild(line, places, tmp_path, rf"source {name}: .*{file.name}")


def test_another_tokenizer_or_a_missing_place_is_refused(
    line: DataLine, places: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes((line.work / "tokenizer.json").read_bytes() + b"\n")
    refuse_rebuild(line, places, tmp_path, r"other.json: has sha256 .*, the cycle was made with", other)
    refuse_rebuild(line, {"rows": places["rows"]}, tmp_path, "say where source nested lies: --source nested=DIRECTORY")


def first_range(manifest: Any) -> list[int]:
    """The first range of documents that the source `rows` takes."""
    ranges: list[int] = next(ranges for ranges in manifest["sources"]["rows"]["segments"] if ranges)[0]
    return ranges


MANIFEST_EDITS: dict[str, Callable[[Any], None]] = {
    "order_version": lambda m: m.update(order_version=1),
    "encoding_version": lambda m: m.update(encoding_version=9),
    "shares": lambda m: m["sources"]["rows"]["shares"].reverse(),
    "segments": lambda m: first_range(m).__setitem__(3, 99),
    "bin": lambda m: m["sources"]["tree"]["files"]["bin"].update(sha256="0" * 64),
    "idx": lambda m: m["sources"]["tree"]["files"]["idx"].update(bytes=25),
    "documents": lambda m: m["sources"]["nested"].update(documents=1),
    "targets": lambda m: m["sources"]["nested"].update(targets=16),
    "identity": lambda m: m["sources"]["nested"].update(identity="0" * 64),
    "held out": lambda m: m["sources"]["rows"]["settings"].update(held_out=0.3),
    "file": lambda m: m["sources"]["tree"]["tail_in"].update(sha256="0" * 64),
    "tail": lambda m: m["sources"]["rows"]["tail_in"].update(order=77),
    "cursor": lambda m: next(s for s in m["sources"]["rows"]["opened"] if s["open"])["open"][0].update(
        cursor=0, left=9
    ),
    "strata": lambda m: m["sources"]["nested"]["strata"].reverse(),
    "segment_units": lambda m: m.update(segment_units=9),
    "a source": lambda m: m["sources"].pop("tree"),
    "a field": lambda m: m["sources"]["rows"].pop("opened"),
}


@pytest.mark.parametrize("what", MANIFEST_EDITS)
def test_an_edited_manifest_is_refused(line: DataLine, places: dict[str, Path], tmp_path: Path, what: str) -> None:
    edit_json(line.manifest_path(2), MANIFEST_EDITS[what])
    refuse_rebuild(line, places, tmp_path, r"manifests/000002.json|source tree: .*sha256")


def test_the_command_rebuilds_with_and_without_a_line(line: DataLine, places: dict[str, Path], tmp_path: Path) -> None:
    everything = prepared(line)
    shutil.rmtree(line.cycle_directory(3))
    done = CliRunner().invoke(app, ["rebuild", "--work", str(line.work), "--cycle", "3"])
    assert done.exit_code == 0, done.output
    assert prepared(line) == everything
    out = ["--out", str(tmp_path / "out")]
    named = ["--manifest", str(line.manifest_path(1)), "--tokenizer", str(line.work / "tokenizer.json")]
    for name, place in places.items():
        named += ["--source", f"{name}={place}"]
    done = CliRunner().invoke(app, ["rebuild", *named, *out])
    assert done.exit_code == 0, done.output
    assert contents(tmp_path / "out") == contents(line.cycle_directory(1))
    of_line = ["--work", str(line.work), "--cycle", "3"]
    for wrong in (
        of_line[2:], of_line[:2], named, [*named, *out, *of_line[:2]], [*named, *out, *of_line[2:]],
        [*of_line, "--tokenizer", "no such file"], [*of_line, "--source", "books=here"],
    ):  # fmt: skip
        refused = CliRunner().invoke(app, ["rebuild", *wrong])
        assert isinstance(refused.exception, Refusal), wrong
        assert "rebuild takes --work and --cycle (and --out), or --manifest" in str(refused.exception)
    for pair in ("books", "=here", "books="):
        refused = CliRunner().invoke(app, ["rebuild", *named, *out, "--source", pair])
        assert f"--source: expected NAME=DIRECTORY, each name once, found '{pair}'" in str(refused.exception)


# ------------------------------------------------------------------ verifying


def failures(line: DataLine) -> dict[str, str]:
    """What a look finds wrong, by what was looked at."""
    return {item.what: item.message for item in verify_line(line) if not item.ok}


def test_a_whole_line_verifies(line: DataLine) -> None:
    before = contents(line.work)
    seen: list[str] = []
    found = verify_line(line, seen.append)
    assert [item.what for item in found] == seen
    assert all(item.ok for item in found)
    assert {"pinned files of rows", "calibration", "tokenizer", "held-out rows", "consumers"} <= set(seen)
    assert {f"{kind} {k}" for kind in ("manifest", "cycle") for k in range(1, CYCLES + 1)} <= set(seen)
    assert contents(line.work) == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edits_manifest(cycle: int, edit: Callable[[Any], None]) -> Callable[[DataLine], None]:
    return lambda line: edit_json(line.manifest_path(cycle), edit)


def exchanges_manifests(line: DataLine) -> None:
    second, third = line.manifest_path(2).read_bytes(), line.manifest_path(3).read_bytes()
    line.manifest_path(2).write_bytes(third)
    line.manifest_path(3).write_bytes(second)


def forgets_an_edited_last_manifest(line: DataLine) -> None:
    """Nothing follows it, and its cycle is away: only what it says of the cycle before can be wrong."""
    shutil.rmtree(line.cycle_directory(CYCLES))
    edit_json(line.manifest_path(CYCLES), lambda m: m["sources"]["rows"]["tail_in"].update(offset=0, tokens=1))


def halves_cycles(line: DataLine) -> None:
    value = json.loads((line.work / "line.json").read_bytes())
    value["schedule"][0].update(segment_units=1, cycle_tokens=640)
    (line.work / "line.json").write_text(json.dumps(value))


DAMAGE: dict[str, tuple[Callable[[DataLine], None], set[str], str]] = {
    "a token file": (lambda at: flip(at.cycle_directory(2) / "rows.bin"), {"cycle 2"}, r"2/rows.bin: expected sha256"),
    "a table": (lambda at: flip(at.cycle_directory(3) / "tree.idx"), {"cycle 3"}, r"000003/tree.idx: expected sha256"),
    "a lost token file": (lambda at: (at.cycle_directory(1) / "nested.bin").unlink(), {"cycle 1"}, "found no file"),
    "READY": (lambda at: (at.cycle_directory(1) / "READY").write_text("{}"), {"cycle 1"}, "READY: expected the hash"),
    "held-out text": (lambda at: flip(at.work / "val" / "tree.bin"), {"held-out rows"}, r"tree.bin: expected sha256"),
    "the held-out index": (lambda at: (at.work / "val" / "index.json").unlink(), {"held-out rows"}, "json: missing"),
    "an edited held-out index": (
        lambda at: edit_json(at.work / "val" / "index.json", lambda i: i["sources"]["tree"].update(held_out=0.3)),
        {"held-out rows"},
        r"index.json: its content does not have the sha256 that stands in it",
    ),
    "a pinned list": (
        lambda at: shutil.copy(at.work / "sources/rows/files.parquet", at.work / "sources/tree/files.parquet"),
        {"pinned files of tree", "manifest 1"},
        r"tree/files.parquet: its content has digest",
    ),
    "the calibration": (
        lambda at: edit_json(at.work / "state.json", lambda s: s["calibration"].update(tokenizer_sha256="")),
        {"calibration"},
        r"state.json: its calibration has digest",
    ),
    "state.json": (lambda at: (at.work / "state.json").unlink(), {"calibration"}, r"state.json"),
    "the tokenizer": (lambda at: flip(at.work / "tokenizer.json"), {"tokenizer"}, r"tokenizer.json: has sha256"),
    "a training line's file": (
        lambda at: (at.work / "consumers" / "run.json").write_text('{"cycle": 0}'),
        {"consumers"},
        r"consumers/run.json",
    ),
    "an edited manifest": (
        edits_manifest(2, lambda m: m["after"]["rows"]["counts"].update(rows=1)),
        {"manifest 3", "cycle 2"},
        r"000003.json: follows manifest",
    ),
    "a manifest's ranges": (
        edits_manifest(2, lambda m: first_range(m).__setitem__(2, 99)),
        {"manifest 2", "manifest 3", "cycle 2"},
        r"000002.json: source rows takes documents 99 ... ",
    ),
    "a manifest's start": (
        edits_manifest(2, lambda m: m["sources"]["tree"]["tail_in"].update(document=5)),
        {"manifest 2", "manifest 3", "cycle 2"},
        "source tree: begins with another tail",
    ),
    "a manifest's strata": (
        edits_manifest(2, lambda m: m["sources"]["tree"]["opened"].pop()),
        {"manifest 2", "manifest 3", "cycle 2"},
        "",
    ),
    "a manifest's plan": (
        edits_manifest(2, lambda m: m.update(cycle_tokens=8)),
        {"manifest 2", "manifest 3", "cycle 2"},
        "cycle 2 was prepared with cycle_tokens 8, found 1280",
    ),
    "a cut manifest": (
        lambda at: at.manifest_path(2).write_bytes(at.manifest_path(2).read_bytes()[:-9]),
        {"manifest 2", "manifest 3", "cycle 2"},
        "000002.json: not a manifest",
    ),
    "a lost manifest": (
        lambda at: at.manifest_path(2).unlink(),
        {"manifest 2", "manifest 3", "cycle 2"},
        "000002.json: no such manifest; .*run-preparer",
    ),
    "the last manifest lost": (
        lambda at: at.manifest_path(CYCLES).unlink(), {f"manifest {CYCLES}", f"cycle {CYCLES}"}, "no such manifest",
    ),
    "exchanged manifests": (
        exchanges_manifests,
        {"manifest 2", "manifest 3", "manifest 4", "cycle 2", "cycle 3"},
        r"000002.json: is of cycle 3",
    ),
    "the last manifest edited": (forgets_an_edited_last_manifest, {f"manifest {CYCLES}"}, "another tail"),
    "line.json": (
        halves_cycles,
        {f"manifest {k}" for k in range(1, CYCLES + 1)},
        "cycle 1 was prepared with cycle_tokens 1280, found 640",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_named(line: DataLine, what: str) -> None:
    damages, looked_at, message = DAMAGE[what]
    damages(line)
    found = failures(DataLine.open(line.work))
    assert set(found) == looked_at
    assert any(re.search(message, text) for text in found.values()), found


def test_the_command_shows_every_finding_and_fails(line: DataLine) -> None:
    done = CliRunner().invoke(app, ["verify", "--work", str(line.work)])
    assert done.exit_code == 0, done.output
    assert "FAILED" not in done.output
    flip(line.cycle_directory(2) / "rows.bin")
    flip(line.work / "val" / "tree.bin")
    done = CliRunner().invoke(app, ["verify", "--work", str(line.work)])
    assert done.exit_code == 1
    assert done.output.count("FAILED") == 2
    done = CliRunner().invoke(app, ["verify", "--work", str(line.work), "--json"])
    assert done.exit_code == 1
    items = json.loads(done.stdout)
    assert {item["what"] for item in items if not item["ok"]} == {"cycle 2", "held-out rows"}


def test_what_is_deleted_after_use_is_no_damage(line: DataLine) -> None:
    write_consumer(line.work, "run", 3, 0, 2560, line.work)
    run_preparer(line.work, until_cycle=CYCLES, workers=0)
    assert cycles_on_disk(line) == [3, 4]
    shutil.rmtree(line.work / "open")
    assert failures(line) == {}
