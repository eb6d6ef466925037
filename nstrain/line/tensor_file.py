"""Tensors by name in one file, in the safetensors format, written and hashed in one pass.

A file is: the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, byte offsets into what
follows; padded with spaces to a multiple of 8), then the tensors' bytes without gaps, here in order of their names.
(https://github.com/huggingface/safetensors, "Format".) The library's own writer wants all bytes at once and hashes
nothing; this one streams blocks, so that a checkpoint never exists twice in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from nstrain.base.disk import canonical_json
from nstrain.base.errors import Refusal
from nstrain.base.killpoints import kill_point

Tensors = Mapping[str, "np.ndarray[Any, np.dtype[np.float32]]"]
"""fp32 arrays by parameter name."""

BLOCK_BYTES = 16 << 20
"""Bytes that are written, read or hashed at a time."""

_LENGTH_BYTES = 8


def new_hash() -> hashlib.blake2b:
    """The hash that names a file's content: BLAKE2b with 256 bits (RFC 7693)."""
    return hashlib.blake2b(digest_size=32)


class HashedFile:
    """A new file that knows the size and hash of what was written to it, and is durable once left without error."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._hash = new_hash()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises `OSError` as the system gives it."""
        view = memoryview(data)
        self._hash.update(view)
        self.size_bytes += len(view)
        while len(view):  # A raw file may take less than it was given, above all on a full disk.
            view = view[self._file.write(view) :]

    def hexdigest(self) -> str:
        """The hash of everything written so far."""
        return self._hash.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def hash_file(path: Path) -> str:
    """`HashedFile.hexdigest` of a file that exists, with bounded memory."""
    digest = new_hash()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _header(tensors: Tensors) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors):
        end = offset + tensors[name].nbytes
        entries[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = canonical_json(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def tensor_file_bytes(tensors: Tensors) -> int:
    """The size of the file that `write_tensors` makes."""
    return len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def refuse_unwritable(tensors: Tensors, where: str) -> None:
    """Raise `ValueError` for a tensor that such a file cannot hold: not fp32, or named like the format's own entry."""
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ValueError(f"{where}: tensor {name!r}: expected float32, found {tensor.dtype}")
        if name == "__metadata__":
            raise ValueError(f"{where}: {name!r} is not a parameter's name: the format keeps it for itself")


def write_tensors(file: HashedFile, tensors: Tensors) -> None:
    """Write the whole content of a tensor file. Holds one block at a time, plus a tensor that is not contiguous."""
    file.write(_header(tensors))
    kill_point("checkpoint:header written")
    for name in sorted(tensors):
        array_n = np.ascontiguousarray(tensors[name], dtype="<f4").reshape(-1).view(np.uint8)
        for begin in range(0, array_n.size, BLOCK_BYTES):
            file.write(array_n[begin : begin + BLOCK_BYTES].data)
            kill_point("checkpoint:block written")


def read_tensors(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The arrays of a tensor file, each in memory of its own.

    Raises `Refusal` naming the file if it is not one that `write_tensors` makes.
    """
    try:
        with path.open("rb") as file:
            total_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if header_bytes > total_bytes:
                raise ValueError(f"a header of {header_bytes:,} bytes in a file of {total_bytes:,}")
            entries = json.loads(file.read(header_bytes))
            entries.pop("__metadata__", None)
            tensors = {}
            offset = 0
            for name, entry in sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
                if entry["dtype"] != "F32" or entry["data_offsets"][0] != offset:
                    raise ValueError(f"tensor {name!r}: {entry}")
                shape = tuple(entry["shape"])
                offset = entry["data_offsets"][1]
                size_bytes = 4 * int(np.prod(shape, dtype=np.int64))
                if size_bytes != offset - entry["data_offsets"][0] or offset > total_bytes:
                    raise ValueError(f"tensor {name!r}: {entry}")
                tensor = np.empty(shape, dtype="<f4")
                if file.readinto(tensor.reshape(-1).view(np.uint8).data) != size_bytes:
                    raise ValueError(f"tensor {name!r} is cut short")
                tensors[name] = tensor
            if file.read(1):
                raise ValueError("bytes after the last tensor")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refusal(f"{path}: expected fp32 tensors in the safetensors format, found {error}") from None
    return tensors
