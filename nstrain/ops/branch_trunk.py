"""A branch's trunk as it was at the fork, by the checkpoint there.

The trunk's run.json may have been changed since, on purpose. What it was trained with up to the fork is in the
checkpoint's state.json, and the branch goes on with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nstrain.settings.changes import first_difference, fixed_values
from nstrain.settings.model import dump, validate
from nstrain.settings.run import RunSettings

OWN_FIELDS = ("format", "id", "metrics", "data", "tracker", "branch")
"""Fixed fields that a branch does not have of its trunk, or whose values are the same in every line; and the tracker,
by which nothing was trained: a branch is shown where its trunk is shown now."""


def settings_at_fork(state: Mapping[str, Any], now: RunSettings, where: str) -> RunSettings:
    """The trunk's run.json at the fork: what a line keeps for life from the checkpoint's `state`, the rest as of `now`.

    Lengths that are not in use any more keep their shapes of then. Raises `Refusal` naming `where` for settings that
    this nstrain does not take.
    """
    then, fields = state["settings"], dump(now)
    for name, value in fixed_values(then).items():
        if name not in OWN_FIELDS:
            fields[name] = {**fields[name], **value} if name == "validation" else value
    fields["lengths"] = {**then["lengths"], **fields["lengths"]}
    return validate(RunSettings, {**fields, "allow_changes": []}, f"{where}: the settings at the fork")


def changed_since_fork(then: RunSettings, now: RunSettings, fork_tokens: int) -> tuple[str, ...]:
    """What a trunk's run.json of now says otherwise of the way up to the fork, or of what goes on after it."""
    old, new = (_carried_over(settings, fork_tokens) for settings in (then, now))
    return tuple(first_difference(name, old[name], new[name]) for name in old if old[name] != new[name])


def _carried_over(settings: RunSettings, fork_tokens: int) -> dict[str, Any]:
    """The fixed values that a branch takes over; rates only up to the fork, and no rows: it has its own after it."""
    values = fixed_values(dump(settings))
    for name in (*OWN_FIELDS, "rows"):
        values.pop(name)
    values["tokens_per_update"] = [piece.model_dump(mode="json", by_alias=True) for piece in settings.batch_pieces]
    values["learning_rate"] = [piece for piece in values["learning_rate"] if piece["from"] < fork_tokens]
    return values
