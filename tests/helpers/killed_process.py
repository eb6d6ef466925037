"""Something done in a forked process that is killed at a kill point."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from nstrain.base import killpoints


def killed_at(where: str, work: Callable[[], object]) -> bool:
    """Do something in a process that is killed at a step, given as area:n; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        try:
            killpoints.arm(where)
            work()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
