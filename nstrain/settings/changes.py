"""What may change in run.json between two launches of a line, compared with the run.json of its newest checkpoint.

A field of FIXED_FIELDS keeps its value for life (but for FREE_PARTS), and so does the held-out text that the line's
readings are of, by the hash of its index. A data line may move: it is known again by that hash. There are two
exceptions:
- lists of pieces (batch ramp, row lengths, learning rate) may grow at their end, where the line has not been yet;
- `allow_changes` names the field (`held_out` for the text). An entry allows one change. When the line goes on with it,
  the change is recorded with its position in every later checkpoint (state.json, `changes`), and the entry is spent: it
  may stay in run.json, but allows nothing more. Another change of the field takes another entry: the name once more, or
  a spent one removed for at least one launch. Everything is in the checkpoint, so a line that goes back to an earlier
  one has neither the change nor the spent entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nstrain.base.errors import Refusal
from nstrain.settings.model import dump
from nstrain.settings.run import (
    FIXED_FIELDS,
    FREE_PARTS,
    HELD_OUT,
    BatchPiece,
    RatePiece,
    RowPiece,
    RunSettings,
)


@dataclasses.dataclass(frozen=True)
class AppliedChange:
    """A fixed field that was changed on purpose."""

    field: str
    """One of FIXED_FIELDS, or HELD_OUT."""
    update: int
    """The last update that was trained with the value before."""
    tokens: int
    """The position after it."""
    before: Any
    """The field's JSON value up to there, without parts that are free; of HELD_OUT the hash of its index."""
    after: Any
    """Its JSON value from there on."""

    def describe(self) -> str:
        """The innermost place that differs, with both values."""
        return first_difference(self.field, self.before, self.after)


@dataclasses.dataclass(frozen=True)
class Changes:
    """The changes a line has been through, as its checkpoints carry them."""

    applied: tuple[AppliedChange, ...] = ()
    """In the order in which they were made."""
    spent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many of the entries that stand in `allow_changes` for a field have allowed their change already."""

    def to_json(self) -> dict[str, Any]:
        """As state.json has it under `changes`."""
        return {"applied": [dataclasses.asdict(change) for change in self.applied], "spent": dict(self.spent)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Changes:
        """From a state.json."""
        value = state["changes"]
        return cls(tuple(AppliedChange(**change) for change in value["applied"]), dict(value["spent"]))


def settle_changes(state: Mapping[str, Any], new: RunSettings, where: str, held_out: str | None = None) -> Changes:
    """The changes of a line that goes on from a checkpoint (its state.json) with the run.json `new`.

    `held_out` is the hash of the held-out index that its readings will be of (a checkpoint that was written before this
    was recorded has none, and any is taken). None: it cannot be read, and neither is it known then whether another
    place of the data line has the same one; that is for whoever reads the data line to refuse.

    Raises `Refusal` naming everything that differs without being allowed to, both values and the ways to mend it, and
    every new piece that begins where the line has been already.
    """
    old, now = fixed_values(state["settings"]), fixed_values(dump(new))
    if held_out is not None and state.get(HELD_OUT) is not None:
        old[HELD_OUT], now[HELD_OUT] = state[HELD_OUT], held_out
        if held_out == state[HELD_OUT]:  # the index names its data line: it is the same one, wherever it lies now
            now["data"] = old["data"]
    elif held_out is None and state.get(HELD_OUT) is not None:
        now["data"] = old["data"]
    before = Changes.from_state(state)
    listed = {name: new.allow_changes.count(name) for name in new.allow_changes}
    spent = {name: min(before.spent.get(name, 0), count) for name, count in listed.items()}
    applied, refused = [], []
    for name, value in now.items():
        if value == old.get(name):
            continue
        grown = _grown(old.get(name), value)
        late = _late_piece(name, old.get(name), new, state) if grown else None
        if grown and late is None:
            continue
        if listed.get(name, 0) > spent.get(name, 0):
            applied.append(AppliedChange(name, state["update"], state["tokens"], old.get(name), value))
            spent[name] += 1
        else:
            problem = late or first_difference(name, old.get(name), value)
            refused.append(problem + _spent_note(name, before, spent))
    if refused:
        raise Refusal(
            f"{where}: what a line keeps for life differs from its newest checkpoint: "
            + "; ".join(refused)
            + ". Put the old value back, or list the field's name in allow_changes if the change is meant."
            + (_HELD_OUT_NOTE if now.get(HELD_OUT) != old.get(HELD_OUT) else "")
        )
    return Changes((*before.applied, *applied), {name: count for name, count in spent.items() if count})


_HELD_OUT_NOTE = (
    f" {HELD_OUT} is the sha256 of the data line's val/index.json: its held-out text was gathered anew and is another. "
    "The text of before is gathered again by `nstrain data val` with the --tokens-per-source of then, after val/ was "
    "removed."
)


def fixed_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of the fields of FIXED_FIELDS that a run.json has, without their FREE_PARTS."""
    values = {name: settings[name] for name in FIXED_FIELDS if name in settings}
    for name, free in FREE_PARTS.items():
        if isinstance(values.get(name), dict):
            values[name] = {part: value for part, value in values[name].items() if part not in free}
    return values


def other_rows(old: Mapping[str, Any], new: Mapping[str, Any], made: Sequence[AppliedChange] = ()) -> bool:
    """Whether two run.json of a line may differ in what rows they give: in a field that it keeps for life, in how rows
    go through the device (which decides the order of sums), or in when is validated; or, by the changes that were
    `made` between them, in the held-out text. Where its data line lies, and where its record goes, decide nothing."""
    decisive = {*FIXED_FIELDS, "lengths", HELD_OUT} - {"data", "tracker"}
    return any(change.field in decisive for change in made) or any(old.get(name) != new.get(name) for name in decisive)


def _spent_note(name: str, changes: Changes, spent: Mapping[str, int]) -> str:
    if not spent.get(name):
        return ""
    last = next(change for change in reversed(changes.applied) if change.field == name)
    return (
        f" (its entry in allow_changes was used at update {last.update} and allows no second change; list {name!r} "
        "once more to change it again)"
    )


def _grown(old: Any, new: Any) -> bool:
    """Whether a list of pieces kept all it had: its last piece may have been given an end that was open before.

    One number of tokens an update is a ramp of one piece, whichever way it is written.
    """
    old, new = ([{"from": 0, "to": None, "tokens": found}] if isinstance(found, int) else found for found in (old, new))
    if not (isinstance(old, list) and isinstance(new, list) and 0 < len(old) <= len(new)):
        return False
    last = dict(new[len(old) - 1])
    if old[-1].get("to", 0) is None and len(new) > len(old):
        last["to"] = None
    return [*new[: len(old) - 1], last] == old


def _late_piece(name: str, old: Any, new: RunSettings, state: Mapping[str, Any]) -> str | None:
    """What is wrong with the first piece that a list has gained: that it begins where the line has been already."""
    known = len(old) if isinstance(old, list) else 1
    lists: dict[str, Sequence[RowPiece | BatchPiece | RatePiece]] = {
        "rows": new.rows,
        "tokens_per_update": new.batch_pieces,
        "learning_rate": new.learning_rate,
    }
    pieces = lists[name]
    if len(pieces) == known:
        return None
    piece = pieces[known]
    if isinstance(piece, RowPiece):
        cycle, position = piece.from_cycle, state["position"]
        if cycle > position["cycle"] or (cycle == position["cycle"] and position["row"] == 0):
            return None
        return f"rows has a new piece from cycle {cycle}, but the line stands in cycle {position['cycle']}"
    begins = piece.from_tokens
    if begins >= state["tokens"]:
        return None
    return f"{name} has a new piece from {begins:,} tokens, but the line stands at {state['tokens']:,}"


def first_difference(place: str, old: Any, new: Any) -> str:
    """The innermost place at which two JSON values differ, with what stands there in both."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return first_difference(f"{place}.{key}", old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            if a != b:
                return first_difference(f"{place}.{index}", a, b)
    return f"{place} was {old!r} and is now {new!r}"
