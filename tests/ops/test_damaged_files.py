"""A file of a line that is lost, cut or flipped: named with what mends it, by `check` as by what a run reads.

And what mends it is typed as it stands, in a directory whose name a shell would take apart.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_lines import make_data_line, make_small_line

from nstrain.base.errors import ExitCode, NstrainError, Refusal
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.preparer import Preparer, run_preparer
from nstrain.data.rows import CycleRows
from nstrain.data.val import held_out_digest
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import load_settings
from nstrain.ops.check import check_line
from nstrain.ops.consumer import enter_consumer, refuse_shared_entry
from nstrain.ops.status import status
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION
from nstrain.train.opening import refuse_unfit_settings

PREPARED = 2

FILES = (
    "run/run.json",
    "data/line.json",
    "data/state.json",
    "data/tokenizer.json",
    "data/sources/prose/files.parquet",
    "data/val/index.json",
    "data/val/prose.bin",
    "data/consumers/small.json",
    "data/manifests/000001.json",
    "data/manifests/000002.json",
    "data/cycles/000001/READY",
    "data/cycles/000001/prose.bin",
    "data/cycles/000002/READY",
    "data/cycles/000002/verse.bin",
)

HARMLESS = {
    ("data/consumers/small.json", "lost"): "a run writes it again",
    ("data/cycles/000001/READY", "lost"): "the preparer makes the cycle again",
    ("data/cycles/000002/READY", "lost"): "the preparer makes the cycle again",
}
REMEDY = re.compile(r"`|put .*back|mend it|\(did you mean")


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a new line with two cycles prepared."""
    directory = tmp_path_factory.mktemp("damaged") / "a line's place"
    directory.mkdir()
    make_small_line(directory)
    run_preparer(directory / "data", until_cycle=PREPARED, workers=0)
    shutil.copytree(directory, directory.with_name("as it was"))
    return directory


@pytest.fixture
def prepared(prepared_once: Path) -> Iterator[LinePaths]:
    """That line; the test may damage it."""
    yield LinePaths(prepared_once / "run")
    shutil.rmtree(prepared_once)
    shutil.copytree(prepared_once.with_name("as it was"), prepared_once)


def damage(path: Path, how: str) -> None:
    """Lose a file, cut it, empty it, or flip a bit in its middle."""
    data = path.read_bytes()
    if how == "lost":
        path.unlink()
    else:
        half = len(data) // 2
        flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        path.write_bytes({"cut": data[:half], "empty": b"", "flipped": flipped}[how])


def refused_by_a_run(paths: LinePaths) -> list[str]:
    """What a supervisor, a preparer and a trainer refuse of a line before they train, each as it reads the files.

    There is a cycle left to prepare, which is.
    """
    refused: list[str] = []

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except NstrainError as error:
            refused.append(str(error))

    with told():
        settings = load_settings(paths)
        data = DataLine.open(Path(settings.data.work))
        with told():
            refuse_shared_entry(paths, settings)
            enter_consumer(paths, settings)
            Preparer(data.work, 1, until_cycle=PREPARED + 1, workers=0).run()
        with told():
            refuse_unfit_settings(settings, data)
            held_out_digest(data)
        for cycle in cycles_on_disk(data):
            with told():
                rows = CycleRows.open(data, cycle, settings.row_tokens_at(cycle))
                for file in rows.files:
                    file.close()
    return refused


def refused_by_check(paths: LinePaths) -> list[str]:
    """What `nstrain check` says is not in order."""
    try:
        return [found.message for found in check_line(paths.root) if found.ok is False]
    except Refusal as error:
        return [str(error)]


@pytest.mark.parametrize("how", ["lost", "cut", "empty", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_it_is_named_with_a_remedy_and_check_sees_what_a_run_refuses(prepared: LinePaths, name: str, how: str) -> None:
    damage(prepared.root.parent / name, how)
    told = refused_by_check(prepared)
    refused = refused_by_a_run(prepared)
    assert bool(told) == bool(refused), (told, refused)
    if how != "flipped":  # a bit of a path, or of the tokens, is told by other readers
        assert bool(told) == ((name, how) not in HARMLESS), told
    for message in told + refused:
        assert name.rpartition("/")[2] in message or name.split("/")[-2] in message, message
        assert REMEDY.search(message), message
        assert "make one with" not in message, "beside what there is"


def type_in(message: str) -> None:
    """Do what a message says between its last backquotes, as a shell does it."""
    command = message.split("`")[-2]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("data/manifests/000001.json", "lost"),
        ("data/manifests/000002.json", "cut"),
        ("data/cycles/000001/READY", "cut"),
        ("data/val/prose.bin", "cut"),
    ],
)
def test_what_is_told_is_typed_and_gives_the_same_bytes(prepared: LinePaths, name: str, how: str) -> None:
    path = prepared.root.parent / name
    whole = path.read_bytes()
    damage(path, how)
    (message,) = refused_by_check(prepared)
    type_in(message)
    if path.name == "READY":
        assert not path.exists(), "the preparer is to make it again"
    assert not refused_by_a_run(prepared)
    assert not refused_by_check(prepared)
    assert path.read_bytes() == whole


def test_a_cycle_without_its_ready_is_made_again(prepared: LinePaths) -> None:
    """Nothing else would ever do so: it is no cycle, and the trainer waits for one."""
    work = prepared.root.parent / "data"
    whole = (work / "cycles/000002/prose.bin").read_bytes()
    (work / "cycles/000002/READY").unlink()
    (work / "cycles/000002/prose.bin").write_bytes(b"half")
    assert run_preparer(work, until_cycle=PREPARED, workers=0) == ExitCode.DONE
    assert (work / "cycles/000002/prose.bin").read_bytes() == whole


def test_a_lost_manifest_is_made_again_only_if_the_next_one_follows_it(prepared: LinePaths) -> None:
    work = prepared.root.parent / "data"
    whole = (work / "manifests/000001.json").read_bytes()
    (work / "manifests/000001.json").unlink()
    shutil.rmtree(work / "cycles/000001")
    assert run_preparer(work, until_cycle=PREPARED, workers=0) == ExitCode.DONE
    assert (work / "manifests/000001.json").read_bytes() == whole
    for path in (work / "manifests/000001.json", work / "manifests/000002.json"):
        path.write_bytes(path.read_bytes().replace(b'"previous":"', b'"previous":"0'))
    (work / "manifests/000001.json").unlink()
    shutil.rmtree(work / "cycles/000001")
    shutil.rmtree(work / "cycles/000002")
    with pytest.raises(Refusal, match=r"000001.json: made again it has sha256 .* the manifest after it follows 0"):
        run_preparer(work, until_cycle=PREPARED, workers=0)


def test_what_init_made_it_makes_again_elsewhere(prepared: LinePaths, tmp_path: Path) -> None:
    """As the messages about line.json, state.json and files.parquet say."""
    work = prepared.root.parent / "data"
    again = make_data_line(tmp_path, held_out_rows=False).work
    for name in ("line.json", "state.json", "sources/prose/files.parquet"):
        damage(work / name, "cut")
        assert "nstrain data init" in " ".join(refused_by_check(prepared))
        shutil.copy(again / name, work / name)
        if name == "line.json":
            places = {str(tmp_path / "texts"): str(prepared.root.parent / "texts")}
            text = (work / name).read_text()
            for new, old in places.items():
                text = text.replace(new, old)
            (work / name).write_text(text)
        assert not refused_by_check(prepared), name


# ---- a line that has trained -----------------------------------------------------------------------------------------


def test_a_damaged_state_of_the_newest_checkpoint_is_not_believed(trained: LinePaths) -> None:
    path = trained.checkpoint(8) / "state.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"seed":0', b'"seed":1'))
    assert path.read_bytes() != whole
    assert not [found for found in check_line(trained.root, quick=True) if found.ok is False]
    (found,) = [found for found in check_line(trained.root) if found.ok is False]
    assert found.name == "checkpoint"
    assert f"{path}: damaged" in found.message


@pytest.mark.parametrize("how", ["lost", "cut"])
def test_run_json_is_taken_from_the_newest_checkpoint(trained: LinePaths, how: str) -> None:
    settings = load_settings(trained)
    damage(trained.run_json, how)
    for read in (check_line, status):
        try:
            told = [found.message for found in read(trained.root) if found.ok is False]  # type: ignore[union-attr]
        except Refusal as error:
            told = [str(error)]
        (message,) = told
        assert str(trained.run_json) in message
        assert "`nstrain new" not in message
    type_in(message)
    assert load_settings(trained) == settings
    assert not refused_by_check(trained)


@pytest.mark.parametrize("until", [None, 5])
def test_lost_rows_are_seen_before_a_launch(trained: LinePaths, until: int | None) -> None:
    with Journal.open_for_reading(trained.journal) as whole:
        rows = list(whole.rows())
    for path in trained.root.glob("journal.db*"):
        path.unlink()
    if until is not None:  # an older copy
        with Journal.open(trained.journal, METRICS_VERSION) as journal:
            for row in rows[: until + 1]:
                readings = {name: value for name, value in row.items() if name not in ("update", "generation")}
                journal.commit(row["update"], readings)
    (found,) = [found for found in check_line(trained.root, quick=True) if found.ok is False]
    assert found.name == "journal"
    assert f"expected rows up to update 8, after which {trained.checkpoint(8)} was written" in found.message
    if until is None:
        assert "found none" in found.message
        done = subprocess.run(
            [sys.executable, "-m", "nstrain.train", str(trained.root)], capture_output=True, text=True
        )
        assert done.returncode == ExitCode.BAD_CONFIGURATION
        assert "expected rows up to update 8" in done.stderr + done.stdout
        assert "found none" in done.stderr + done.stdout
    else:
        type_in(found.message)
        assert not refused_by_check(trained)


def test_a_bit_of_run_json_anywhere_is_read_as_it_is_or_refused_with_a_remedy(prepared: LinePaths) -> None:
    """Whatever becomes of the JSON: none, of another form, with a number or a name that does not fit the others."""
    whole = prepared.run_json.read_bytes()
    places = random.Random(random.SystemRandom().random()).sample(range(len(whole)), min(len(whole), 250))
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1
        prepared.run_json.write_bytes(flipped)
        told = _refusal_of(prepared)
        assert told is None or (REMEDY.search(told) and str(prepared.run_json) in told), f"byte {place}: {told}"


def _refusal_of(paths: LinePaths) -> str | None:
    try:
        load_settings(paths)
    except Refusal as error:
        return str(error)
    return None
