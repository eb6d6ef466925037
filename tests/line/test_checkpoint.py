"""Checkpoints: what is written comes back, what is damaged is named, and `latest` decides."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nstrain.base.errors import Refusal
from nstrain.line import checkpoint as checkpoint_module
from nstrain.line.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_bytes,
    discard_partial_writes,
    load_checkpoint,
    load_newest_good,
    newest_good,
    read_latest,
    read_state,
    refuse_lost_checkpoints,
    refuse_lost_rows,
    verify_checkpoint,
    write_checkpoint,
)
from nstrain.line.paths import LinePaths
from nstrain.line.tensor_file import DurableFile, NotFinite, hash_file

FILES = ["exp_avg.safetensors", "exp_avg_sq.safetensors", "hashes.json", "state.json", "weights.safetensors"]


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.state == b.state
    assert a.tensors.keys() == b.tensors.keys()
    for stem in a.tensors:
        assert a.tensors[stem].keys() == b.tensors[stem].keys()
        for name, tensor in a.tensors[stem].items():
            assert tensor.shape == b.tensors[stem][name].shape
            assert tensor.tobytes() == b.tensors[stem][name].tobytes()


# ---- writing and reading ---------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_bit_for_bit(paths: LinePaths, make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint(40)
    odd = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x80000000, 1], np.uint32).view(np.float32)  # largest, -0, denormal
    checkpoint.tensors["weights"]["odd"] = odd
    path = write_checkpoint(paths, checkpoint)
    assert path == paths.root / "checkpoints" / "u00000040"
    assert sorted(os.listdir(path)) == FILES
    assert paths.latest.read_text() == "u00000040\n"
    assert_same(load_checkpoint(path), checkpoint)
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000040"]


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path, make_checkpoint: Any) -> None:
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        checkpoint = make_checkpoint(40)
        if name == "b":  # the order in which a mapping was filled must not matter
            checkpoint = Checkpoint(
                dict(reversed(checkpoint.state.items())),
                {stem: dict(reversed(group.items())) for stem, group in reversed(checkpoint.tensors.items())},
            )
        path = write_checkpoint(LinePaths(tmp_path / name), checkpoint)
        written.append({file: (path / file).read_bytes() for file in FILES})
    assert written[0] == written[1]


def test_the_size_said_before_is_the_size_on_disk(paths: LinePaths, make_checkpoint: Any) -> None:
    path = write_checkpoint(paths, make_checkpoint(40))
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    assert checkpoint_bytes(make_checkpoint(40)) - 1024 < on_disk <= checkpoint_bytes(make_checkpoint(40))


def test_it_would_survive_a_power_cut_before_latest_names_it(
    paths: LinePaths, make_checkpoint: Any, disk_events: list[tuple[str, int]]
) -> None:
    events = disk_events
    path = write_checkpoint(paths, make_checkpoint(40))
    at = {event: index for index, event in enumerate(events)}  # the last time of each
    directory, latest = at["named", path.stat().st_ino], at["named", paths.latest.stat().st_ino]
    files = [at["synchronised", file.stat().st_ino] for file in path.iterdir()]
    inside = at["synchronised", path.stat().st_ino]
    beside = [i for i, event in enumerate(events) if event == ("synchronised", paths.checkpoints.stat().st_ino)]
    assert max(files) < inside < directory < latest
    assert any(directory < index < latest for index in beside)
    assert any(latest < index for index in beside)
    assert at["synchronised", paths.root.stat().st_ino] < directory, "the name `checkpoints`"
    assert at["synchronised", paths.latest.stat().st_ino] < latest


@pytest.mark.parametrize("file", ["exp_avg.safetensors", "weights.safetensors", "state.json", "hashes.json"])
def test_a_disk_that_fails_as_a_file_is_synchronised_commits_nothing(
    paths: LinePaths, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write_checkpoint(paths, make_checkpoint(30))
    fsync = os.fsync

    def failing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"u00000040.partial/{file}"):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_checkpoint(paths, make_checkpoint(40))
    assert newest_good(paths) == paths.checkpoint(30)
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000030"]


def test_what_is_written_otherwise_than_it_was_is_found(
    paths: LinePaths, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes are of what is in memory, not of what the disk has made of it."""
    write = DurableFile.write
    monkeypatch.setattr(DurableFile, "write", lambda self, data: write(self, bytes(data)[:-1] + b"?"))
    path = write_checkpoint(paths, make_checkpoint(40))
    with pytest.raises(DamagedCheckpoint, match=r"exp_avg\.safetensors: damaged.*weights\.safetensors: damaged"):
        verify_checkpoint(path)


def test_an_update_is_written_again_over_its_own_checkpoint(paths: LinePaths, make_checkpoint: Any) -> None:
    write_checkpoint(paths, make_checkpoint(40, seed=1))
    path = write_checkpoint(paths, make_checkpoint(40, seed=2))
    assert_same(load_checkpoint(path), make_checkpoint(40, seed=2))
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000040"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"update": "40"}, "update"),
        ({"update": True}, "update"),
        ({"kept": 1}, "kept"),
        ({"reason": "because"}, "reason"),
        ({"position": None}, "position"),
    ],
)
def test_a_wrong_state_is_not_written(paths: LinePaths, make_checkpoint: Any, change: dict, message: str) -> None:
    checkpoint = make_checkpoint(40)
    checkpoint.state.update(change)
    with pytest.raises(ValueError, match=message):
        write_checkpoint(paths, checkpoint)
    del checkpoint.state[message]
    with pytest.raises(ValueError, match=message):
        write_checkpoint(paths, checkpoint)
    assert os.listdir(paths.root) == []


def test_wrong_tensors_are_not_written(paths: LinePaths, make_checkpoint: Any) -> None:
    for stem, name, tensor in [
        ("weights", "half", np.ones(3, np.float16)),
        ("exp_avg", "__metadata__", np.ones(3, np.float32)),
        ("mean", "w", np.ones(3, np.float32)),
    ]:
        checkpoint = make_checkpoint(40)
        checkpoint.tensors.setdefault(stem, {})[name] = tensor
        with pytest.raises(ValueError, match=name if stem != "mean" else stem):
            write_checkpoint(paths, checkpoint)
    assert os.listdir(paths.root) == []


@pytest.mark.parametrize("stem", ["weights", "exp_avg", "exp_avg_sq", "ema"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_no_line_can_go_on_from_is_not_committed(
    paths: LinePaths, make_checkpoint: Any, stem: str, value: float
) -> None:
    write_checkpoint(paths, make_checkpoint(39))
    checkpoint = make_checkpoint(40, ema=True)
    checkpoint.tensors[stem]["embedding"][-1] = value
    with pytest.raises(NotFinite, match=f"{stem}: tensor 'embedding' holds a NaN or an infinity"):
        write_checkpoint(paths, checkpoint)
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000039"]
    assert newest_good(paths) == paths.checkpoint(39)


def test_the_average_is_one_more_file_once_it_has_begun(paths: LinePaths, make_checkpoint: Any) -> None:
    path = write_checkpoint(paths, make_checkpoint(40, ema=True))
    assert sorted(os.listdir(path)) == ["ema.safetensors", *FILES]
    assert_same(load_checkpoint(path), make_checkpoint(40, ema=True))
    (path / "ema.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"ema\.safetensors: missing"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["ema.safetensors", *FILES])
def test_a_flipped_byte_in_any_file_has_the_one_before_loaded_and_that_said(
    paths: LinePaths, make_checkpoint: Any, name: str
) -> None:
    assert load_newest_good(paths) is None
    for update in (10, 20):
        write_checkpoint(paths, make_checkpoint(update, ema=True))
    data = bytearray((paths.checkpoint(20) / name).read_bytes())
    data[len(data) // 2] ^= 0x04
    (paths.checkpoint(20) / name).write_bytes(data)
    said: list[str] = []
    found = load_newest_good(paths, said.append)
    assert found is not None
    assert found[0] == paths.checkpoint(10)
    assert_same(found[1], make_checkpoint(10, ema=True))
    assert [f"u00000020/{name}" in said[0], "u00000010" in said[1], len(said)] == [True, True, 2]


def test_a_state_that_is_not_json_leaves_nothing_behind(paths: LinePaths, make_checkpoint: Any) -> None:
    write_checkpoint(paths, make_checkpoint(39))
    with pytest.raises(ValueError, match="JSON"):
        write_checkpoint(paths, make_checkpoint(40, settings={"rate": float("nan")}))
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000039"]


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_found_and_its_file_named(paths: LinePaths, make_checkpoint: Any, name: str) -> None:
    path = write_checkpoint(paths, make_checkpoint(40, floats=8))
    whole = (path / name).read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        (path / name).write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
            load_checkpoint(path)
    (path / name).write_bytes(whole)
    load_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "short", "long", "empty"])
def test_a_file_of_another_length_is_named(paths: LinePaths, make_checkpoint: Any, name: str, damage: str) -> None:
    path = write_checkpoint(paths, make_checkpoint(40))
    whole = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes({"short": whole[:-1], "long": whole + b"\n", "empty": b""}[damage])
    with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
        load_checkpoint(path)


def test_a_file_too_many_is_named(paths: LinePaths, make_checkpoint: Any) -> None:
    path = write_checkpoint(paths, make_checkpoint(40))
    (path / "ema.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match=r"ema\.safetensors"):
        load_checkpoint(path)


def test_a_checkpoint_under_another_ones_name_is_refused(paths: LinePaths, make_checkpoint: Any) -> None:
    path = write_checkpoint(paths, make_checkpoint(40))
    shutil.copytree(path, paths.checkpoint(100))
    with pytest.raises(DamagedCheckpoint, match="holds update 40"):
        load_checkpoint(paths.checkpoint(100))
    shutil.copytree(path, paths.root / "set-aside" / "before-the-spike")
    load_checkpoint(paths.root / "set-aside" / "before-the-spike")


def rewrite_hashes(path: Path, extra: str | None = None) -> None:
    """hashes.json as it is for what the directory holds now."""
    from nstrain.line.checkpoint import _hashes_text
    from nstrain.line.tensor_file import hash_file

    names = [name for name in sorted(os.listdir(path)) if name != "hashes.json"]
    entries = {name: {"bytes": (path / name).stat().st_size, "blake2b": hash_file(path / name)} for name in names}
    (path / "hashes.json").write_bytes(_hashes_text(entries))


def test_a_sound_checkpoint_of_another_format_is_refused_and_never_passed_over(
    paths: LinePaths, make_checkpoint: Any
) -> None:
    write_checkpoint(paths, make_checkpoint(30))
    path = write_checkpoint(paths, make_checkpoint(40))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 2}))
    rewrite_hashes(path)
    for read in (load_checkpoint, read_state):
        with pytest.raises(Refusal, match="format 1, found 2"):
            read(path)
    with pytest.raises(Refusal, match="format 1, found 2"):
        newest_good(paths)
    (path / "mean.safetensors").write_bytes(b"what a later version adds")
    rewrite_hashes(path)
    with pytest.raises(Refusal, match="another version"):
        newest_good(paths)


# ---- which one to go on from -----------------------------------------------------------------------------------------


def damage(paths: LinePaths, update: int) -> None:
    with (paths.checkpoint(update) / "exp_avg.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0x80]))


def test_none_without_any_checkpoint(paths: LinePaths) -> None:
    assert newest_good(paths) is None
    paths.checkpoints.mkdir()
    assert newest_good(paths) is None
    assert discard_partial_writes(paths) == []


def test_latest_decides_and_says_nothing(paths: LinePaths, make_checkpoint: Any) -> None:
    for update in (9, 10, 100):
        write_checkpoint(paths, make_checkpoint(update))
    said: list[str] = []
    assert newest_good(paths, said.append) == paths.checkpoint(100)
    paths.latest.write_text("u00000010\n")  # a complete one with a higher number stands beside it
    assert newest_good(paths, said.append) == paths.checkpoint(10)
    assert said == []


def test_a_damaged_latest_gives_way_aloud_to_the_next_older_good_one(
    paths: LinePaths, make_checkpoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for update in (9, 10, 11, 100, 101):
        write_checkpoint(paths, make_checkpoint(update))
    paths.latest.write_text("u00000100\n")
    damage(paths, 100)
    damage(paths, 11)
    said: list[str] = []
    assert newest_good(paths, said.append) == paths.checkpoint(10)
    assert len(said) == 3
    assert "u00000100/exp_avg.safetensors" in said[0]
    assert "u00000011/exp_avg.safetensors" in said[1]
    assert "u00000010" in said[2]
    newest_good(paths)
    assert "u00000100/exp_avg.safetensors" in capsys.readouterr().err


def test_a_latest_that_names_what_is_not_there_gives_way_to_an_older_one(
    paths: LinePaths, make_checkpoint: Any
) -> None:
    for update in (10, 20, 30):
        write_checkpoint(paths, make_checkpoint(update))
    paths.latest.write_text("u00000025\n")
    said: list[str] = []
    assert newest_good(paths, said.append) == paths.checkpoint(20)
    assert "u00000025: no such checkpoint" in said[0]


@pytest.mark.parametrize("latest", [None, b"", b"last-v1\n", b"\xff\x00", b"../u00000009", "a directory"])
def test_without_a_readable_latest_the_highest_number_is_taken_aloud(
    paths: LinePaths, make_checkpoint: Any, latest: bytes | str | None
) -> None:
    for update in (9, 10, 100):
        write_checkpoint(paths, make_checkpoint(update))
    paths.latest.unlink()
    if isinstance(latest, bytes):
        paths.latest.write_bytes(latest)
    elif latest is not None:
        paths.latest.mkdir()
    said: list[str] = []
    assert read_latest(paths) is None
    assert newest_good(paths, said.append) == paths.checkpoint(100)
    assert len(said) == 1
    assert "latest" in said[0]


def test_no_good_one_is_a_refusal_that_names_each_and_a_newer_one_only_as_advice(
    paths: LinePaths, make_checkpoint: Any
) -> None:
    for update in (10, 20, 30):
        write_checkpoint(paths, make_checkpoint(update))
    paths.latest.write_text("u00000020\n")
    damage(paths, 10)
    damage(paths, 20)
    with pytest.raises(Refusal) as refusal:
        newest_good(paths, lambda _: None)
    text = str(refusal.value)
    assert "u00000010/exp_avg" in text
    assert "u00000020/exp_avg" in text
    assert "write the name of a newer one (u00000030)" in text


def test_one_that_the_disk_does_not_give_gives_way_like_a_damaged_one(
    paths: LinePaths, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for update in (30, 40):
        write_checkpoint(paths, make_checkpoint(update))

    def unreadable(path: Path) -> str:
        if path.parent.name == "u00000040":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return hash_file(path)

    monkeypatch.setattr(checkpoint_module, "hash_file", unreadable)
    said: list[str] = []
    assert newest_good(paths, said.append) == paths.checkpoint(30)
    assert "Input/output error" in said[0]
    found = load_newest_good(paths, said.append)
    assert found is not None
    assert found[0] == paths.checkpoint(30)


def test_a_latest_without_any_checkpoint_is_a_refusal(paths: LinePaths) -> None:
    paths.checkpoints.mkdir()
    paths.latest.write_text("u00000020\n")
    with pytest.raises(Refusal, match="u00000020: no such checkpoint"):
        newest_good(paths, lambda _: None)
    paths.latest.write_text("nothing")
    with pytest.raises(Refusal, match="there is none"):
        newest_good(paths, lambda _: None)


def test_a_line_that_trained_is_never_begun_anew(paths: LinePaths) -> None:
    with pytest.raises(Refusal, match=r"journal\.db: records updates up to 7"):
        refuse_lost_checkpoints(paths, None, 7)
    refuse_lost_checkpoints(paths, None, None)  # a new line
    with pytest.raises(Refusal, match=r"records updates up to 1, but"):
        refuse_lost_checkpoints(paths, None, 1)
    refuse_lost_checkpoints(paths, None, 0)  # killed between its first validation and its first checkpoint
    refuse_lost_checkpoints(paths, paths.checkpoint(3), 7)


def test_a_line_whose_rows_were_lost_is_told_where_it_can_go_on(paths: LinePaths) -> None:
    for update in (3, 5, 7):
        paths.checkpoint(update).mkdir(parents=True)
    refuse_lost_rows(paths, paths.checkpoint(7), 7)
    refuse_lost_rows(paths, None, None)
    with pytest.raises(Refusal, match=r"expected rows up to update 7, .* rows up to 6: .* --to 5` goes on"):
        refuse_lost_rows(paths, paths.checkpoint(7), 6)
    with pytest.raises(Refusal, match=r"rows up to 5: .* --to 5` goes on"):
        refuse_lost_rows(paths, paths.checkpoint(7), 5)
    for last_update, found in ((2, "rows up to 2"), (None, "none")):
        with pytest.raises(Refusal, match=rf"found {found}: .* make a new line"):
            refuse_lost_rows(paths, paths.checkpoint(7), last_update)


def test_verification_reads_every_file_even_if_only_the_last_is_damaged(paths: LinePaths, make_checkpoint: Any) -> None:
    path = write_checkpoint(paths, make_checkpoint(40))
    verify_checkpoint(path)
    state = (path / "state.json").read_bytes()
    (path / "state.json").write_bytes(state.replace(b'"threads":1', b'"threads":2'))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        verify_checkpoint(path)
