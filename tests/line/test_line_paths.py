"""Names of a line's files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nstrain.line.paths import LinePaths, checkpoint_name, parse_checkpoint_name


@given(st.integers(0, 10**10))
def test_a_name_gives_its_update_back(update: int) -> None:
    assert parse_checkpoint_name(checkpoint_name(update)) == update


def test_names_have_eight_digits() -> None:
    assert checkpoint_name(1200) == "u00001200"
    assert checkpoint_name(123456789) == "u123456789"


@pytest.mark.parametrize(
    "name",
    ["u40", "u00000040.partial", "u00000040.replaced", "00000040", "u0000004x", "u000000040", "latest", "", "u-0000040",
     "U00000040", "u00000040\n", "u0000004٠"],
)  # fmt: skip
def test_what_is_not_exactly_a_name_is_none(name: str) -> None:
    assert parse_checkpoint_name(name) is None


def test_checkpoints_are_listed_by_number_and_other_things_are_not(paths: LinePaths) -> None:
    assert paths.checkpoint_updates() == []
    for name in ("u100000000", "u00000009", "u99999999", "u00000100", "u00000010.partial", "notes"):
        (paths.checkpoints / name).mkdir(parents=True)
    (paths.checkpoints / "u00000011").write_text("a file is no checkpoint")
    assert paths.checkpoint_updates() == [9, 100, 99999999, 100000000]
