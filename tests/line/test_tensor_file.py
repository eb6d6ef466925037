"""Our streaming writer and reader against the safetensors library."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nstrain.base.errors import Refusal
from nstrain.line.tensor_file import (
    DurableFile,
    LazyTensors,
    NotFinite,
    file_blocks,
    hash_file,
    hash_finite,
    hash_of,
    new_hash,
    read_tensors,
    tensor_file_bytes,
    write_blocks,
)

Array = np.ndarray[Any, np.dtype[np.float32]]


def write(path: Path, tensors: Mapping[str, Array]) -> DurableFile:
    file = write_blocks(path, file_blocks(tensors))
    file.close()
    return file


def same_bits(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes() for name in a
    )


names = st.text(min_size=1, max_size=8).filter(lambda text: text != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.dictionaries(names, shapes, max_size=6), st.integers(0, 2**32 - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_library_reads_ours_and_we_read_the_librarys(tmp_path: Path, spec: dict[str, list[int]], seed: int) -> None:
    draw = np.random.default_rng(seed)
    # All bit patterns, NaN payloads among them.
    tensors: dict[str, Array] = {
        name: draw.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32) for name, shape in spec.items()
    }
    file = write(tmp_path / "ours", tensors)
    data = (tmp_path / "ours").read_bytes()
    assert file.size_bytes == len(data) == tensor_file_bytes(tensors)
    assert hash_of(file_blocks(tensors)) == hash_file(tmp_path / "ours")
    digest = new_hash()
    assert same_bits(read_tensors(tmp_path / "ours", digest.update), tensors)
    assert digest.hexdigest() == hash_file(tmp_path / "ours")
    assert same_bits(safetensors.numpy.load(data), tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert same_bits(read_tensors(tmp_path / "theirs"), tensors)


def test_arrays_that_are_not_contiguous_are_written_in_the_order_of_their_indices(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors: dict[str, Array] = {"columns": base[:, ::2], "transposed": base.T}
    write(tmp_path / "file", tensors)
    assert same_bits(read_tensors(tmp_path / "file"), tensors)


def test_same_tensors_same_bytes_whatever_the_order_of_the_mapping(tmp_path: Path) -> None:
    a, b = np.ones(3, np.float32), np.zeros((2, 2), np.float32)
    write(tmp_path / "1", {"a": a, "b": b})
    write(tmp_path / "2", {"b": b, "a": a})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_what_is_read_can_be_written_to_and_is_not_tied_to_the_file(tmp_path: Path) -> None:
    write(tmp_path / "file", {"a": np.ones(3, np.float32)})
    tensor = read_tensors(tmp_path / "file")["a"]
    (tmp_path / "file").unlink()
    tensor += 1
    assert tensor.tolist() == [2, 2, 2]


def test_writing_needs_no_second_copy(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {f"t{i}": np.ones(4 << 20, np.float32) for i in range(3)}  # 48 MiB
    tracemalloc.start()
    try:
        write(tmp_path / "file", tensors)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_tensors_that_are_not_on_the_host_are_fetched_one_at_a_time(tmp_path: Path) -> None:
    """The same file as from arrays, and never two tensors of the device in host memory."""
    arrays: dict[str, Array] = {f"t{i}": np.full((i + 1, 1 << 20), i, np.float32) for i in range(4)}
    fetched: list[str] = []

    def read(name: str) -> Array:
        fetched.append(name)
        return arrays[name].copy()

    lazy = LazyTensors({name: array.shape for name, array in arrays.items()}, read)
    assert tensor_file_bytes(lazy) == tensor_file_bytes(arrays)
    assert fetched == []
    tracemalloc.start()
    try:
        write(tmp_path / "lazy", lazy)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fetched == sorted(arrays)
    assert peak_bytes < (16 << 20) + (12 << 20) + (1 << 20), "the largest, and the one before it at most"
    write(tmp_path / "arrays", arrays)
    assert (tmp_path / "lazy").read_bytes() == (tmp_path / "arrays").read_bytes()
    assert hash_finite(lazy, "weights") == hash_file(tmp_path / "arrays")


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, (4 << 20) - 1, 4 << 20, (4 << 20) + 2])
def test_a_value_that_is_not_finite_is_found_anywhere_and_its_tensor_named(bad: float, place: int) -> None:
    """In the first element of a block, the last, and in the block after it."""
    tensors: dict[str, Array] = {"a": np.ones(3, np.float32), "b": np.ones((4 << 20) + 3, np.float32)}
    tensors["empty"], tensors["scalar"] = np.ones((0, 2), np.float32), np.float32(-3e38).reshape(())
    assert hash_finite(tensors, "exp_avg") == hash_of(file_blocks(tensors))
    tensors["b"][place] = bad
    with pytest.raises(NotFinite, match="exp_avg: tensor 'b' holds a NaN or an infinity"):
        hash_finite(tensors, "exp_avg")


@pytest.mark.parametrize("damage", ["empty", "short", "long", "no json", "other dtype", "gap", "huge header"])
def test_other_files_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "weights.safetensors"
    write(path, {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)})
    data = path.read_bytes()
    if damage == "other dtype":
        safetensors.numpy.save_file({"a": np.ones(3, np.float64)}, path)
    else:
        path.write_bytes(
            {
                "empty": b"",
                "short": data[:-1],
                "long": data + b"x",
                "no json": data[:8] + b"!" + data[9:],
                "gap": data.replace(b'"data_offsets":[12,20]', b'"data_offsets":[16,20]'),
                "huge header": b"\xff" * 8 + data[8:],
            }[damage]
        )
    with pytest.raises(Refusal, match=r"weights\.safetensors"):
        read_tensors(path)
