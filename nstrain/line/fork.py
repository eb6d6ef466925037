"""The first checkpoint of a branch: its parent's, under a state of its own.

The tensors are copied byte for byte, each file's hash compared with what its parent's hashes.json says. They are real
copies: parent and branch may lie on different disks, and each is removed without a thought of the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nstrain.base.killpoints import kill_point
from nstrain.line.checkpoint import (
    DamagedCheckpoint,
    put_checkpoint,
    read_state,
    seal_checkpoint,
    sized_files,
)
from nstrain.line.paths import LinePaths
from nstrain.line.state_json import refuse_wrong_state
from nstrain.line.tensor_file import BLOCK_BYTES, DurableFile, new_hash


def fork_checkpoint(parent: LinePaths, update: int, paths: LinePaths, changes: dict[str, Any]) -> Path:
    """Begin a line with the checkpoint of one of its parent's updates; returns its directory, durable and `latest`.

    `changes` replace fields of state.json (id, settings, position, reason, ...); a new field `forked_from` names the
    parent and the update. Raises `DamagedCheckpoint` naming a file of the parent that is not as it was written,
    `DiskFull` with the bytes needed and free, and `ValueError` for changes that make no state.
    """
    source = parent.checkpoint(update)
    files = sized_files(source)
    state = read_state(source)
    state = {**state, "forked_from": {"id": state["id"], "update": update, "run": str(parent.root)}, **changes}
    refuse_wrong_state(state)
    tensor_files = {name: entry for name, entry in files.items() if name != "state.json"}

    def write(directory: Path) -> None:
        directory.mkdir()
        for name in sorted(tensor_files):
            copied = _copy(source / name, directory / name)
            if copied != tensor_files[name]["blake2b"]:
                raise DamagedCheckpoint(
                    f"{source / name}: damaged: expected blake2b {tensor_files[name]['blake2b']}, found {copied}"
                )
            kill_point("checkpoint:file durable")
        seal_checkpoint(directory, state, tensor_files)

    needed_bytes = sum(entry["bytes"] for entry in files.values()) + (1 << 20)
    return put_checkpoint(paths, state["update"], needed_bytes, write)


def _copy(source: Path, target: Path) -> str:
    """Copy a file durably; the hash of what was copied."""
    digest, block, file = new_hash(), memoryview(bytearray(BLOCK_BYTES)), DurableFile(target)
    try:
        with source.open("rb", buffering=0) as reader:
            while count := reader.readinto(block):
                digest.update(block[:count])
                file.write(block[:count])
                kill_point("checkpoint:block written")
    except BaseException:
        file.abandon()
        raise
    file.close()
    return digest.hexdigest()
