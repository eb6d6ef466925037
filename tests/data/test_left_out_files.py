"""A file that turns out to be unusable in the middle of a line is left out, and the line goes on: `data exclude`."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    contents,
    documents_in,
    environment,
    make_line,
    manifest_of,
    prepare,
    prepared,
    prose,
    prose_tree,
    source,
    start_preparer,
    write_tree,
)
from reader_files import compressed, json_lines, write_records
from typer.testing import CliRunner

from nstrain.base.errors import Exhausted, ExitCode, Refusal
from nstrain.cli.data import app
from nstrain.data import calibration
from nstrain.data.branch import branch_line
from nstrain.data.consumers import write_consumer
from nstrain.data.exclude import LeftOut, exclude_file, leaving_out_is_offered
from nstrain.data.extend import extend_line
from nstrain.data.line import DataLine
from nstrain.data.plan import plan_line
from nstrain.data.preparer import cannot_pass, preparer_lock, read_status, run_preparer
from nstrain.data.readers import BadUpload, ChangedFile
from nstrain.data.readers.errors import bad_upload, reader_died
from nstrain.data.rebuild import rebuild_in_line
from nstrain.data.rows import CycleRows
from nstrain.data.val import collect_held_out
from nstrain.data.verify import verify_line

CYCLES = 8
CYCLE_TOKENS = 1280
FILES = 10
BAD = 4
"""The place of the bad file in the opening order of stratum a."""
WAIT_S = 60.0
COMMAND = re.compile(r"`(nstrain data exclude [^`]*)`")


def write_rows(root: Path, without: str | None = None) -> None:
    """Ten small files of rows in stratum a, four in b; one may be missing."""
    for stratum, count in (("a", FILES), ("b", 4)):
        for number in range(count):
            draw = random.Random(f"{stratum}{number}")
            texts = [prose(draw.randrange(1 << 30), draw.randrange(1, 50)) for _ in range(32)]
            name = f"{stratum}/{number:02d}.jsonl.gz"
            if name != without:
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(compressed(name, json_lines([{"text": text} for text in texts])))


def line_of(base: Path, tokenizer: Path, **options: Any) -> DataLine:
    """The line `base/line` over the rows in `base/web` and a tree of plain texts."""
    tree = write_tree(base / "tree", prose_tree(2, {"t": 160}, words=40))
    rows = {"include": ["**/*.gz"], "reader": "jsonl", "text_column": "text", "held_out": 0.2}
    sources = [source("web", base / "web", 3, **rows), source("tree", tree, 1, held_out=0.05)]
    return make_line(base / "line", tokenizer, sources, CYCLE_TOKENS, CYCLES, **options)


@pytest.fixture(scope="module")
def small_samples() -> Any:
    """`data init` samples the first files alone, as it does where files are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SAMPLE_BYTES", 1 << 12)
        yield


@pytest.fixture(scope="module")
def bad_path(small_samples: None, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the file that is opened in a middle cycle: the order follows from the paths alone."""
    base = tmp_path_factory.mktemp("whole")
    write_rows(base / "web")
    return line_of(base, tokenizer).listing("web").file(0, BAD).path


@pytest.fixture(scope="module")
def original(bad_path: str, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A line with a file that breaks off; nothing is prepared."""
    base = tmp_path_factory.mktemp("original")
    write_rows(base / "web")
    bad = base / "web" / bad_path
    bad.write_bytes(bad.read_bytes()[:-200])
    line = line_of(base, tokenizer)
    collect_held_out(line, 60)
    return line


@pytest.fixture(scope="module")
def stopped(original: DataLine, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """It, prepared up to the cycle that would open the file."""
    shutil.copytree(original.work, tmp_path_factory.mktemp("stopped") / "line")
    line = DataLine.open(tmp_path_factory.getbasetemp() / "stopped0" / "line")
    with pytest.raises(BadUpload):
        prepare(line)
    assert 2 < last(line) < CYCLES - 2
    return line


@pytest.fixture
def line(stopped: DataLine, tmp_path: Path) -> DataLine:
    """A copy of that."""
    shutil.copytree(stopped.work, tmp_path / "line")
    return DataLine.open(tmp_path / "line")


@pytest.fixture(scope="module")
def through(stopped: DataLine, bad_path: str, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """It, without the file prepared to its end."""
    shutil.copytree(stopped.work, tmp_path_factory.mktemp("through") / "line")
    line = DataLine.open(tmp_path_factory.getbasetemp() / "through0" / "line")
    left_out(line, bad_path)
    line = DataLine.open(line.work)
    prepare(line)
    return line


def last(line: DataLine) -> int:
    return max(int(path.stem) for path in (line.work / "manifests").glob("*.json"))


def left_out(line: DataLine, path: str, name: str = "web") -> LeftOut:
    return exclude_file(line, name, path)


def typed_in(command: str) -> Any:
    """Run a printed command."""
    words = shlex.split(command)
    assert words[:2] == ["nstrain", "data"]
    return CliRunner().invoke(app, words[2:])


def unverified(line: DataLine) -> list[str]:
    return [f"{item.what}: {item.message}" for item in verify_line(line) if not item.ok]


# ------------------------------------------------------------------ the preparer ends for a person


@pytest.mark.parametrize("workers", [0, 2])
def test_the_preparer_ends_with_the_command_and_goes_on_once_it_is_typed(
    line: DataLine, through: DataLine, bad_path: str, workers: int
) -> None:
    before, made = contents(line.work), last(line)
    child = start_preparer(line.work, "--until", str(CYCLES), workers=workers)
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.NEEDS_OPERATOR
    assert "Traceback" not in err
    assert f"source web: {line.source('web').root / bad_path}: after line " in err
    assert "new line" not in err
    status = read_status(line.work)
    assert status is not None
    assert (status.stage, status.cycle) == ("failed", made + 1)
    assert status.error is not None
    (command,) = COMMAND.findall(status.error)
    assert status.error in err
    after = contents(line.work)
    assert {name: after[name] for name in prepared(line)} == {name: before[name] for name in prepared(line)}

    result = typed_in(command)
    assert result.exit_code == 0, result.output
    assert f"is left out, from cycle {made + 1} on" in " ".join(result.output.split())
    child = start_preparer(line.work, "--until", str(CYCLES), workers=workers)
    assert child.communicate(timeout=WAIT_S)[1] == ""
    assert child.returncode == ExitCode.DONE
    now = DataLine.open(line.work)
    assert now.id == line.id
    assert prepared(now) == prepared(through)
    assert {name: data for name, data in prepared(now).items() if name in before}.items() <= before.items()
    assert unverified(now) == []


def test_the_foreground_command_and_data_status_say_the_same(line: DataLine, bad_path: str) -> None:
    words = ["data", "run-preparer", "--work", str(line.work), "--foreground", "--workers", "0", "--until", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "nstrain.cli.main", *words], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == ExitCode.NEEDS_OPERATOR, done.stderr
    assert f"--source web {bad_path}`" in " ".join(done.stderr.split())
    shown = json.loads(CliRunner().invoke(app, ["status", "--work", str(line.work), "--json"]).output)
    assert (shown["preparer"]["stage"], shown["preparing"]) == ("failed", False)
    assert COMMAND.search(shown["preparer"]["error"])


def test_a_preparer_that_waited_for_the_command_goes_by_it(line: DataLine, through: DataLine, bad_path: str) -> None:
    with preparer_lock(line.work).acquire("the command"):
        child = start_preparer(line.work, "--until", str(CYCLES))
        assert child.stderr is not None
        assert "waiting up to 60 s for the preparer" in child.stderr.readline()
        left_out(line, bad_path)
    assert child.communicate(timeout=WAIT_S)[1] == ""
    assert child.returncode == ExitCode.DONE
    assert prepared(line) == prepared(through)


def test_a_file_without_the_column_is_left_out_in_the_same_way(
    small_samples: None, tokenizer: Path, tmp_path: Path
) -> None:
    """And a path that a shell or a command line would take for something else is one word of the command."""
    for number in range(8):
        rows = [{"text": prose(number * 100 + n, 20)} for n in range(40)]
        write_records(tmp_path / "web" / f"-{number} it's.parquet", rows)
    fields = {"include": ["*.parquet"], "reader": "parquet", "text_column": "text", "held_out": 0.05}

    def made(name: str) -> DataLine:
        return make_line(tmp_path / name, tokenizer, [source("web", tmp_path / "web", **fields)], 1280, 4)

    bad = made("whole").listing("web").file(0, 4).path
    write_records(tmp_path / "web" / bad, [{"body": "text"}])
    line = made("a line")
    child = start_preparer(line.work, "--until", "4")
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.NEEDS_OPERATOR
    assert "has no column 'text'; it has body (string)" in err
    result = typed_in(COMMAND.findall(err)[0])
    assert result.exit_code == 0, result.output
    prepare(DataLine.open(line.work))
    assert bad not in {
        line.listing("web").file(s, f).path for k in range(1, 5) for s, f, _ in documents_in(line, "web", k)
    }


def test_a_reader_that_was_killed_is_tried_again(stopped: DataLine) -> None:
    """And nobody is told that its file is damaged, and to leave it out: it may be whole."""
    killed, broken = reader_died("a file", "opening it", "SIGKILL"), bad_upload("a file", "opening it", "torn")
    expected = [(killed, False), (broken, True), (Exhausted("x"), True), (Refusal("x"), False)]
    for error, cannot in expected:
        assert cannot_pass(error) == cannot
    for error, words in ((killed, "SIGKILL.*too little memory.*If it stays so"), (broken, "torn.*does not mend it")):
        error.found_in("web", "a/b.parquet")
        match = f"{words}.*data exclude .*a/b.parquet`"
        with pytest.raises(BadUpload, match=match) as told, leaving_out_is_offered(stopped):
            raise error
        assert told.value.may_pass == error.may_pass


# ------------------------------------------------------------------ what is prepared then


def test_it_is_what_a_line_without_the_file_prepares(
    original: DataLine, through: DataLine, bad_path: str, tokenizer: Path, tmp_path: Path
) -> None:
    """Left out before the first cycle: the same documents in the same rows as where the directory never held it; left
    out later, the other sources at least are not touched."""
    write_rows(tmp_path / "web", without=bad_path)
    without = line_of(tmp_path, tokenizer)
    prepare(without)
    shutil.copytree(original.work, tmp_path / "early")
    assert left_out(DataLine.open(tmp_path / "early"), bad_path).file.from_cycle == 1
    early = DataLine.open(tmp_path / "early")
    prepare(early)
    assert unverified(early) == []
    for cycle in range(1, CYCLES + 1):
        for name in ("web", "tree"):
            expected = (without.cycle_directory(cycle) / f"{name}.bin").read_bytes()
            assert (early.cycle_directory(cycle) / f"{name}.bin").read_bytes() == expected
        assert (through.cycle_directory(cycle) / "tree.bin").read_bytes() == expected
    assert unverified(through) == []


def test_each_document_is_drawn_once_and_none_of_the_file(through: DataLine) -> None:
    drawn = [document for cycle in range(1, CYCLES + 1) for document in documents_in(through, "web", cycle)]
    assert len(drawn) == len(set(drawn))
    files = {(stratum, file) for stratum, file, _ in drawn}
    assert (0, BAD) not in files
    assert {(0, BAD - 1), (0, BAD + 1)} <= files, "it is passed over, in the order of the others"


def test_its_manifests_say_so_from_that_cycle_on(through: DataLine, stopped: DataLine, bad_path: str) -> None:
    first = last(stopped) + 1
    said = [manifest_of(through, cycle).get("excluded") for cycle in range(1, CYCLES + 1)]
    assert said == [None] * (first - 1) + [{"web": [bad_path]}] * (CYCLES - first + 1)
    (entry,) = json.loads((through.work / "line.json").read_bytes())["excluded"]
    sha256 = through.listing("web").file(0, BAD).sha256
    assert entry == {"source": "web", "path": bad_path, "sha256": sha256, "from_cycle": first}
    assert "excluded" not in json.loads((stopped.work / "line.json").read_bytes())


def test_every_cycle_is_made_again_to_the_same_bytes(through: DataLine, stopped: DataLine, tmp_path: Path) -> None:
    """From its manifest, and where that is lost from the one before it and line.json."""
    shutil.copytree(through.work, tmp_path / "line")
    line = DataLine.open(tmp_path / "line")
    for cycle in range(1, CYCLES + 1):
        rebuilt = rebuild_in_line(line, cycle, tmp_path / str(cycle), workers=0)
        assert contents(rebuilt) == contents(through.cycle_directory(cycle))
    shutil.rmtree(line.work / "cycles")
    shutil.rmtree(line.work / "open")
    prepare(line)
    assert prepared(line) == prepared(through)
    for lost in (last(stopped), last(stopped) + 1):
        line.manifest_path(lost).unlink()
        shutil.rmtree(line.cycle_directory(lost))
    prepare(line)
    assert prepared(line) == prepared(through)


def test_the_forecast_counts_without_it(line: DataLine, bad_path: str) -> None:
    def left() -> int:
        planned = plan_line(DataLine.open(line.work))
        assert planned is not None
        return next(source.left_tokens for source in planned.sources if source.source == "web")

    before = left()
    size = left_out(line, bad_path).size
    web = line.calibration().sources["web"].strata["a"]
    gone = before - left()
    assert 0.3 < gone / (size * web.tokens / web.bytes) < 1.5
    assert gone > 0


def test_a_stratum_may_end_by_it(small_samples: None, tokenizer: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "web", prose_tree(3, {"a": 90}, words=60) | {"b/one.txt": prose(5, 60)})
    line = make_line(tmp_path / "line", tokenizer, [source("web", tree, held_out=0.05)], 1280, 3)
    result = typed_in(
        shlex.join(["nstrain", "data", "exclude", "--work", str(line.work), "--source", "web", "b/one.txt"])
    )
    assert result.exit_code == 0, result.output
    assert "the last file of stratum 'b'" in " ".join(result.output.split())
    line = DataLine.open(line.work)
    prepare(line)
    assert [manifest_of(line, cycle)["sources"]["web"]["shares"][1] for cycle in (1, 2, 3)] == [0, 0, 0]
    assert unverified(line) == []


# ------------------------------------------------------------------ branches, held-out text, readers of the line


@pytest.mark.parametrize("at_cycle", [1, CYCLES])
def test_a_branch_leaves_it_out_from_its_first_cycle_on(
    through: DataLine, bad_path: str, tmp_path: Path, at_cycle: int
) -> None:
    branch = branch_line(tmp_path / "branch", through.work, at_cycle, CYCLE_TOKENS, 6 if at_cycle == 1 else 1)
    assert branch.excluded(1) == {"web": [bad_path]}
    prepare(branch)
    assert unverified(branch) == []
    assert CycleRows.open(branch, 1, 16).rows > 0


def test_held_out_text_is_the_same_before_and_after(line: DataLine, through: DataLine, tmp_path: Path) -> None:
    """Also if the file that is left out gave some of it; one that cannot be used gives none, and is offered first."""
    kept = contents(line.work / "val")
    for number in range(CYCLES, FILES):
        left_out(line, line.listing("web").file(0, number).path)
        line = DataLine.open(line.work)
    assert contents(line.work / "val") == kept
    shutil.rmtree(line.work / "val")
    with pytest.raises(BadUpload, match="after line") as error:
        collect_held_out(line, 4000)
    assert typed_in(COMMAND.findall(str(error.value))[0]).exit_code == 0
    more = collect_held_out(DataLine.open(line.work), 4000)["sources"]["web"]
    shutil.rmtree(line.work / "val")
    collect_held_out(DataLine.open(line.work), 60)
    assert contents(line.work / "val") == kept
    shutil.copytree(through.work, tmp_path / "other", ignore=shutil.ignore_patterns("val"))
    other = DataLine.open(tmp_path / "other")
    assert collect_held_out(other, 4000)["sources"]["web"] == more, "whatever else is left out"


def test_a_file_that_is_gone_may_be_left_out_as_well(
    line: DataLine, through: DataLine, bad_path: str, tmp_path: Path
) -> None:
    root = tmp_path / "web"
    shutil.copytree(line.source("web").root, root)
    settings = json.loads((line.work / "line.json").read_text())
    settings["sources"][0]["settings"]["path"] = str(root)
    (line.work / "line.json").write_text(json.dumps(settings))
    (root / bad_path).unlink()
    line = DataLine.open(line.work)
    with pytest.raises(ChangedFile, match="cannot be read .*restore the file .*If it cannot be had any more") as error:
        prepare(line)
    assert typed_in(COMMAND.findall(str(error.value))[0]).exit_code == 0
    line = DataLine.open(line.work)
    prepare(line)
    assert contents(line.work / "cycles") == contents(through.work / "cycles")
    shutil.rmtree(line.work / "val")
    collect_held_out(line, 4000)


def test_who_opened_the_line_before_reads_the_cycles_made_since(stopped: DataLine, through: DataLine) -> None:
    """As a trainer has that waited for them."""
    assert stopped.settings.excluded == ()
    old = DataLine(through.work, stopped.settings, stopped.schedule)
    assert CycleRows.open(old, CYCLES, 16).order_digest == CycleRows.open(through, CYCLES, 16).order_digest


def test_an_extended_line_still_leaves_it_out(line: DataLine, bad_path: str) -> None:
    old = DataLine.open(line.work)
    left_out(line, bad_path)
    assert extend_line(line.work, 1).excluded(CYCLES + 1) == {"web": [bad_path]}
    before = (line.work / "line.json").read_bytes()
    with pytest.raises(Refusal, match="another command has changed it meanwhile; type this one again"):
        left_out(old, bad_path)
    assert (line.work / "line.json").read_bytes() == before


# ------------------------------------------------------------------ refusals


def test_what_may_not_be_left_out_is_refused_before_anything_is_written(
    line: DataLine, bad_path: str, through: DataLine
) -> None:
    (line.work / "preparer.lock").unlink()
    before, listing = contents(line.work), line.listing("web")

    def refused(match: str, *words: str) -> None:
        result = CliRunner().invoke(app, ["exclude", "--work", str(line.work), *words])
        assert isinstance(result.exception, Refusal), result.output
        assert result.exception.exit_code == ExitCode.BAD_CONFIGURATION
        assert re.search(match, str(result.exception)), result.exception
        assert {k: v for k, v in contents(line.work).items() if k != "preparer.lock"} == before

    refused("no source is called wep; .* has web, tree", "--source", "wep", bad_path)
    refused(r"none of its 14 pinned files, .* like 'a/0\d.jsonl.gz'", "--source", "web", bad_path + ".gz")
    for order in (0, BAD - 1):
        refused("was opened before cycle", "--source", "web", listing.file(0, order).path)
    with preparer_lock(line.work).acquire("the preparer"):
        refused(f"is held by process {os.getpid()}", "--source", "web", bad_path)
    schedule = json.loads(before["line.json"])
    schedule["schedule"][0]["segment_units"] *= 2
    before["line.json"] = json.dumps(schedule).encode()
    (line.work / "line.json").write_bytes(before["line.json"])
    refused("was prepared with", "--source", "web", bad_path)


def test_it_is_refused_where_no_preparer_may_be(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["exclude", "--work", str(tmp_path), "--source", "web", "a"])
    assert isinstance(result.exception, Refusal)
    assert list(tmp_path.iterdir()) == []


def test_the_last_file_without_which_the_next_cycle_cannot_be_filled(tokenizer: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "web", {f"a/{n}.txt": prose(n, 900) for n in range(4)})
    line = make_line(tmp_path / "line", tokenizer, [source("web", tree, held_out=0.001)], 640, None)
    files = [line.listing("web").file(0, order).path for order in range(4)]
    for path in reversed(files[1:]):
        left_out(DataLine.open(line.work), path)
    with pytest.raises(
        Refusal, match="is the last file that it has to open; without it 0 tokens are left, and cycle 1 "
    ):
        left_out(DataLine.open(line.work), files[0])
    prepare(DataLine.open(line.work), 1)


def test_what_was_left_out_of_a_prepared_cycle_is_not_edited(through: DataLine, tmp_path: Path) -> None:
    shutil.copytree(through.work, tmp_path / "line")
    path = tmp_path / "line" / "line.json"
    good = json.loads(path.read_bytes())

    def edited(**fields: Any) -> None:
        path.write_text(json.dumps({**good, "excluded": [{**good["excluded"][0], **fields}] if fields else []}))
        run_preparer(path.parent, until_cycle=CYCLES, workers=0)

    for fields in ({}, {"from_cycle": 2}, {"from_cycle": CYCLES}, {"path": "a/none"}):
        with pytest.raises(Refusal, match=r"cycle \d was prepared with excluded"):
            edited(**fields)
    with pytest.raises(Refusal, match="leaves out a file of wep, which is no source of it"):
        edited(source="wep")
    path.write_text(json.dumps({**good, "excluded": [{**good["excluded"][0], "sha256": "0" * 64}]}))
    assert any("not among its pinned files" in problem for problem in unverified(DataLine.open(path.parent)))


def test_told_twice_it_is_done_once(line: DataLine, bad_path: str) -> None:
    write_consumer(line.work, "run", 2, 0, CYCLE_TOKENS, line.work.parent / "a run")
    words = ["exclude", "--work", str(line.work), "--source", "web", bad_path]
    first = CliRunner().invoke(app, words)
    assert f"next: nstrain run '{line.work.parent / 'a run'}'" in first.output.replace("\n", "")
    before = contents(line.work)
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert "was left out before" in again.output
    assert contents(line.work) == before
