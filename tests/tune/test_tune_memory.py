"""The memory estimate: exact once two trials are in, and no shape that fits is ruled out before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nstrain.tune.memory import MARGIN_SHARE, MemoryModel, fits, persistent_bytes

MODE = "none"


def test_persistent_bytes_by_dtype() -> None:
    assert persistent_bytes(10, "cpu", ema=False) == 160
    assert persistent_bytes(10, "cpu", ema=True) == 200
    assert persistent_bytes(10, "cuda", ema=False) == 180


def test_nothing_is_known_before_the_first_trial() -> None:
    model = MemoryModel()
    assert model.estimate(MODE, 64, 1) is None
    assert model.rules_out(MODE, 64, 1 << 40) is None
    model.saw("all", 64, 1, 100, 1000)
    assert model.estimate(MODE, 64, 1) is None, "another mode tells nothing"


@settings(deadline=None)
@given(
    fixed=st.integers(0, 10**9),
    per_row=st.integers(1, 10**9),
    rows=st.lists(st.integers(1, 100), min_size=3, max_size=3, unique=True),
)
def test_two_trials_give_the_line(fixed: int, per_row: int, rows: list[int]) -> None:
    model = MemoryModel()
    for r in sorted(rows)[:2]:
        model.saw(MODE, 64, r, fixed + r * per_row, 10**12)
    asked = max(rows)
    truth = fixed + asked * per_row
    assert abs(model.estimate(MODE, 64, asked) - truth) <= 1e-9 * truth + 1  # type: ignore[operator]


@settings(deadline=None)
@given(
    share=st.floats(0, 0.5, allow_subnormal=False),
    rows=st.integers(1, 8), larger=st.integers(2, 64), first=st.integers(10**3, 10**9),
    room=st.integers(10**3, 10**11), other_length=st.booleans(),
)  # fmt: skip
def test_one_trial_rules_out_nothing_that_fits(
    share: float, rows: int, larger: int, first: int, room: int, other_length: bool
) -> None:
    """As long as no more than half of the first trial's memory is fixed."""
    model = MemoryModel()
    model.saw(MODE, 64, rows, first, room)
    asked = rows * larger
    truth = share * first + (1 - share) * first * larger
    length, asked = (32, 2 * asked) if other_length else (64, asked)
    if model.rules_out(MODE, length, asked) is not None:
        assert truth + MARGIN_SHARE * room > room * (1 - 1e-9) - 2


def test_each_trial_corrects_the_estimate() -> None:
    model = MemoryModel()
    model.saw(MODE, 64, 1, 100, 10_000)
    assert model.estimate(MODE, 64, 2) == 150
    model.saw(MODE, 64, 2, 180, 10_000)
    assert model.estimate(MODE, 64, 4) == 340
    model.saw(MODE, 64, 4, 300, 10_000)
    assert model.estimate(MODE, 64, 8) == 540


def test_the_room_is_the_largest_that_was_seen() -> None:
    model = MemoryModel()
    model.saw(MODE, 64, 1, 100, 500)
    model.saw(MODE, 64, 2, 200, 300)
    assert model.rules_out(MODE, 64, 4) is None
    assert model.rules_out(MODE, 64, 5) == 500
    assert fits(98, 100)
    assert not fits(99, 100)
