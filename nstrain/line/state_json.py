"""The fields of a checkpoint's state.json; docs/reference/checkpoint.md says what each means."""

from __future__ import annotations

from typing import Any

FORMAT = 1
"""Version of the checkpoint format that this code writes and reads."""

REASONS = ("start", "rolling", "cycle_end", "length_change", "end", "stop")
"""Why a checkpoint was written."""

REQUIRED_STATE = {
    "format": int,
    "update": int,
    "tokens": int,
    "generation": int,
    "position": dict,
    "optimizer": dict,
    "reason": str,
    "kept": bool,
    "settings": dict,
    "changes": dict,
    "versions": dict,
    "threads": int,
    "id": str,
}
"""The fields that every state.json has, and their types."""


def state_problem(state: Any) -> str | None:
    """What is wrong with the content of a state.json, if anything."""
    if not isinstance(state, dict):
        return f"expected an object, found {type(state).__name__}"
    if state.get("format") != FORMAT:
        return f"expected checkpoint format {FORMAT}, found {state.get('format')!r}"
    for name, kind in REQUIRED_STATE.items():
        if name not in state:
            return f"field {name!r} is missing"
        if not isinstance(state[name], kind) or (kind is int and isinstance(state[name], bool)):
            return f"field {name!r}: expected {kind.__name__}, found {state[name]!r}"
    if state["reason"] not in REASONS:
        return f"field 'reason': expected one of {', '.join(REASONS)}, found {state['reason']!r}"
    return None


def refuse_wrong_state(state: dict[str, Any]) -> None:
    """Raise `ValueError` for what is not the content of a state.json."""
    if problem := state_problem(state):
        raise ValueError(f"state of a checkpoint: {problem}")
