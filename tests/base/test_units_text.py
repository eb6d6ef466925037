"""Numbers as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nstrain.base.errors import Exhausted, ExitCode, NstrainError, Refusal
from nstrain.base.units import human_bytes, human_count, human_seconds, parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2e10", 20_000_000_000), ("500000", 500_000), ("2_000", 2000), ("1.5e3", 1500), (64, 64), ("1e0", 1), (2.0, 2)],
)
def test_whole_numbers_of_tokens(text: str | int | float, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "x", "1.5", "1e-3", "0", "-5", "nan", "inf", "1e", "0x10", "1,000", True and "tru"]
)
def test_anything_else_is_refused_naming_it(text: str) -> None:
    with pytest.raises(Refusal, match=f"--cycle-tokens: expected a.* whole number of tokens.*found {text!r}"):
        parse_tokens(text, "--cycle-tokens")


@settings(derandomize=True, database=None, deadline=None)
@given(st.integers(1, 10**18))
def test_every_whole_number_is_read_exactly(n: int) -> None:
    assert parse_tokens(str(n)) == parse_tokens(f"{n:_}") == n


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10K"),
        (1_234_567, "1.23M"),
        (999_950_000, "1B"),
        (2e10, "20B"),
        (3e12, "3T"),
    ],
)
def test_counts(n: float, text: str) -> None:
    assert human_count(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes(n: int, text: str) -> None:
    assert human_bytes(n) == text


@pytest.mark.parametrize(
    ("s", "text"), [(0.4, "0s"), (42, "42s"), (59.6, "1m00s"), (187, "3m07s"), (18720, "5h12m"), (367200, "4d06h")]
)
def test_durations(s: float, text: str) -> None:
    assert human_seconds(s) == text


def test_errors_have_the_documented_exit_codes() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6]
    assert NstrainError("x").exit_code == ExitCode.FAILED
    assert Refusal("x").exit_code == Exhausted("x").exit_code == ExitCode.BAD_CONFIGURATION
