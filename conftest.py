"""For all tests: threads that wait sleep.

Test processes share few cores, and a thread that spins takes them from the one it waits for: with two trainers of two
threads on two cores an update of tiny-32k took 3.6 s, and 0.54 s so (alone on them 0.26 s, and 0.32 s so). The trainers
that tests start inherit it. It must come before torch is imported.

It stands here and not in tests/: pytest puts a conftest's directory on the import path, where tests/neuronspark would
be found as `neuronspark`.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

# A shell that starts a job with & has it ignore Ctrl-C, and so do all that it starts: tests that interrupt would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that want the card alone come first, before a test in this process has used it."""
    items.sort(key=lambda item: "card_alone" not in item.keywords)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test that wants the card alone and used it in pytest's own process.

    The lines of the tests after it would wait, rightly, for that process to leave.
    """
    if item.get_closest_marker("card_alone") and "torch" in sys.modules:
        assert not sys.modules["torch"].cuda.is_initialized(), "pytest's own process has used the card: start another"


def pytest_configure() -> None:
    """Start torch's threads as ones that flush denormal numbers, which tests/train needs of them; threads inherit it.

    A worker that had computed in other tests first could not take over tests of tests/train. The main thread itself
    does not flush: other tests have denormal numbers.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)
    torch.ones(1 << 21).mul_(2)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
