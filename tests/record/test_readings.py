"""Packing, comparing and ordering of readings."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.errors import Refusal
from nstrain.record.readings import (
    KEY_NAMES,
    comparable,
    in_printing_order,
    names_of,
    pack,
    refuse_unrecordable,
    unpack,
)

ints = st.integers(-(2**53), 2**53)
floats = st.floats(width=64)
names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12).filter(
    lambda name: name not in KEY_NAMES
)
readings = st.dictionaries(names, st.one_of(ints, floats), max_size=12)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(readings)
def test_readings_come_back_with_their_kind_and_bits(values: dict[str, float]) -> None:
    refuse_unrecordable(values, "row")
    key_set, blob = pack(values)
    back = unpack(key_set, blob)
    assert list(back) == sorted(values) == names_of(key_set)
    for name, value in values.items():
        assert type(back[name]) is type(value)
        assert bits(back[name]) == bits(value)


@given(readings, st.randoms())
def test_order_of_names_does_not_matter(values: dict[str, float], random: object) -> None:
    items = list(values.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert pack(dict(items)) == pack(values)
    assert comparable(dict(items)) == comparable(values)


@given(readings, readings)
def test_equal_means_same_names_kinds_and_bits(a: dict[str, float], b: dict[str, float]) -> None:
    def plain(values: dict[str, float]) -> set[tuple[str, type, bytes | None]]:
        return {
            (name, type(value), None if math.isnan(value) else bits(value))
            for name, value in values.items()
            if not name.startswith(("time/", "perf/"))
        }

    assert (comparable(a) == comparable(b)) == (plain(a) == plain(b))


def test_what_differs_and_what_does_not() -> None:
    payload = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    assert bits(payload) != bits(math.nan)
    same = [
        ({"a": math.nan}, {"a": payload}),
        ({"a": math.nan}, {"a": -math.nan}),
        ({"a": 1.0, "time/wall": 1.0}, {"a": 1.0, "time/wall": 2.0, "perf/tokens_per_s": 3.0}),
        ({"a": np.float64(0.5), "n": np.int64(3)}, {"a": 0.5, "n": 3}),
    ]
    for a, b in same:
        assert comparable(a) == comparable(b)
    different = [
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1.0}, {"a": math.nextafter(1.0, 2.0)}),
        ({"a": math.inf}, {"a": math.nan}),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
        ({"times/a": 1.0}, {"times/a": 2.0}),
    ]
    for a, b in different:
        assert comparable(a) != comparable(b)


@pytest.mark.parametrize(
    "values",
    [{"a": "1"}, {"a": None}, {"a": True}, {"a": 1j}, {"a": [1.0]}, {"a": 2**53 + 1}, {"a": np.int64(-(2**53) - 1)},
     {"": 1.0}, {"update": 1}, {"generation": 1}, {"a\n": 1.0}, {"a\0b": 1.0}, {3: 1.0}],
)  # fmt: skip
def test_what_is_no_reading_is_refused(values: dict) -> None:
    with pytest.raises(Refusal, match="update 7"):
        refuse_unrecordable(values, "update 7")


def test_printing_order() -> None:
    given_names = ["val_256/mix", "smaller", "a", "generation", "update", "tokens", "cycle", "train/loss"]
    expected = ["update", "tokens", "generation", "cycle", "smaller", "a", "train/loss", "val_256/mix"]
    assert in_printing_order(given_names) == expected
