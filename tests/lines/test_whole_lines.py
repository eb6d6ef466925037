"""A line run through, beside lines that were killed: one record, the same tensors, and what the record says is true."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_line import (
    CYCLE_TOKENS,
    CYCLES,
    ROW_TOKENS,
    UPDATES,
    Running,
    final_tensors,
    journal_rows,
    make_line,
    nstrain,
    updates_recorded,
    wait_until,
)
from wandb_stub import WandbStub

from nstrain.data.rows import row_order


@pytest.fixture(scope="module")
def service() -> Iterator[WandbStub]:
    """A tracking service."""
    with WandbStub() as stub:
        yield stub


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory, service: WandbStub) -> Path:
    """A line that nobody disturbed, with a copy on a tracker."""
    run = make_line(tmp_path_factory.mktemp("through"), "--wandb-project", "lines")
    assert Running(run, **service.environment(run.parent)).end() == 0
    return run


def test_its_copy_on_a_tracker_is_whole(through: Path, service: WandbStub) -> None:
    (copy,) = service.runs.values()
    names = ("update", "generation", "tokens", "cycle")
    theirs = [{"update": row["_step"], **row} for row in copy.rows()]
    assert [[row[n] for n in names] for row in theirs] == [[row[n] for n in names] for row in journal_rows(through)]
    found = json.loads(nstrain("mirror", through, "--json", **service.environment(through.parent)))
    assert (found["same"], found["updates"], found["sent"]) == (True, UPDATES + 1, 0), "every reading was compared"
    tracker = json.loads(nstrain("status", through, "--json"))["tracker"]
    assert (tracker["behind_updates"], tracker["differences"], tracker["error"], tracker["pid"]) == (0, 0, None, None)
    assert len(list((through / "wandb" / "wandb").glob("run-*"))) == 1, "that of the run's session went with this one"


def test_a_line_does_what_was_asked(through: Path, service: WandbStub) -> None:
    rows = journal_rows(through)
    assert [row["update"] for row in rows] == list(range(UPDATES + 1))
    assert rows[-1]["tokens"] == CYCLES * CYCLE_TOKENS
    validated = [row["update"] for row in rows if f"val_{ROW_TOKENS}/mix" in row]
    assert validated == [0, 6, 10, 12, 18, 20, 24, 30], "every sixth, and at each cycle's end"
    smaller = [row["update"] for row in rows if row["smaller"]]
    assert smaller == [10, 20, 30], "the rows left at each cycle's end form one smaller update"
    status = json.loads(nstrain("status", through, "--json"))
    assert (status["state"], status["update"], status["tokens_total"]) == ("done", UPDATES, CYCLES * CYCLE_TOKENS)
    assert rows[-1][f"val_{ROW_TOKENS}/mix"] < rows[0][f"val_{ROW_TOKENS}/mix"] - 0.5
    data = through.parent / "data"
    assert list((data / "cycles").iterdir()) == [], "consumed cycles are deleted"
    assert len(list((data / "manifests").iterdir())) == CYCLES, "manifests stay"
    there = service.environment(through.parent)
    assert nstrain("run", through, "--foreground", **there) is not None, "a finished line is done again at once"
    assert len(journal_rows(through)) == UPDATES + 1


def _launches(run: Path) -> int:
    """Trainers that the present supervisor has started."""
    return int(json.loads((run / "supervisor.json").read_text())["launches"])


@pytest.mark.slow  # trainers are killed by the dozen elsewhere, supervised lines in test_supervised_soak.py
def test_killed_three_times_it_ends_with_the_same_bits(through: Path, tmp_path: Path) -> None:
    """kill -9 of the supervisor, of the trainer, which it starts again, and of the supervisor once more."""
    run = make_line(tmp_path)
    draw = random.Random(random.SystemRandom().random())
    targets = [draw.randint(5, 9), draw.randint(12, 16), draw.randint(19, 25)]
    running = Running(run)
    wait_until(lambda: updates_recorded(run) >= targets[0], f"update {targets[0]}")
    running.kill("pid")
    running.end()

    running = Running(run)
    wait_until(lambda: updates_recorded(run) >= targets[1], f"update {targets[1]}")
    running.kill("trainer_pid")
    wait_until(lambda: updates_recorded(run) >= targets[2] and _launches(run) == 2, f"update {targets[2]}")
    running.kill("pid")
    running.end()
    assert json.loads(nstrain("status", run, "--json"))["state"] in ("failed", "running")

    assert Running(run).end() == 0
    what = f"killed at updates {targets}"
    assert journal_rows(run) == journal_rows(through), what
    assert final_tensors(run) == final_tensors(through), what
    assert json.loads(nstrain("status", run, "--json"))["differences"] == 0, what
    assert (run / "run.log").read_text().count("going on from") == 3, what


@pytest.mark.slow  # tests/train and tests/record compare replays in every run
def test_replayed_updates_are_compared(tmp_path: Path) -> None:
    """Killed between two checkpoints, at least one update is trained again, and found equal to its row."""
    run = make_line(tmp_path)
    running = Running(run)
    for launch, target in ((1, 7), (2, 11)):  # checkpoints come every fourth update: 4 and 8 are the newest
        wait_until(lambda n=launch, u=target: updates_recorded(run) >= u and _launches(run) == n, f"update {target}")
        before = updates_recorded(run)
        running.kill("trainer_pid")
        newest = int((run / "checkpoints" / "latest").read_text().strip().lstrip("u"))
        assert newest < before, "there is something to train again"
    assert running.end() == 0
    assert json.loads(nstrain("status", run, "--json"))["differences"] == 0


@pytest.mark.slow  # tests/train and tests/supervise stop in every stage
def test_stop_and_go_on(through: Path, tmp_path: Path) -> None:
    run = make_line(tmp_path)
    running = Running(run)
    wait_until(lambda: updates_recorded(run) >= 5, "update 5")
    nstrain("stop", run)
    assert running.end() == 3
    status = json.loads(nstrain("status", run, "--json"))
    assert status["state"] == "stopped"
    assert status["checkpoint"] == f"u{status['update']:08d}", "it stopped with a checkpoint at its last update"
    assert Running(run).end() == 0
    assert journal_rows(run) == journal_rows(through)
    assert final_tensors(run) == final_tensors(through)


def _manifest(data: Path, cycle: int) -> dict[str, Any]:
    return dict(json.loads((data / "manifests" / f"{cycle:06d}.json").read_bytes()))


def test_every_update_holds_each_source_at_its_share(through: Path) -> None:
    """Recounted from the manifests alone: each source within two rows of its share, and as the journal says."""
    data = through.parent / "data"
    rows = [row for row in journal_rows(through) if row["update"] > 0]
    for cycle in range(1, CYCLES + 1):
        manifest = _manifest(data, cycle)
        order = row_order(manifest, ROW_TOKENS)
        shares = np.array([manifest["recipe"][name] for name in order.sources])
        first = 0
        for row in (row for row in rows if row["cycle"] == cycle):
            sources = order.locate(first, first + row["rows"])[0]
            counts = np.bincount(sources, minlength=len(shares))
            wanted = row["rows"] * shares / shares.sum()
            assert np.abs(counts - wanted).max() < 2
            assert [row[f"train/rows/{name}"] for name in order.sources] == counts.tolist()
            first += row["rows"]
        assert first == order.rows == CYCLE_TOKENS // ROW_TOKENS


def test_no_document_twice_and_nothing_held_out(through: Path) -> None:
    """By the manifests' ranges: a file's documents are taken once; a held-out file's are in none."""
    data = through.parent / "data"
    taken: Counter[tuple[str, str, int]] = Counter()
    for cycle in range(1, CYCLES + 1):
        for name, source in _manifest(data, cycle)["sources"].items():
            files = {
                (stratum, file["order"]): file["path"]
                for stratum, opened in enumerate(source["opened"])
                for file in opened["open"]
            }
            for segment in source["segments"]:
                for stratum, order, first, end in segment:
                    taken.update((name, files[stratum, order], document) for document in range(first, end))
    assert taken, "documents were drawn"
    assert max(taken.values()) == 1, "no document is drawn twice in a source"
    for name, path, _ in taken:
        identity = bytes.fromhex(_manifest(data, 1)["sources"][name]["identity"])
        text = (through.parent / "text" / name / path).read_bytes()
        digest = hashlib.blake2b(text, key=identity, digest_size=8).digest()
        assert int.from_bytes(digest, "big") >= 0.1 * 2**64, f"{name}/{path} is held out and was trained"


@pytest.mark.slow  # tests/data shows rows of small lines
def test_rows_can_be_shown(through: Path, tmp_path: Path) -> None:
    run = make_line(tmp_path)
    data = run.parent / "data"
    nstrain("data", "run-preparer", "--work", data, "--until", 1, "--foreground")
    shown = nstrain(
        *("data", "show", "--work", data, "--cycle", 1, "--rows", "3:7", "--row-tokens", ROW_TOKENS),
        *("--json", "--text"),
    )
    rows = [json.loads(line) for line in shown.splitlines()]
    assert [row["row"] for row in rows] == [3, 4, 5, 6]
    for row in rows:
        first = row["documents"][0]
        file_text = (tmp_path / "text" / row["source"] / first["path"]).read_text()
        assert row["stratum"] == first["path"].split("/")[0]
        assert sum(row["strata"].values()) == ROW_TOKENS
        middle = row["text"].replace("</s>", "\0")[4:24].split("\0")[0]
        assert middle in file_text or len(row["documents"]) > 1
    of_deleted = nstrain(
        *("data", "show", "--work", through.parent / "data", "--cycle", 1, "--rows", "3:7"),
        *("--row-tokens", ROW_TOKENS, "--json"),
    )
    keep = ("row", "source", "window")
    assert [{k: r[k] for k in keep} for r in map(json.loads, of_deleted.splitlines())] == [
        {k: row[k] for k in keep} for row in rows
    ], "the manifest alone tells the order"


def test_wrong_input_is_refused_with_what_and_how(through: Path, tmp_path: Path) -> None:
    """Each refusal exits with 2, names the thing, and leaves nothing behind."""
    run = make_line(tmp_path)
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    init = ("data", "init", "--tokenizer", tmp_path / "tokenizer.json", "--eos-id", 1, "--unit-tokens", 64)
    wrong = tmp_path / "wrong.json"

    def refused(changed: dict[str, Any], cycle_tokens: int = CYCLE_TOKENS, cycles: int = 3) -> str:
        wrong.write_text(json.dumps(changed))
        work = tmp_path / "refused"
        message = nstrain(
            *(*init, "--work", work, "--recipe", wrong, "--cycle-tokens", cycle_tokens, "--cycles", cycles), code=2
        )
        assert not work.exists(), "nothing was written"
        assert not list(tmp_path.glob(".*partial")), "not even in part"
        return message

    def with_source(**fields: Any) -> dict[str, Any]:
        return {**recipe, "sources": [{**recipe["sources"][0], **fields}, recipe["sources"][1]]}

    assert "'sources.0.includ' (did you mean 'include'?)" in refused(with_source(includ=["*"]))
    assert "no file" in refused(with_source(include=["**/*.md"]))
    assert "not a directory" in refused(with_source(path="nowhere"))
    (tmp_path / "text" / "notes" / "gone.txt").symlink_to(tmp_path / "nothing")
    assert "gone.txt" in refused(recipe)
    (tmp_path / "text" / "notes" / "gone.txt").unlink()
    assert "coarser shares" in refused(with_source(share=1009))
    assert "notes" in refused(recipe, CYCLE_TOKENS, 1000), "the bytes prove that it is too small"

    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**settings, "sed": 3}))
    assert "did you mean 'seed'" in nstrain("check", run, code=2)
    (run / "run.json").write_text(json.dumps(settings))

    edited = json.loads((through / "run.json").read_text())
    (through / "run.json").write_text(json.dumps({**edited, "seed": 5}))
    message = nstrain("run", through, "--foreground", code=2)
    assert "seed was 0 and is now 5" in message
    assert "allow_changes" in message
    assert "seed was 0 and is now 5" in nstrain("run", through, code=2), "in the background as well"
    (through / "run.json").write_text(json.dumps(edited))
