"""Tensors by name in one file, in the safetensors format.

A file is: the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, byte offsets into what
follows; padded with spaces to a multiple of 8), then the tensors' bytes without gaps, here in order of their names.
(https://github.com/huggingface/safetensors, "Format".) The library's own writer wants all bytes at once and hashes
nothing. Here a file is a stream of blocks (`file_blocks`) that one thread writes while another hashes it, so that a
checkpoint never exists twice in memory, and a reader hashes what it reads on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nstrain.base.disk import canonical_json
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.killpoints import kill_point

Array = np.ndarray[Any, np.dtype[np.float32]]
Tensors = Mapping[str, Array]
"""fp32 arrays by parameter name."""

BLOCK_BYTES = 16 << 20
"""Bytes that are written, read or hashed at a time."""

_LENGTH_BYTES = 8


class LazyTensors(Mapping[str, Array]):
    """Tensors that are brought to the host one by one, each time they are asked for: what a host without room for a
    copy of all of them writes a checkpoint from. Whoever reads them sees to it that they do not change meanwhile.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Array]) -> None:
        """`read(name)` gives a tensor of the shape that `shapes` says, in host memory."""
        self.shapes = dict(shapes)
        self._read = read

    def __getitem__(self, name: str) -> Array:
        array = self._read(name)
        assert array.shape == self.shapes[name]
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def _shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes; nothing is brought to the host for them."""
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    return {name: tensor.shape for name, tensor in tensors.items()}


class NotFinite(NstrainError):
    """A tensor that holds a NaN or an infinity: from such weights or moments no line can go on."""


# ---- hashing ---------------------------------------------------------------------------------------------------------


def new_hash() -> hashlib.blake2b:
    """The hash that names a file's content: BLAKE2b with 256 bits (RFC 7693)."""
    return hashlib.blake2b(digest_size=32)


def hash_of(blocks: Iterable[bytes | memoryview]) -> str:
    """The hash of a file made of these blocks."""
    digest = new_hash()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """`hash_of` a file that exists, with bounded memory."""
    digest, block = new_hash(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


# ---- writing ---------------------------------------------------------------------------------------------------------


class DurableFile:
    """A new file, which is on disk once `close` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self.size_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises `OSError` as the system gives it."""
        view = memoryview(data)
        self.size_bytes += len(view)
        while len(view):  # A raw file may take less than it was given, above all on a full disk.
            view = view[self._file.write(view) :]

    def close(self) -> None:
        """Have everything on disk. Raises `OSError` as the system gives it; the file is closed all the same."""
        with self._file:
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close it, whatever of it is on disk."""
        self._file.close()


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name in sorted(shapes):
        end = offset + _bytes_of(shapes[name])
        entries[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    text = canonical_json(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _bytes_of(shape: tuple[int, ...]) -> int:
    return 4 * int(np.prod(shape, dtype=np.int64))


def tensor_file_bytes(tensors: Tensors) -> int:
    """The size of the file that `file_blocks` makes."""
    return tensor_file_size(_shapes(tensors))


def tensor_file_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The size of the file of tensors of these shapes, in bytes."""
    return len(_header(shapes)) + sum(_bytes_of(shape) for shape in shapes.values())


def refuse_unwritable(tensors: Tensors, where: str) -> None:
    """Raise `ValueError` for a tensor that such a file cannot hold: not fp32, or named like the format's own entry."""
    for name in tensors:
        if name == "__metadata__":
            raise ValueError(f"{where}: {name!r} is not a parameter's name: the format keeps it for itself")
    if isinstance(tensors, LazyTensors):
        return
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ValueError(f"{where}: tensor {name!r}: expected float32, found {tensor.dtype}")


def file_blocks(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """The whole content of a tensor file, in order: the header, then blocks of at most BLOCK_BYTES of one tensor.

    Holds nothing but a tensor that is not contiguous or not on the host yet.
    """
    yield _header(_shapes(tensors))
    for name in sorted(tensors):
        yield from _tensor_blocks(tensors[name])


def _tensor_blocks(tensor: Array) -> Iterator[memoryview]:
    array_n = np.ascontiguousarray(tensor, dtype="<f4").reshape(-1).view(np.uint8)
    for begin in range(0, array_n.size, BLOCK_BYTES):
        yield array_n[begin : begin + BLOCK_BYTES].data


def write_blocks(path: Path, blocks: Iterable[bytes | memoryview]) -> DurableFile:
    """Write a file's blocks in order; it is durable only once the caller has closed it."""
    file = DurableFile(path)
    try:
        for number, block in enumerate(blocks):
            file.write(block)
            kill_point("checkpoint:block written" if number else "checkpoint:header written")
    except BaseException:
        file.abandon()
        raise
    return file


def hash_finite(tensors: Tensors, where: str) -> str:
    """The hash of the tensors' file. Raises `NotFinite` naming the first tensor that holds a NaN or an infinity."""
    digest = new_hash()
    digest.update(_header(_shapes(tensors)))
    for name in sorted(tensors):
        for block in _tensor_blocks(tensors[name]):
            # Two reductions that keep a NaN, and no array of their own.
            values = np.frombuffer(block, dtype="<f4")
            with np.errstate(invalid="ignore"):
                finite = bool(np.isfinite(values.min()) and np.isfinite(values.max()))
            if not finite:
                raise NotFinite(f"{where}: tensor {name!r} holds a NaN or an infinity")
            digest.update(block)
    return digest.hexdigest()


# ---- reading ---------------------------------------------------------------------------------------------------------


OnBlock = Callable[[memoryview], object]
"""What is told of every block of a file as it is read, in order; a block stays as it is."""


def read_tensors(path: Path, on_block: OnBlock = lambda block: None) -> dict[str, Array]:
    """The arrays of a tensor file, each in memory of its own; every byte of the file comes by `on_block`.

    Raises `Refusal` naming the file if it is not one that this module makes.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _read(file, on_block)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Refusal(f"{path}: expected fp32 tensors in the safetensors format, found {error}") from None


def _read(file: Any, on_block: OnBlock) -> dict[str, Array]:
    total_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(_take(file, bytearray(_LENGTH_BYTES), on_block), "little")
    if header_bytes > total_bytes:
        raise ValueError(f"a header of {header_bytes:,} bytes in a file of {total_bytes:,}")
    entries = json.loads(bytes(_take(file, bytearray(header_bytes), on_block)))
    entries.pop("__metadata__", None)
    tensors: dict[str, Array] = {}
    offset = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        if entry["dtype"] != "F32" or entry["data_offsets"][0] != offset:
            raise ValueError(f"tensor {name!r}: {entry}")
        shape = tuple(entry["shape"])
        offset = entry["data_offsets"][1]
        if _bytes_of(shape) != offset - entry["data_offsets"][0] or offset > total_bytes:
            raise ValueError(f"tensor {name!r}: {entry}")
        tensors[name] = np.empty(shape, dtype="<f4")
        _take(file, tensors[name].reshape(-1).view(np.uint8).data, on_block)
    if file.read(1):
        raise ValueError("bytes after the last tensor")
    return tensors


def _take(file: Any, into: bytearray | memoryview, on_block: OnBlock) -> bytearray | memoryview:
    """Fill a buffer from the file, block by block. Raises `ValueError` if the file ends before."""
    view = memoryview(into)
    for begin in range(0, len(view), BLOCK_BYTES):
        block = view[begin : begin + BLOCK_BYTES]
        left = block
        while len(left):
            count = file.readinto(left)
            if not count:
                raise ValueError("the file is cut short")
            left = left[count:]
        on_block(block)
    return into
