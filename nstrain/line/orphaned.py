"""The notice that a line's supervisor is gone: it can no longer give it, so a child that it leaves behind does.

Both children see their supervisor's death (the pipe that it alone holds open closes). The trainer tells, once it has
saved; where none lives - in a back-off, in a wait for the GPU - the preparer does. A supervisor that recorded an
outcome ended in its own way and has told of it: then nobody does, also not a child that it had to leave behind.
"""

from __future__ import annotations

from nstrain.base.disk import FileLock
from nstrain.base.errors import NstrainError
from nstrain.base.process import alive, identify
from nstrain.line.notices import Notifier, notice
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import SupervisorState, read_heartbeat, read_supervisor
from nstrain.settings.host import load_host
from nstrain.settings.run import load_run


def tell_of_the_supervisors_death(paths: LinePaths, what: str) -> None:
    """Give the notice, unless the supervisor had ended; `what` becomes of the line, in words. Never raises."""

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        state = _state(paths)
        if state is not None and state.outcome is not None:
            return
        beat = read_heartbeat(paths)
        notifier = Notifier(load_host().notify, say)
        text = f"the supervisor of {paths.root} is gone without a word; {what}. `nstrain run` goes on"
        known = {} if beat is None else {"update": beat.update, "tokens": beat.tokens, "checkpoint": beat.checkpoint}
        notifier.send(notice("supervisor_failed", load_run(paths.run_json).id, paths.root, text, **known))
        notifier.finish()
    except (NstrainError, OSError) as error:
        say(f"nobody could be told that the supervisor is gone: {error}")


def trainer_lives(paths: LinePaths) -> bool:
    """Whether a trainer of the line runs: one that has its lock, or that the supervisor started last."""
    if FileLock(paths.trainer_lock).held_elsewhere():
        return True
    state = _state(paths)
    identity = None if state is None or state.trainer_pid is None else identify(state.trainer_pid)
    return identity is not None and alive(identity)


def _state(paths: LinePaths) -> SupervisorState | None:
    """supervisor.json; None if it tells nothing."""
    try:
        return read_supervisor(paths)
    except (NstrainError, OSError):
        return None
