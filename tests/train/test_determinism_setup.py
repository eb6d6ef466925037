"""What a trainer process sets up before its first computation."""

from __future__ import annotations

import subprocess
import sys

import pytest
from real_line import ROOT


def in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_thread_flushes_denormals_and_the_thread_count_is_the_one_named() -> None:
    out = in_a_process(
        "import torch\n"
        "from nstrain.train.determinism import enter_deterministic_mode\n"
        "enter_deterministic_mode(2)\n"
        "denormal = torch.full((4_000_000,), 1 << 22, dtype=torch.int32).view(torch.float32)\n"
        "kept = (denormal * 0.5).view(torch.int32).count_nonzero().item()\n"
        "print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), kept)"
    )
    assert out in ("2 True 0", "2 True 4000000"), "all threads alike"


def test_threads_that_disagree_are_noticed() -> None:
    """Computing before the set-up starts threads that keep denormals; where the CPU can flush them, that is refused."""
    out = in_a_process(
        "import torch\n"
        "from nstrain.train.determinism import enter_deterministic_mode\n"
        "from nstrain.base.errors import NstrainError\n"
        "torch.set_num_threads(2)\n"
        "torch.ones(4_000_000) * 2\n"
        "can_flush = torch.set_flush_denormal(True); torch.set_flush_denormal(False)\n"
        "try:\n"
        "    enter_deterministic_mode(2)\n"
        "    print('accepted' if can_flush else 'disagree')\n"
        "except NstrainError as error:\n"
        "    print('disagree' if 'disagree' in str(error) else error)"
    )
    assert out == "disagree"


def test_an_operator_without_a_fixed_order_is_refused() -> None:
    import torch

    table = torch.zeros(4, requires_grad=True)
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.nn.functional.max_unpool1d(table[None, None], torch.zeros(1, 1, 4, dtype=torch.int64), 1)
