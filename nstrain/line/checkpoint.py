"""Checkpoints: everything a line needs to go on, on disk as a whole or not at all.

A checkpoint is the directory `checkpoints/u<update>/`:

    weights.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors     fp32 tensors by parameter name
    ema.safetensors                                                      the same, once the line keeps an average
    state.json           position, optimizer counters, settings, versions (state_json.py)
    hashes.json          size and BLAKE2b-256 of every other file

Writing. One thread writes the tensors' files one after the other, while others hash them from the host copy, look for a
NaN or an infinity, and sync what is written. It all happens in `u<update>.partial`, hashes.json last; the directory is
renamed to its own name and the parent fsynced; then the file `latest` is replaced atomically to hold that name. Killed
at any instant, the line still has the checkpoint that `latest` named before, or it has the new one:
- before the rename there is only garbage with a name that nobody reads (`discard_partial_writes` removes it);
- between the rename and `latest` there is a complete checkpoint that is not named yet. Going on from the older one
  gives the same bytes, so the line does, and comes to write the same update again;
- a directory of the same name is therefore moved aside to `u<update>.replaced` first, and removed after the new one is
  in its place. Killed between these two renames, `discard_partial_writes` moves it back.

Reading. `latest` decides, not the highest number. A checkpoint counts as good when hashes.json is exactly what was
written (it hashes itself) and every file it lists, and no other, is there with that size and hash. If the one that
`latest` names is not good, the next older good one is taken and said aloud. One with a higher number is never taken
over the head of `latest`: it may belong to a continuation that was abandoned.

Writing usually runs in a thread (background.py) from a copy of the tensors in host memory. A failed write is not
repeated here: the caller sees the error and decides. Tests kill the process at each step (area `checkpoint` of
killpoints.py).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nstrain.base.commands import typed
from nstrain.base.disk import (
    PARTIAL_SUFFIX,
    atomic_write,
    canonical_json,
    disk_full_is_named,
    fsync_dir,
    read_json,
    remove_entry,
    write_durable,
)
from nstrain.base.errors import DiskFull, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.line.paths import REPLACED_SUFFIX, LinePaths, checkpoint_name, parse_checkpoint_name
from nstrain.line.state_json import FORMAT, refuse_wrong_state, state_problem
from nstrain.line.tensor_file import (
    Tensors,
    file_blocks,
    hash_file,
    hash_finite,
    hash_of,
    new_hash,
    read_tensors,
    refuse_unwritable,
    tensor_file_bytes,
    write_blocks,
)

TENSOR_FILES = ("weights", "exp_avg", "exp_avg_sq")
"""The tensor files of every checkpoint, without their ending: parameters, first and second moments of AdamW."""

AVERAGE_FILE = "ema"
"""One more in a line that keeps a moving average of its parameters, from the update on at which that begins."""

_STATE = "state.json"
_HASHES = "hashes.json"
_SETS_OF_FILES = tuple(
    sorted((*(f"{stem}.safetensors" for stem in stems), _STATE))
    for stems in (TENSOR_FILES, (*TENSOR_FILES, AVERAGE_FILE))
)
"""What hashes.json may list: the files of a checkpoint without the average, and with it."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A line after an update."""

    state: dict[str, Any]
    """state.json: JSON values, with every field of state_json.py."""
    tensors: Mapping[str, Tensors]
    """By file (TENSOR_FILES, and AVERAGE_FILE if the average has begun), then by parameter name."""


class DamagedCheckpoint(Refusal):
    """A checkpoint that is not as it was written; an older one may stand in for it."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def checkpoint_bytes(checkpoint: Checkpoint) -> int:
    """What a checkpoint takes on disk, in bytes (its files; a file system adds a little)."""
    tensor_bytes = sum(tensor_file_bytes(tensors) for tensors in checkpoint.tensors.values())
    return tensor_bytes + len(_state_text(checkpoint.state)) + 1024  # hashes.json: under 1 KiB


def write_checkpoint(paths: LinePaths, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint durably, then make `latest` name it. Returns its directory.

    A checkpoint of the same update is replaced. Raises `ValueError` for content that is not a checkpoint's,
    `NotFinite` for a tensor from which no line can go on, and `DiskFull` (with the bytes needed and free) before or
    while writing; the line then still has what it had.
    """
    refuse_wrong_state(checkpoint.state)
    if set(checkpoint.tensors) not in ({*TENSOR_FILES}, {*TENSOR_FILES, AVERAGE_FILE}):
        raise ValueError(
            f"tensors of a checkpoint: expected {TENSOR_FILES} (and {AVERAGE_FILE}), found {tuple(checkpoint.tensors)}"
        )
    for stem, tensors in checkpoint.tensors.items():
        refuse_unwritable(tensors, stem)
    return put_checkpoint(
        paths,
        checkpoint.state["update"],
        checkpoint_bytes(checkpoint),
        lambda directory: _write_files(directory, checkpoint),
    )


def put_checkpoint(paths: LinePaths, update: int, needed_bytes: int, write: Callable[[Path], None]) -> Path:
    """Make a checkpoint of what `write(directory)` makes, durable, then make `latest` name it.

    `write` gets the name of a directory to make. Raises `DiskFull` with the bytes needed and free.
    """
    target = paths.checkpoint(update)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        with disk_full_is_named(target):
            if not paths.checkpoints.exists():
                paths.checkpoints.mkdir()
                fsync_dir(paths.root)
            _refuse_too_little_space(target, needed_bytes)
            try:
                kill_point("checkpoint:begin")
                if os.path.lexists(partial):
                    remove_entry(partial)
                write(partial)
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
    stems = sorted(checkpoint.tensors)
    files: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(2 * len(stems), "checkpoint file") as pool:
        hashes = {stem: pool.submit(hash_finite, checkpoint.tensors[stem], stem) for stem in stems}
        closed = {}
        for stem in stems:
            file = write_blocks(directory / f"{stem}.safetensors", file_blocks(checkpoint.tensors[stem]))
            closed[stem] = (file, pool.submit(file.close))
            if hashes[stem].done():
                hashes[stem].result()  # a tensor that is not finite ends the write early
        for stem, (file, close) in closed.items():
            close.result()
            files[f"{stem}.safetensors"] = {"bytes": file.size_bytes, "blake2b": hashes[stem].result()}
            kill_point("checkpoint:file durable")
    seal_checkpoint(directory, checkpoint.state, files)


def seal_checkpoint(directory: Path, state: dict[str, Any], files: dict[str, Any]) -> None:
    """Write state.json and, with the size and hash of every tensor file in `files`, hashes.json; all durable."""
    text = _state_text(state)
    write_durable(directory / _STATE, text)
    kill_point("checkpoint:file durable")
    entry = {"bytes": len(text), "blake2b": hash_of([text])}
    write_durable(directory / _HASHES, _hashes_text({**files, _STATE: entry}))
    kill_point("checkpoint:hashes durable")
    fsync_dir(directory)
    kill_point("checkpoint:directory durable")


def _put_in_place(partial: Path, target: Path) -> None:
    replaced = target.with_name(target.name + REPLACED_SUFFIX)
    if os.path.lexists(target):
        if os.path.lexists(replaced):
            remove_entry(replaced)
        os.rename(target, replaced)
        kill_point("checkpoint:old one moved aside")
    os.rename(partial, target)
    kill_point("checkpoint:new one in place")
    fsync_dir(target.parent)
    kill_point("checkpoint:new one durable")
    if os.path.lexists(replaced):
        remove_entry(replaced)
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
            remove_entry(entry)
            done.append(f"{entry}: removed, left by an interrupted write")
    if done:
        fsync_dir(paths.checkpoints)
    return done


# ---- reading ---------------------------------------------------------------------------------------------------------


def verify_checkpoint(path: Path) -> None:
    """Refuse a checkpoint of which any byte is not as it was written; every problem is in the message.

    Raises as `load_checkpoint` does.
    """
    files = _listed_files(path)
    problems = _misfits(path, files)
    whole = [name for name in files if name not in problems]
    with concurrent.futures.ThreadPoolExecutor(len(files)) as pool:
        hashes = dict(zip(whole, pool.map(hash_file, (path / name for name in whole)), strict=True))
    for name, found in hashes.items():
        if found != files[name]["blake2b"]:
            problems[name] = _other_hash(path / name, files[name]["blake2b"], found)
    if problems:
        raise DamagedCheckpoint("; ".join(problems[name] for name in sorted(problems)))


def sized_files(path: Path) -> dict[str, Any]:
    """What hashes.json says of each file of a checkpoint: exactly these are there, of these sizes.

    Raises `DamagedCheckpoint` naming what is not so, and `Refusal` for a set of files that is another version's.
    """
    files = _listed_files(path)
    if problems := _misfits(path, files):
        raise DamagedCheckpoint("; ".join(problems.values()))
    return files


def _listed_files(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise DamagedCheckpoint(f"{path}: no such checkpoint")
    return _read_hashes(path / _HASHES)


def _misfits(path: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """What is missing, too many or of another size, by name."""
    found = {entry.name for entry in path.iterdir()}
    problems = {}
    for name in sorted(found | {*files}):
        if name not in found:
            problems[name] = f"{path / name}: missing from the checkpoint"
        elif name not in {*files, _HASHES}:
            problems[name] = f"{path / name}: not a file of this checkpoint; move it elsewhere"
        elif name in files and (size_bytes := (path / name).stat().st_size) != files[name]["bytes"]:
            expected = files[name]["bytes"]
            problems[name] = f"{path / name}: damaged: expected {expected:,} bytes, found {size_bytes:,}"
    return problems


def _other_hash(path: Path, expected: str, found: str) -> str:
    return f"{path}: damaged: expected blake2b {expected}, found {found}"


def _refuse_other_hash(path: Path, expected: str, found: str) -> None:
    if found != expected:
        raise DamagedCheckpoint(_other_hash(path, expected, found))


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
    if sorted(files) not in _SETS_OF_FILES:
        raise Refusal(
            f"{path}: expected a checkpoint of {', '.join(_SETS_OF_FILES[0])}, found one of "
            f"{', '.join(sorted(files))}: another version of nstrain wrote it"
        )
    return dict(files)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json, checked for its fields and against its hash. Raises as `load_checkpoint` does."""
    state = _read_json(path / _STATE)
    _refuse_other_hash(path / _STATE, _read_hashes(path / _HASHES)[_STATE]["blake2b"], hash_file(path / _STATE))
    if isinstance(state, dict) and state.get("format") != FORMAT:
        raise Refusal(
            f"{path / _STATE}: expected checkpoint format {FORMAT}, found {state.get('format')!r}; "
            "go on with the version of nstrain that wrote it"
        )
    if problem := state_problem(state):
        raise DamagedCheckpoint(f"{path / _STATE}: {problem}")
    number = parse_checkpoint_name(path.name)
    if number is not None and number != state["update"]:
        raise DamagedCheckpoint(
            f"{path / _STATE}: holds update {state['update']}, but the directory's name says {number}; "
            "give the directory back its own name"
        )
    return dict(state)


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, every byte verified as it is read, its tensors in memory of their own.

    Raises `DamagedCheckpoint` naming the file that is damaged, missing or too many, and `Refusal` for one in a format
    that this version does not know.
    """
    files = sized_files(path)
    state = read_state(path)
    names = sorted(files.keys() - {_STATE})
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        loaded = pool.map(lambda name: _load_tensors(path / name, files[name]["blake2b"]), names)
        return Checkpoint(state, dict(zip((name.removesuffix(".safetensors") for name in names), loaded, strict=True)))


def _load_tensors(path: Path, expected: str) -> Tensors:
    digest = new_hash()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as hashing:  # one block, while the next one is read
            tensors = read_tensors(path, lambda block: hashing.submit(digest.update, block))
    except Refusal:
        _refuse_other_hash(path, expected, hash_file(path))
        raise
    _refuse_other_hash(path, expected, digest.hexdigest())
    return tensors


def read_latest(paths: LinePaths) -> int | None:
    """The update of the checkpoint that `latest` names; None if it cannot be read or names none."""
    try:
        return parse_checkpoint_name(paths.latest.read_text(errors="replace").strip())
    except OSError:
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

    def verified(path: Path) -> Path:
        verify_checkpoint(path)
        read_state(path)
        return path

    return _newest(paths, verified, warn)


def load_newest_good(paths: LinePaths, warn: Callable[[str], None] = _warn_on_stderr) -> tuple[Path, Checkpoint] | None:
    """`newest_good` and its content, every file read once."""
    return _newest(paths, lambda path: (path, load_checkpoint(path)), warn)


def newest_state(paths: LinePaths, warn: Callable[[str], None] = _warn_on_stderr) -> tuple[Path, dict[str, Any]] | None:
    """`newest_good` and its state.json as far as it is known without reading a tensor: of those, the sizes count."""

    def sized(path: Path) -> tuple[Path, dict[str, Any]]:
        sized_files(path)
        return path, read_state(path)

    return _newest(paths, sized, warn)


_Taken = TypeVar("_Taken")


def _newest(paths: LinePaths, take: Callable[[Path], _Taken], warn: Callable[[str], None]) -> _Taken | None:
    """What `take` gives for the first checkpoint, in the order of `newest_good`, that it does not find damaged."""
    updates = paths.checkpoint_updates()
    named = read_latest(paths)
    if not updates and not paths.latest.exists():
        return None
    if named is None:
        warn(f"{paths.latest}: names no checkpoint; taking the good one with the highest number")
        candidates = updates[::-1]
    else:
        candidates = [named, *(update for update in updates[::-1] if update < named)]
    rejected: list[str] = []
    for update in candidates:
        path = paths.checkpoint(update)
        try:
            taken = take(path)
        except (DamagedCheckpoint, OSError) as error:
            warn(f"checkpoint passed over: {error}")
            rejected.append(str(error))
            continue
        if rejected:
            warn(f"{path}: the newest good checkpoint before those; the line goes on from here")
        return taken
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


def refuse_lost_rows(paths: LinePaths, newest: Path | None, last_update: int | None) -> None:
    """Refuse to go on from a checkpoint that the journal does not reach: a row is recorded before what follows it.

    `newest` is `newest_good`'s answer, `last_update` the journal's last update (None: empty). Raises `Refusal`.
    """
    update = None if newest is None else parse_checkpoint_name(newest.name)
    if update is None or (last_update is not None and update <= last_update):
        return
    reached = [known for known in paths.checkpoint_updates() if last_update is not None and known <= last_update]
    remedy = "Without one the record cannot go on: to begin anew, make a new line."
    if reached:
        remedy = f"Without one, `{typed('nstrain', 'rollback', paths.root, '--to', reached[-1])}` goes on from there."
    found = "none" if last_update is None else f"rows up to {last_update}"
    raise Refusal(
        f"{paths.journal}: expected rows up to update {update}, after which {newest} was written, found {found}: rows "
        f"were lost. Put the journal back from a copy that has them. {remedy}"
    )
