"""Checkpoints: everything a line needs to go on, on disk as a whole or not at all.

A checkpoint is the directory `checkpoints/u<update>/`:

    weights.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors     fp32 tensors by parameter name
    state.json           position, optimizer counters, settings, versions (REQUIRED_STATE)
    hashes.json          size and BLAKE2b-256 of every other file

Writing. All of it is written and fsynced in `u<update>.partial`, hashes.json last; the directory is renamed to its own
name and the parent fsynced; then the file `latest` is replaced atomically to hold that name. Killed at any instant, the
line still has the checkpoint that `latest` named before, or it has the new one:
- before the rename there is only garbage with a name that nobody reads (`discard_partial_writes` removes it);
- between the rename and `latest` there is a complete checkpoint that is not named yet. Going on from the older one
  gives the same bytes, so the line does, and comes to write the same update again;
- a directory of the same name is therefore moved aside to `u<update>.replaced` first, and removed after the new one is
  in its place. Killed between these two renames, `discard_partial_writes` moves it back.

Reading. `latest` decides, not the highest number. A checkpoint counts as good when hashes.json is exactly what was
written (it hashes itself) and every file it lists, and no other, is there with that size and hash. If the one that
`latest` names is not good, the next older good one is taken and said aloud. One with a higher number is never taken
over the head of `latest`: it may belong to a continuation that was abandoned.

Writing runs in a thread (`BackgroundWriter`) from a copy of the tensors in host memory. A failed write is not repeated
here: the caller sees the error and decides. Tests kill the process at each step (area `checkpoint` of killpoints.py).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nstrain.base.disk import (
    PARTIAL_SUFFIX,
    atomic_write,
    canonical_json,
    disk_full_is_named,
    fsync_dir,
    read_json,
)
from nstrain.base.errors import DiskFull, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.line.paths import REPLACED_SUFFIX, LinePaths, checkpoint_name, parse_checkpoint_name
from nstrain.line.tensor_file import (
    HashedFile,
    Tensors,
    hash_file,
    new_hash,
    read_tensors,
    refuse_unwritable,
    tensor_file_bytes,
    write_tensors,
)

FORMAT = 1
"""Version of the checkpoint format that this code writes and reads."""

TENSOR_FILES = ("weights", "exp_avg", "exp_avg_sq")
"""The tensor files, without their ending: parameters, first and second moments of AdamW."""

REASONS = ("start", "rolling", "cycle_end", "length_change", "end", "stop")
"""Why a checkpoint was written."""

REQUIRED_STATE = {
    "format": int,
    "update": int,
    "tokens": int,
    "generation": int,
    "position": dict,
    "optimizer": dict,
    "reason": str,
    "kept": bool,
    "settings": dict,
    "versions": dict,
    "threads": int,
    "id": str,
}
"""The fields of state.json and their types; docs/reference/checkpoint.md says what each means."""

_STATE = "state.json"
_HASHES = "hashes.json"
_FILES = (*(f"{stem}.safetensors" for stem in TENSOR_FILES), _STATE)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A line after an update."""

    state: dict[str, Any]
    """state.json: JSON values, with every field of REQUIRED_STATE."""
    tensors: Mapping[str, Tensors]
    """By file (TENSOR_FILES), then by parameter name."""


class DamagedCheckpoint(Refusal):
    """A checkpoint that is not as it was written; an older one may stand in for it."""


def _state_problem(state: Any) -> str | None:
    """What is wrong with the content of a state.json, if anything."""
    if not isinstance(state, dict):
        return f"expected an object, found {type(state).__name__}"
    if state.get("format") != FORMAT:
        return f"expected checkpoint format {FORMAT}, found {state.get('format')!r}"
    for name, kind in REQUIRED_STATE.items():
        if name not in state:
            return f"field {name!r} is missing"
        if not isinstance(state[name], kind) or (kind is int and isinstance(state[name], bool)):
            return f"field {name!r}: expected {kind.__name__}, found {state[name]!r}"
    if state["reason"] not in REASONS:
        return f"field 'reason': expected one of {', '.join(REASONS)}, found {state['reason']!r}"
    return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def checkpoint_bytes(checkpoint: Checkpoint) -> int:
    """What a checkpoint takes on disk, in bytes (its files; a file system adds a little)."""
    tensor_bytes = sum(tensor_file_bytes(checkpoint.tensors[stem]) for stem in TENSOR_FILES)
    return tensor_bytes + len(_state_text(checkpoint.state)) + 1024  # hashes.json: under 1 KiB


def write_checkpoint(paths: LinePaths, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint durably, then make `latest` name it. Returns its directory.

    A checkpoint of the same update is replaced. Raises `ValueError` for content that is not a checkpoint's and
    `DiskFull` (with the bytes needed and free) before or while writing; the line then still has what it had.
    """
    if problem := _state_problem(checkpoint.state):
        raise ValueError(f"state of a checkpoint: {problem}")
    if sorted(checkpoint.tensors) != sorted(TENSOR_FILES):
        raise ValueError(f"tensors of a checkpoint: expected {TENSOR_FILES}, found {tuple(checkpoint.tensors)}")
    for stem in TENSOR_FILES:
        refuse_unwritable(checkpoint.tensors[stem], stem)
    target = paths.checkpoint(checkpoint.state["update"])
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    needed_bytes = checkpoint_bytes(checkpoint)
    try:
        with disk_full_is_named(target):
            paths.checkpoints.mkdir(exist_ok=True)
            _refuse_too_little_space(target, needed_bytes)
            try:
                kill_point("checkpoint:begin")
                if partial.exists():
                    shutil.rmtree(partial)
                _write_files(partial, checkpoint)
                _put_in_place(partial, target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except DiskFull as error:
        raise DiskFull(f"{error} This checkpoint needs {needed_bytes:,} bytes.") from error
    atomic_write(paths.latest, target.name + "\n")
    kill_point("checkpoint:latest replaced")
    return target


def _refuse_too_little_space(target: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"{target}: cannot be written; {free_bytes:,} bytes are free there. "
            "Free space on that file system and run the same command again."
        )


def _state_text(state: dict[str, Any]) -> bytes:
    return canonical_json(state) + b"\n"


def _hashes_text(files: dict[str, Any]) -> bytes:
    """hashes.json for its entries: one byte string for one content, so that any changed byte shows."""
    digest = new_hash()
    digest.update(canonical_json(files))
    return canonical_json({"files": files, "blake2b": digest.hexdigest()}) + b"\n"


def _write_files(directory: Path, checkpoint: Checkpoint) -> None:
    directory.mkdir()
    kill_point("checkpoint:directory made")
    files = {}
    for name in _FILES:
        with HashedFile(directory / name) as file:
            if name == _STATE:
                file.write(_state_text(checkpoint.state))
            else:
                write_tensors(file, checkpoint.tensors[name.removesuffix(".safetensors")])
        files[name] = {"bytes": file.size_bytes, "blake2b": file.hexdigest()}
        kill_point("checkpoint:file durable")
    with HashedFile(directory / _HASHES) as file:
        file.write(_hashes_text(files))
    kill_point("checkpoint:hashes durable")
    fsync_dir(directory)
    kill_point("checkpoint:directory durable")


def _put_in_place(partial: Path, target: Path) -> None:
    replaced = target.with_name(target.name + REPLACED_SUFFIX)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(target, replaced)
        kill_point("checkpoint:old one moved aside")
    os.rename(partial, target)
    kill_point("checkpoint:new one in place")
    fsync_dir(target.parent)
    kill_point("checkpoint:new one durable")
    if replaced.exists():
        shutil.rmtree(replaced)
        kill_point("checkpoint:old one removed")


def discard_partial_writes(paths: LinePaths) -> list[str]:
    """Clear away what a killed writer left in `checkpoints/`; returns what was done, a line an item, for the log.

    A checkpoint that was moved aside and has no successor gets its name back. Only for the holder of the trainer's
    lock, before `newest_good`.
    """
    done: list[str] = []
    if not paths.checkpoints.is_dir():
        return done
    for entry in sorted(paths.checkpoints.iterdir()):
        original = entry.with_name(entry.name.removesuffix(REPLACED_SUFFIX))
        if entry.name.endswith(REPLACED_SUFFIX) and not original.exists():
            os.rename(entry, original)
            done.append(f"{original}: given back its name after an interrupted write")
        elif entry.name.endswith((PARTIAL_SUFFIX, REPLACED_SUFFIX)):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
            done.append(f"{entry}: removed, left by an interrupted write")
    if done:
        fsync_dir(paths.checkpoints)
    return done


# ---- reading ---------------------------------------------------------------------------------------------------------


def verify_checkpoint(path: Path) -> None:
    """Refuse a checkpoint of which any byte is not as it was written. Raises as `load_checkpoint` does."""
    if not path.is_dir():
        raise DamagedCheckpoint(f"{path}: no such checkpoint")
    files = _read_hashes(path / _HASHES)
    found = sorted(entry.name for entry in path.iterdir())
    expected = sorted((*_FILES, _HASHES))
    for name in expected:
        if name not in found:
            raise DamagedCheckpoint(f"{path / name}: missing from the checkpoint")
    for name in found:
        if name not in expected:
            raise DamagedCheckpoint(f"{path / name}: not a file of a checkpoint; move it elsewhere")
    for name in _FILES:
        size_bytes = (path / name).stat().st_size
        if size_bytes != files[name]["bytes"]:
            raise DamagedCheckpoint(
                f"{path / name}: damaged: expected {files[name]['bytes']:,} bytes, found {size_bytes:,}"
            )
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(_FILES)) as pool:
        hashes = dict(zip(_FILES, pool.map(hash_file, (path / name for name in _FILES)), strict=True))
    for name in _FILES:
        if hashes[name] != files[name]["blake2b"]:
            raise DamagedCheckpoint(
                f"{path / name}: damaged: expected blake2b {files[name]['blake2b']}, found {hashes[name]}"
            )


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except Refusal as error:
        raise DamagedCheckpoint(str(error)) from None


def _read_hashes(path: Path) -> dict[str, Any]:
    """The entries of hashes.json by file, if it is as it was written."""
    try:
        files = _read_json(path)["files"]
        intact = path.read_bytes() == _hashes_text(files)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{path}: damaged: expected the files' hashes, found something else ({error!r})"
        ) from None
    if not intact:
        raise DamagedCheckpoint(f"{path}: damaged: its own hash does not fit its content")
    if sorted(files) != sorted(_FILES):
        raise Refusal(
            f"{path}: expected a checkpoint of {', '.join(_FILES)}, found one of {', '.join(sorted(files))}: "
            "another version of nstrain wrote it"
        )
    return dict(files)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json, checked for its fields but not against its hash. Raises as `load_checkpoint` does."""
    state = _read_json(path / _STATE)
    if isinstance(state, dict) and state.get("format") != FORMAT:
        raise Refusal(
            f"{path / _STATE}: expected checkpoint format {FORMAT}, found {state.get('format')!r}; "
            "go on with the version of nstrain that wrote it"
        )
    if problem := _state_problem(state):
        raise DamagedCheckpoint(f"{path / _STATE}: {problem}")
    number = parse_checkpoint_name(path.name)
    if number is not None and number != state["update"]:
        raise DamagedCheckpoint(
            f"{path / _STATE}: holds update {state['update']}, but the directory's name says {number}; "
            "give the directory back its own name"
        )
    return dict(state)


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, every byte verified, its tensors in memory of their own.

    Raises `DamagedCheckpoint` naming the file that is damaged, missing or too many, and `Refusal` for one in a format
    that this version does not know.
    """
    verify_checkpoint(path)
    state = read_state(path)
    return Checkpoint(state, {stem: read_tensors(path / f"{stem}.safetensors") for stem in TENSOR_FILES})


def read_latest(paths: LinePaths) -> int | None:
    """The update of the checkpoint that `latest` names; None if there is no such file or it names none."""
    try:
        return parse_checkpoint_name(paths.latest.read_text(errors="replace").strip())
    except FileNotFoundError:
        return None


def _warn_on_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def newest_good(paths: LinePaths, warn: Callable[[str], None] = _warn_on_stderr) -> Path | None:
    """The checkpoint to go on from, verified; None if the line has none at all.

    It is the one that `latest` names; if that one is damaged, the next older good one (if `latest` itself is missing or
    unreadable, the good one with the highest number). Each one passed over is said through `warn`. Raises `Refusal`
    listing what is wrong with each if there are checkpoints but none may be taken, or naming the first that is sound
    but in a format that this version does not know.
    """
    updates = paths.checkpoint_updates()
    named = read_latest(paths)
    if not updates and not paths.latest.exists():
        return None
    if named is None:
        warn(f"{paths.latest}: names no checkpoint; taking the good one with the highest number")
        candidates = updates[::-1]
    else:
        candidates = [named, *(update for update in updates[::-1] if update < named)]
    rejected = []
    for update in candidates:
        path = paths.checkpoint(update)
        try:
            verify_checkpoint(path)
            read_state(path)
        except (DamagedCheckpoint, OSError) as error:
            warn(f"checkpoint passed over: {error}")
            rejected.append(str(error))
            continue
        if rejected:
            warn(f"{path}: the newest good checkpoint before those; the line goes on from here")
        return path
    newer = [checkpoint_name(update) for update in updates if named is not None and update > named]
    raise Refusal(
        f"{paths.checkpoints}: no good checkpoint to go on from: {'; '.join(rejected) or 'there is none'}. "
        "Put one back from a copy"
        + (f", or write the name of a newer one ({', '.join(newer)}) into {paths.latest}" if newer else "")
        + "; to begin anew, make a new line."
    )


def refuse_lost_checkpoints(paths: LinePaths, newest: Path | None, last_update: int | None) -> None:
    """Refuse to begin a line anew that has trained: no checkpoint, yet its journal reaches beyond update 0.

    `newest` is `newest_good`'s answer, `last_update` the journal's last update (None: empty). The start checkpoint is
    committed before update 1 is recorded, so this state means that checkpoints were lost. Raises `Refusal`.
    """
    if newest is None and last_update is not None and last_update > 0:
        raise Refusal(
            f"{paths.journal}: records updates up to {last_update}, but {paths.checkpoints} holds no checkpoint. "
            "Put the checkpoints back; to begin anew, make a new line."
        )


# ---- in the background -----------------------------------------------------------------------------------------------


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time.

    The arrays of a submitted checkpoint belong to the writer until it is idle again: `wait` before changing them. An
    error of the writer is raised as it is, once, by the next `poll`, `wait` or `submit`. The thread is not a daemon:
    a program that ends in the ordinary way finishes the write.
    """

    def __init__(self, paths: LinePaths, on_committed: Callable[[Path, dict[str, Any]], None]) -> None:
        """`on_committed(path, state)` runs in the thread after each write and before it counts as done."""
        self._paths = paths
        self._on_committed = on_committed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint, after waiting for the one before. Raises that one's error."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint writer")
        self._thread.start()

    def poll(self) -> None:
        """Raise the error of a write that failed, if there is one; never waits."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the writer's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            path = write_checkpoint(self._paths, checkpoint)
            self._on_committed(path, checkpoint.state)
        except BaseException as error:
            self._error = error
