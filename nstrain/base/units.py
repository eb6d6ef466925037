"""Units that must never be mixed, and how people write and read them.

A count carries its unit in its name (`cycle_tokens`, `every_updates`, `timeout_s`); tokens that were read from an
option or planned by a schedule carry it in their type as well.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import NewType

from nstrain.base.errors import Refusal

Tokens = NewType("Tokens", int)


def parse_tokens(text: str | int | float, name: str = "a token count") -> Tokens:
    """A whole, positive number of tokens from `20000000000`, `2e10` or `2_000`.

    Raises `Refusal` for anything that is not exactly a positive whole number, e.g. `1.5` or `1e-3`.
    """
    try:
        value = Decimal(str(text).replace("_", ""))
    except InvalidOperation:
        raise Refusal(f"{name}: expected a whole number of tokens such as 2e10 or 500000, found {text!r}") from None
    if not value.is_finite() or value != value.to_integral_value() or value <= 0:
        raise Refusal(f"{name}: expected a positive whole number of tokens, found {text!r}")
    return Tokens(int(value))


def human_count(n: float) -> str:
    """`1234567` as `1.23M`; exact below 10,000."""
    if abs(n) < 10_000:
        return f"{n:,.0f}"
    for limit, divisor, suffix in (
        (1e6, 1e3, "K"),
        (1e9, 1e6, "M"),
        (1e12, 1e9, "B"),
        (float("inf"), 1e12, "T"),
    ):
        if abs(n) < limit * 0.9995:
            return f"{n / divisor:.3g}{suffix}"
    raise AssertionError("unreachable: the last limit is infinite")


def human_bytes(n: float) -> str:
    """Bytes in powers of 1024: `1536` as `1.5 KiB`."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {suffix}" if suffix == "B" else f"{n:.1f} {suffix}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """A duration: `42s`, `3m07s`, `5h12m`, `4d06h`."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"
