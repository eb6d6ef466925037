"""A test's body in a process of its own: pytest's, once it has used a card, stays on it, and others see it there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def in_its_own_process(body: Callable[..., None], *arguments: Any, within_s: float = 300.0) -> None:
    """Run a function of a test module there and fail if it does; what it said is in pytest's captured output."""
    process = multiprocessing.get_context("spawn").Process(target=body, args=arguments)
    process.start()
    process.join(within_s)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"{body.__name__} ended with {process.exitcode}"
