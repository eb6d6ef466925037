"""Checkpoints of a continuation that a rollback gave up, put among the line's own from a copy of before.

A rollback takes the later checkpoints out and the journal's next rows are another generation's. A copy of the
checkpoints (or of the journal) that is older than the rollback brings back what was given up: weights that were trained
one way beside a record that says another. Neither is damaged, so only the generations tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.errors import Refusal
from nstrain.line.checkpoint import read_state
from nstrain.line.paths import LinePaths


def refuse_abandoned(paths: LinePaths, state: Mapping[str, Any], generation_at: Callable[[int], int]) -> None:
    """Refuse a checkpoint, by its state.json, that is of another generation than the journal has its update in.

    `generation_at(update)` is the journal's. Raises `Refusal` with the newest checkpoint that fits.
    """
    update = state["update"]
    if _fits(state, generation_at):
        return
    own = [older for older in paths.checkpoint_updates() if older < update and _is_own(paths, older, generation_at)]
    remedy = ""
    if own:
        remedy = f", or go on from the newest that fits: `{typed('nstrain', 'rollback', paths.root, '--to', own[-1])}`"
    raise Refusal(
        f"{paths.checkpoint(update)}: is of generation {state['generation']}, {paths.journal} has update {update} "
        f"in generation {generation_at(update)}: a rollback lies between them, and one of the two is a copy from its "
        f"other side. Put back a copy that holds both{remedy}"
    )


def _is_own(paths: LinePaths, update: int, generation_at: Callable[[int], int]) -> bool:
    try:
        return _fits(read_state(paths.checkpoint(update)), generation_at)
    except Refusal:  # damaged
        return False


def _fits(state: Mapping[str, Any], generation_at: Callable[[int], int]) -> bool:
    """A line's first checkpoint, and a branch's, is of no update that it has trained: every generation has it."""
    first = state["update"] == 0 or "forked_from" in state
    return first or bool(state["generation"] == generation_at(state["update"]))
