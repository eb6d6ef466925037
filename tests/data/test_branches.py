"""A branch goes on with its trunk's remaining text: from its state, beside it, without either disturbing the other."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import contents, documents_in, make_line, manifest_of, prepare, prepared, stream_of
from mixed_line import mixed_line, write_sources
from typer.testing import CliRunner

from nstrain.base.disk import sha256_file
from nstrain.base.errors import Refusal
from nstrain.cli.data import app
from nstrain.data import branch as branch_module
from nstrain.data.branch import branch_line, forked_recipe
from nstrain.data.consumers import write_consumer
from nstrain.data.line import DataLine
from nstrain.data.preparer import run_preparer
from nstrain.data.rows import CycleRows
from nstrain.data.val import ValidationRows, collect_held_out
from nstrain.data.verify import verify_line

FORK = 2
"""The trunk's cycle after which the branches fork."""
UNIT = 16


@pytest.fixture(scope="module")
def original(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A trunk of three prepared cycles, with held-out rows and a training line in the second."""
    line = mixed_line(tmp_path_factory.mktemp("trunk"), tokenizer, unit_tokens=UNIT, segment_units=2)
    collect_held_out(line)
    prepare(line, 3)
    write_consumer(line.work, "run", 2, 1, 1300, line.work)
    return line


@pytest.fixture
def trunk(original: DataLine, tmp_path: Path) -> DataLine:
    """A copy of the trunk."""
    shutil.copytree(original.work, tmp_path / "trunk")
    return DataLine.open(tmp_path / "trunk")


def drawn(line: DataLine, name: str, cycles: range) -> list[tuple[int, int, int]]:
    return [document for cycle in cycles for document in documents_in(line, name, cycle)]


def test_its_position_counts_on_from_the_fork(trunk: DataLine, tmp_path: Path) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 3)
    at_fork = trunk.cycle_plan(FORK + 1).first_token
    assert [branch.cycle_plan(k).first_token for k in (1, 2, 3)] == [at_fork, at_fork + 640, at_fork + 1280]
    assert branch.total_tokens == at_fork + 3 * 640
    assert branch.cycle_count == 3
    fork = branch.settings.fork
    assert fork is not None
    assert (fork.line, fork.cycle, fork.tokens) == (trunk.id, FORK, at_fork)
    assert fork.manifest_sha256 == sha256_file(trunk.manifest_path(FORK)) == sha256_file(branch.work / "parent.json")
    assert branch.id != trunk.id
    assert branch.settings.calibration_sha256 == trunk.settings.calibration_sha256
    prepare(branch)
    assert manifest_of(branch, 1)["previous"] == fork.manifest_sha256
    assert [manifest_of(branch, k)["first_token"] for k in (1, 2, 3)] == [at_fork, at_fork + 640, at_fork + 1280]
    assert {item.what for item in verify_line(branch) if not item.ok} == set()


def test_its_first_streams_begin_with_the_trunks_tails(trunk: DataLine, tmp_path: Path) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 2)
    prepare(branch)
    after = manifest_of(trunk, FORK)["after"]
    for name in trunk.source_names:
        record = manifest_of(branch, 1)["sources"][name]
        assert record["tail_in"] == after[name]["tail"]
        stream, trunks = stream_of(branch, 1, name), stream_of(trunk, FORK + 1, name)
        tail = min(after[name]["tail"]["tokens"], len(stream), len(trunks))
        assert np.array_equal(stream[:tail], trunks[:tail])
        assert stream[0] == stream_of(trunk, FORK, name)[-1]


def test_nothing_is_trained_twice_between_the_trunks_prefix_and_the_branch(trunk: DataLine, tmp_path: Path) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 5)
    prepare(branch)
    for name in trunk.source_names:
        documents = drawn(trunk, name, range(1, FORK + 1)) + drawn(branch, name, range(1, 6))
        assert len(set(documents)) == len(documents) > 8


def test_trunk_and_branch_do_not_disturb_each_other(original: DataLine, trunk: DataLine, tmp_path: Path) -> None:
    alone = branch_line(tmp_path / "alone", original.work, FORK, 640, 3)
    prepare(alone)
    before = contents(trunk.work)
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 3)
    assert contents(trunk.work) == before
    prepare(branch, 1)
    assert contents(trunk.work) == before
    unprepared = contents(branch.work)
    prepare(trunk, 5)
    assert contents(branch.work) == unprepared
    shutil.rmtree(trunk.work)  # a branch needs nothing more of it
    prepare(DataLine.open(branch.work))
    assert prepared(branch) == prepared(alone)


def test_a_trunk_goes_on_as_if_it_had_no_branch(original: DataLine, trunk: DataLine, tmp_path: Path) -> None:
    prepare(branch_line(tmp_path / "branch", trunk.work, FORK, 640, 3))
    prepare(trunk, 4)
    shutil.copytree(original.work, tmp_path / "without")
    without = DataLine.open(tmp_path / "without")
    prepare(without, 4)
    assert prepared(trunk) == prepared(without)


def test_a_branch_of_the_trunks_own_schedule_is_the_trunk(trunk: DataLine, tmp_path: Path) -> None:
    """Its streams are token for token those of the trunk: both draw from one state."""
    piece = trunk.settings.schedule[0]
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, piece.cycle_tokens, 1, segment_units=2)
    prepare(branch)
    for name in trunk.source_names:
        assert np.array_equal(stream_of(branch, 1, name), stream_of(trunk, FORK + 1, name))
    assert manifest_of(branch, 1)["after"] == manifest_of(trunk, FORK + 1)["after"]


def test_a_fork_needs_neither_the_trunks_tokens_nor_its_open_files(
    original: DataLine, trunk: DataLine, tmp_path: Path
) -> None:
    for name in ("cycles", "open"):
        shutil.rmtree(trunk.work / name)
    with_them = branch_line(tmp_path / "with", original.work, 1, 640, 2)
    without = branch_line(tmp_path / "without", trunk.work, 1, 640, 2)
    for line in (with_them, without):
        prepare(line)
    assert prepared(with_them) == prepared(without)


# ------------------------------------------------------------------ units, recipes, branches of branches


def test_held_out_rows_are_the_trunks_but_for_a_longer_unit(trunk: DataLine, tmp_path: Path) -> None:
    shorter = branch_line(tmp_path / "shorter", trunk.work, FORK, 640, 1, unit_tokens=UNIT // 2)
    rows, trunks = (ValidationRows.open(line, UNIT // 2, 8).rows for line in (shorter, trunk))
    assert [(r.source, r.stratum, r.weight, r.tokens.tolist()) for r in rows] == [
        (r.source, r.stratum, r.weight, r.tokens.tolist()) for r in trunks
    ]
    longer = branch_line(tmp_path / "longer", trunk.work, FORK, 1280, 2, unit_tokens=4 * UNIT)
    with pytest.raises(Refusal, match="has no held-out rows yet; run `nstrain data val"):
        ValidationRows.open(longer, UNIT, 1)
    index = collect_held_out(longer, 2000)
    assert index["line"] == longer.id
    assert {row.tokens.size for row in ValidationRows.open(longer, 4 * UNIT, 1).rows} == {4 * UNIT + 1}
    prepare(longer)
    assert CycleRows.open(longer, 1, 4 * UNIT).rows == longer.cycle_plan(1).tokens // (4 * UNIT)
    for name in trunk.source_names:
        documents = drawn(trunk, name, range(1, FORK + 1)) + drawn(longer, name, range(1, 3))
        assert len(set(documents)) == len(documents)


def test_an_edited_held_out_index_is_not_taken_over(trunk: DataLine, tmp_path: Path) -> None:
    path = trunk.work / "val" / "index.json"
    path.write_bytes(path.read_bytes().replace(b'"held_out":', b'"held_out": '))
    with pytest.raises(Refusal, match=r"val/index.json: its content does not have the sha256"):
        branch_line(tmp_path / "branch", trunk.work, FORK, 640, 1)
    assert not (tmp_path / "branch").exists()


def test_a_source_left_out_of_the_recipe_keeps_its_state(trunk: DataLine, tmp_path: Path) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 1, recipe={"tree": 1, "rows": 3})
    assert branch.settings.schedule[0].recipe == {"rows": 3, "tree": 1}
    prepare(branch)
    manifest = manifest_of(branch, 1)
    assert list(manifest["sources"]) == ["rows", "tree"]
    assert manifest["after"]["nested"] == manifest_of(trunk, FORK)["after"]["nested"]
    again = branch_line(tmp_path / "again", branch.work, 1, 640, 1, recipe={"nested": 1})
    prepare(again)
    assert stream_of(again, 1, "nested")[0] == stream_of(trunk, FORK, "nested")[-1]
    assert manifest_of(again, 1)["sources"]["nested"]["tail_in"] == manifest["after"]["nested"]["tail"]


def test_a_branch_of_a_branch(trunk: DataLine, tmp_path: Path) -> None:
    first = branch_line(tmp_path / "first", trunk.work, FORK, 640, 3)
    prepare(first, 2)
    second = branch_line(tmp_path / "second", first.work, 1, 320, 2, unit_tokens=UNIT // 2)
    assert second.settings.fork is not None
    assert second.settings.fork.line == first.id
    assert second.cycle_plan(1).first_token == trunk.cycle_plan(FORK + 1).first_token + 640
    prepare(second)
    for name in trunk.source_names:
        documents = drawn(trunk, name, range(1, FORK + 1)) + drawn(first, name, range(1, 2))
        documents += drawn(second, name, range(1, 3))
        assert len(set(documents)) == len(documents)
        assert stream_of(second, 1, name)[0] == stream_of(first, 1, name)[-1]
    assert all(item.ok for item in verify_line(second))


def test_training_lines_of_the_trunk_are_none_of_the_branchs(trunk: DataLine, tmp_path: Path) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 1)
    for name in ("consumers", "cycles", "manifests", "open"):
        assert list((branch.work / name).iterdir()) == []


# ------------------------------------------------------------------ what is refused


def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(trunk: DataLine, tmp_path: Path) -> None:
    work = tmp_path / "branch"
    for arguments, options, match in (
        ((4, 640), {}, r"cycle 4 has not been prepared; fork after one that has, or prepare it"),
        ((FORK, 640), {"recipe": {"nope": 1}}, "no source is called nope; .*has rows, nested, tree"),
        ((FORK, 640), {"recipe": {"rows": 997, "tree": 1}}, "coarser shares"),
        ((FORK, 640), {"segment_units": 9999}, "segment_units 9999"),
        ((FORK, 640, 100_000), {}, "source tree: .* pinned bytes give at most .*give it a smaller share"),
    ):
        with pytest.raises(Refusal, match=match):
            branch_line(work, trunk.work, *arguments, **options)  # type: ignore[arg-type]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["trunk"]
    with pytest.raises(Refusal, match="is not a data line"):
        branch_line(work, tmp_path, FORK, 640)
    before = contents(trunk.work)
    with pytest.raises(Refusal, match="exists already"):
        branch_line(trunk.work, trunk.work, FORK, 640)
    assert contents(trunk.work) == before
    trunk.manifest_path(FORK).unlink()
    with pytest.raises(Refusal, match=rf"no such manifest; restore it from a copy, or .*--until {FORK}"):
        branch_line(work, trunk.work, FORK, 640)


def test_a_trunk_whose_past_was_edited_is_no_place_to_fork_from(trunk: DataLine, tmp_path: Path) -> None:
    value = json.loads((trunk.work / "line.json").read_text())
    for edit, match in (
        ({"cycle_tokens": 2 * value["schedule"][0]["cycle_tokens"]}, "was prepared with first_token"),
        ({"recipe": {**value["schedule"][0]["recipe"], "rows": 7}}, "not a whole number of segments"),
    ):
        edited = {**value, "schedule": [{**value["schedule"][0], **edit}, *value["schedule"][1:]]}
        (trunk.work / "line.json").write_text(json.dumps(edited))
        with pytest.raises(Refusal, match=match):
            branch_line(tmp_path / "branch", trunk.work, FORK, 640)
        assert not (tmp_path / "branch").exists()


def test_a_fork_goes_on_with_the_recipe_of_its_cycle(trunk: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    (piece,), other = trunk.settings.schedule, dict.fromkeys(trunk.source_names, 1)
    assert (first := piece.recipe) != other
    pieces = (piece, piece.model_copy(update={"recipe": other}))
    extended = dataclasses.replace(trunk, settings=trunk.settings.model_copy(update={"schedule": pieces}))
    monkeypatch.setattr(branch_module, "_forked_manifest", lambda trunk, cycle: {"piece": int(cycle > FORK)})
    assert [forked_recipe(extended, cycle) for cycle in (FORK, FORK + 1)] == [first, other]
    assert forked_recipe(extended, FORK, dict(reversed(first.items()))) == first


FORK_EDITS: dict[str, Callable[[Any], None]] = {
    "line": lambda fork: fork.update(line="0" * 16),
    "cycle": lambda fork: fork.update(cycle=1),
    "tokens": lambda fork: fork.update(tokens=0),
    "manifest": lambda fork: fork.update(manifest_sha256="0" * 64),
}


@pytest.mark.parametrize("what", FORK_EDITS)
def test_an_edited_fork_is_refused(trunk: DataLine, tmp_path: Path, what: str) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 1)
    value = json.loads((branch.work / "line.json").read_text())
    FORK_EDITS[what](value["fork"])
    (branch.work / "line.json").write_text(json.dumps(value))
    with pytest.raises(Refusal, match=r"line.json: was edited"):
        DataLine.open(branch.work)


@pytest.mark.parametrize("how", ["another", "missing"])
def test_another_parent_manifest_is_refused(trunk: DataLine, tmp_path: Path, how: str) -> None:
    branch = branch_line(tmp_path / "branch", trunk.work, FORK, 640, 1)
    path = branch.work / "parent.json"
    if how == "another":
        shutil.copyfile(trunk.manifest_path(1), path)
    else:
        path.unlink()
    with pytest.raises(Refusal, match=r"parent.json"):
        run_preparer(branch.work, until_cycle=1, workers=0)
    assert not branch.is_ready(1)


def test_the_command(trunk: DataLine, tmp_path: Path) -> None:
    work = str(tmp_path / "branch")
    arguments = ["branch", "--work", work, "--from", str(trunk.work), "--at-cycle", "2", "--cycle-tokens", "640"]
    done = CliRunner().invoke(app, [*arguments, "--cycles", "2", "--share", "rows=3", "--share", "nested=1"])
    assert done.exit_code == 0, done.output
    assert "forked after cycle 2; 2 cycles of 640 tokens" in done.output
    branch = DataLine.open(tmp_path / "branch")
    assert branch.settings.schedule[0].recipe == {"rows": 3, "nested": 1}
    others = ", ".join(name for name in trunk.source_names if name not in ("rows", "nested"))
    assert others
    assert f"mixture: rows 75 %, nested 25 %; nothing of {others}\n" in done.output
    done = CliRunner().invoke(
        app, ["extend", "--work", work, "--cycles", "1", "--share", "nested=1", "--cycle-tokens", "640"]
    )
    assert "1 more cycles of 640 tokens; 3 cycles in all\nmixture: nested 100 %; nothing of" in done.output
    longer = [work + "2" if part == work else part for part in arguments]
    done = CliRunner().invoke(app, [*longer, "--unit-tokens", "32"])
    assert f"nstrain data val --work {work}2" in done.output
    for share in ("rows", "rows=x", "rows=0", "=1"):
        refused = CliRunner().invoke(app, [*arguments, "--share", share])
        assert isinstance(refused.exception, Refusal)
        assert "--share: expected NAME=SHARE" in str(refused.exception)


def test_sources_need_not_be_there_to_fork(trunk: DataLine, tokenizer: Path, tmp_path: Path) -> None:
    """Only preparing reads them, from wherever line.json says that they lie."""
    write_sources(tmp_path / "own")
    sources = [{**s, "path": str(tmp_path / "own" / s["name"])} for s in write_sources(tmp_path / "own").values()]
    line = make_line(tmp_path / "line", tokenizer, sources, 640, 2, unit_tokens=UNIT)
    prepare(line)
    (tmp_path / "own").rename(tmp_path / "away")
    branch = branch_line(tmp_path / "branch", line.work, 1, 640, 1)
    with pytest.raises(Refusal, match="own"):
        prepare(branch)
    (tmp_path / "away").rename(tmp_path / "own")
    prepare(branch)
