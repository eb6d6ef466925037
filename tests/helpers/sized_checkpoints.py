"""Checkpoint directories of any size, sound but for their tensors, which are empty: for whoever counts bytes."""

from __future__ import annotations

from pathlib import Path

from nstrain.base.disk import atomic_write_json
from nstrain.line.checkpoint import _hashes_text
from nstrain.line.paths import LinePaths
from nstrain.line.tensor_file import hash_file


def make_sized_line(run: Path, keep_last: int = 2) -> LinePaths:
    """A training line as far as its checkpoints go; it has none yet."""
    paths = LinePaths(run)
    paths.checkpoints.mkdir(parents=True)
    atomic_write_json(paths.run_json, {"checkpoints": {"keep_last": keep_last}})
    return paths


def put_sized(
    paths: LinePaths, update: int, size: int, *, cycle: int = 1, kept: bool = False, name: str | None = None
) -> Path:
    """A checkpoint of so many bytes, the next row in `cycle`; under its own name (the default) it is the newest."""
    directory = paths.checkpoints / (name or paths.checkpoint(update).name)
    directory.mkdir()
    state = {
        "format": 1,
        "update": update,
        "tokens": update * 512,
        "generation": 1,
        "position": {"cycle": cycle, "row": 0},
        "optimizer": {},
        "reason": "cycle_end" if kept else "rolling",
        "kept": kept,
        "settings": {},
        "changes": {},
        "versions": {},
        "threads": 1,
        "id": "sized",
    }
    atomic_write_json(directory / "state.json", state)
    names = ("exp_avg.safetensors", "exp_avg_sq.safetensors", "state.json", "weights.safetensors")
    for file in set(names) - {"state.json"}:
        (directory / file).touch()
    hashes = {file: {"bytes": 0, "blake2b": hash_file(directory / file)} for file in names}
    (directory / "hashes.json").write_bytes(_hashes_text(hashes))
    rest = size - sum(file.stat().st_size for file in directory.iterdir())
    (directory / "weights.safetensors").write_bytes(bytes(rest))
    if name is None:
        paths.latest.write_text(directory.name + "\n")
    return directory
