"""What may change in a line's life: fixed fields, lists that grow, and changes that are meant."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from run_json import BASE, RAMP, RATES, changed, settings

from nstrain.base.errors import Refusal
from nstrain.settings.changes import AppliedChange, Changes, other_rows, settle_changes
from nstrain.settings.model import dump
from nstrain.settings.run import FIXED_FIELDS, NEVER_CHANGED

NONE = Changes()


def trained(
    value: dict[str, Any] | None = None, changes: Changes = NONE, tokens: int = 9000, cycle: int = 3, row: int = 0
) -> dict[str, Any]:
    """The state.json of a line's newest checkpoint."""
    position = {"cycle": cycle, "row": row}
    state = {"update": 12, "tokens": tokens, "position": position, "settings": dump(settings(value))}
    return dict(json.loads(json.dumps({**state, "changes": changes.to_json()})))


def now(value: dict[str, Any], *allowed: str) -> Callable[[], None]:
    new = settings({**value, "allow_changes": list(allowed)})
    return lambda: settle_changes(trained(), new, "/line/run.json")


FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": (changed("seed", to=2), "seed was 1 and is now 2"),
    "data": (changed("data", "work", to="/other"), "data.work was '/work' and is now '/other'"),
    "model": (changed("model", "config", "layers", to=3), "model.config.layers was 2 and is now 3"),
    "threads": (changed("threads", to=2), "threads was 1 and is now 2"),
    "device": (changed("device", to="cuda"), "device was 'cpu' and is now 'cuda'"),
    "tokens_per_update": (changed("tokens_per_update", to=2048), "tokens_per_update was 1024 and is now 2048"),
    "rows": (changed("rows", 0, "row_tokens", to=512), "rows.0.row_tokens was 256 and is now 512"),
    "learning_rate": (
        changed("learning_rate", 0, "start", to=0.002),
        "learning_rate.0.start was 0.001 and is now 0.002",
    ),
    "ema": (changed("ema", to={"horizon_tokens": 9, "from_tokens": 0}), "ema was None and is now {'horizon_tokens': 9"),
    "optimizer": (changed("optimizer", "beta2", to=0.9), "optimizer.beta2 was 0.95 and is now 0.9"),
    "validation": (changed("validation", "rows_per_source", to=5), "validation.rows_per_source was 2 and is now 5"),
    "tracker": (changed("tracker", to={"service": "wandb", "project": "p"}), "tracker was None and is now {'service'"),
}


@pytest.mark.parametrize("field", FIXED)
def test_a_fixed_field_is_refused_unless_its_change_is_meant(field: str) -> None:
    value, message = FIXED[field]
    with pytest.raises(Refusal) as caught:
        now(value)()
    assert str(caught.value).startswith("/line/run.json: ")
    assert message in str(caught.value)
    assert "list the field's name in allow_changes" in str(caught.value)
    now(value, field)()
    with pytest.raises(Refusal):
        now(value, next(name for name in FIXED if name != field))()


def test_every_fixed_field_is_tested_or_can_never_change() -> None:
    assert set(FIXED_FIELDS) == set(FIXED) | NEVER_CHANGED
    assert {"format", "id", "metrics", "branch"} == NEVER_CHANGED
    for never in NEVER_CHANGED:
        with pytest.raises(Refusal, match=f"{never} can never change"):
            now(BASE, never)
    with pytest.raises(Refusal, match="id was 'a1' and is now 'b2'"):
        now(changed("id", to="b2"))()


@pytest.mark.parametrize(
    ("rows", "number"), [("rows_per_source", 3), ("probe_rows_per_source", 1), ("long_rows_per_source", 0)]
)
def test_which_rows_are_read_is_fixed_and_when_is_free(rows: str, number: int) -> None:
    """Readings of other rows, or fewer kinds of them, would go on under the same names."""
    value = changed("validation", rows, to=number)
    value["validation"]["every_updates"] = 7
    with pytest.raises(Refusal, match=rf"validation.{rows} was (2|None|4) and is now {number}"):
        now(value)()
    done = settle_changes(trained(), settings({**value, "allow_changes": ["validation"]}), "run.json")
    (change,) = done.applied
    assert (change.before.keys(), change.after[rows]) == (change.after.keys(), number)
    assert "every_updates" not in change.before


def test_the_held_out_text_is_fixed_unless_its_change_is_meant() -> None:
    state = {**trained(), "held_out": "aa"}
    assert settle_changes(state, settings(), "run.json", "aa") == NONE
    assert settle_changes(trained(), settings(), "run.json", "bb") == NONE, "of before it was recorded"
    with pytest.raises(Refusal, match=r"held_out was 'aa' and is now 'bb'.*--tokens-per-source of then"):
        settle_changes(state, settings(), "run.json", "bb")
    with pytest.raises(Refusal, match=r"seed was 1 and is now 2; held_out was 'aa' and is now 'bb'"):
        settle_changes(state, settings(changed("seed", to=2)), "run.json", "bb")
    meant = settings({**BASE, "allow_changes": ["held_out"]})
    done = settle_changes(state, meant, "run.json", "bb")
    assert done == Changes((AppliedChange("held_out", 12, 9000, "aa", "bb"),), {"held_out": 1})
    later = {**trained({**BASE, "allow_changes": ["held_out"]}, done), "held_out": "bb"}
    assert settle_changes(later, meant, "run.json", "bb") == done
    with pytest.raises(Refusal, match="held_out was 'bb' and is now 'cc' .its entry in allow_changes was used"):
        settle_changes(later, meant, "run.json", "cc")


def test_all_changed_fields_are_named() -> None:
    value = {**changed("seed", to=2), "threads": 4}
    with pytest.raises(Refusal, match=r"seed was 1 and is now 2; threads was 1 and is now 4"):
        now(value)()


def test_other_fields_may_be_edited() -> None:
    value = copy.deepcopy(BASE)
    value["lengths"] |= {"256": {"micro_rows": 8, "recompute": "all"}}
    value["validation"]["every_updates"] = 99
    value["data"]["ahead_cycles"] = 3
    value |= {"print_every": 1, "checkpoints": {"keep_last": 5}, "guards": {"max_consecutive_skips": 3}}
    now(value)()


@pytest.mark.parametrize(
    ("old", "new", "grown"),
    [
        (1024, RAMP, True),
        (1024, [{**RAMP[0], "tokens": 512}, RAMP[1]], False),
        (RAMP, 1024, False),
        (RAMP, [RAMP[0], {**RAMP[1], "to": 20_480}, {"from": 20_480, "to": None, "tokens": 4096}], True),
        (
            RAMP,
            [RAMP[0], {**RAMP[1], "to": 20_480, "tokens": 1024}, {"from": 20_480, "to": None, "tokens": 4096}],
            False,
        ),
        (RAMP, [{**RAMP[0], "to": 5120}, {**RAMP[1], "from": 5120}], False),
        (RAMP, [{"from": 0, "to": None, "tokens": 1024}], False),
        (RAMP, RAMP, True),
        (1024, [{"from": 0, "to": None, "tokens": 1024}], True),
        ([{"from": 0, "to": None, "tokens": 1024}], 1024, True),
        ([{"from": 0, "to": None, "tokens": 1024}], 2048, False),
    ],
)
def test_a_ramp_only_grows_at_its_end(old: Any, new: Any, grown: bool) -> None:
    before = trained(changed("tokens_per_update", to=old), tokens=5000)
    after = settings(changed("tokens_per_update", to=new))
    if grown:
        assert settle_changes(before, after, "run.json") == Changes()
    else:
        with pytest.raises(Refusal, match=r"tokens_per_update.* was"):
            settle_changes(before, after, "run.json")


@pytest.mark.parametrize(
    ("new", "grown"),
    [
        ([(1, 256), (3, 512)], True),
        ([(1, 256), (3, 512), (5, 256)], True),
        ([(1, 512), (3, 256)], False),
        ([(1, 256)], True),
    ],
)
def test_rows_only_grow_at_their_end(new: list[tuple[int, int]], grown: bool) -> None:
    value = changed("rows", to=[{"from_cycle": cycle, "row_tokens": tokens} for cycle, tokens in new])
    if grown:
        now(value)()
    else:
        with pytest.raises(Refusal, match=r"rows.* was"):
            now(value)()
    two = changed("rows", to=[{"from_cycle": 1, "row_tokens": 256}, {"from_cycle": 3, "row_tokens": 512}])
    with pytest.raises(Refusal, match="rows was"):
        settle_changes(trained(two), settings(), "run.json")


# ---- where the line stands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cycle", "row", "begins", "refused"), [(3, 0, 3, False), (3, 1, 3, True), (3, 1, 4, False), (3, 0, 2, True)]
)
def test_rows_grow_only_where_the_line_has_not_been(cycle: int, row: int, begins: int, refused: bool) -> None:
    grown = [{"from_cycle": 1, "row_tokens": 256}, {"from_cycle": begins, "row_tokens": 512}]
    new = settings(changed("rows", to=grown))
    state = trained(cycle=cycle, row=row)
    if refused:
        with pytest.raises(Refusal, match=f"rows has a new piece from cycle {begins}, but the line stands in cycle 3"):
            settle_changes(state, new, "run.json")
    else:
        assert settle_changes(state, new, "run.json") == Changes()


@pytest.mark.parametrize(("tokens", "refused"), [(899, False), (900, False), (901, True)])
def test_a_learning_rate_grows_only_where_the_line_has_not_been(tokens: int, refused: bool) -> None:
    state = trained(changed("learning_rate", to=RATES[:2]), tokens=tokens)
    new = settings(changed("learning_rate", to=RATES))
    if refused:
        with pytest.raises(Refusal, match="learning_rate has a new piece from 900 tokens, but the line stands at 901"):
            settle_changes(state, new, "run.json")
    else:
        assert settle_changes(state, new, "run.json") == Changes()
    with pytest.raises(Refusal, match="learning_rate was"):
        settle_changes(
            trained(changed("learning_rate", to=RATES)), settings(changed("learning_rate", to=RATES[:2])), "x"
        )
    moved = settings(changed("learning_rate", to=[RATES[0], {**RATES[1], "from": 200}]))
    with pytest.raises(Refusal, match=r"learning_rate.1.from was 100 and is now 200"):
        settle_changes(trained(changed("learning_rate", to=RATES[:2])), moved, "run.json")


# ---- changes that are meant -----------------------------------------------------------------------------------------


def beta2(value: float, *allowed: str) -> dict[str, Any]:
    return {**changed("optimizer", "beta2", to=value), "allow_changes": list(allowed)}


def test_an_entry_allows_one_change() -> None:
    first = settle_changes(trained(), settings(beta2(0.9, "optimizer")), "run.json")
    before, after = (dump(settings(beta2(value)))["optimizer"] for value in (0.95, 0.9))
    assert first == Changes((AppliedChange("optimizer", 12, 9000, before, after),), {"optimizer": 1})
    assert first.applied[0].describe() == "optimizer.beta2 was 0.95 and is now 0.9"

    now_at = trained(beta2(0.9, "optimizer"), first)
    assert settle_changes(now_at, settings(beta2(0.9, "optimizer")), "run.json") == first, "no further effect"
    with pytest.raises(Refusal) as caught:
        settle_changes(now_at, settings(beta2(0.8, "optimizer")), "run.json")
    assert "optimizer.beta2 was 0.9 and is now 0.8" in str(caught.value)
    assert "its entry in allow_changes was used at update 12 and allows no second change" in str(caught.value)

    second = settle_changes(now_at, settings(beta2(0.8, "optimizer", "optimizer")), "run.json")
    assert [change.after["beta2"] for change in second.applied] == [0.9, 0.8]
    assert second.spent == {"optimizer": 2}


def test_an_entry_that_changed_nothing_is_not_spent() -> None:
    waiting = settle_changes(trained(), settings(beta2(0.95, "optimizer")), "run.json")
    assert waiting == Changes()
    later = trained(beta2(0.95, "optimizer"), waiting)
    assert settle_changes(later, settings(beta2(0.9, "optimizer")), "run.json").spent == {"optimizer": 1}


def test_a_spent_entry_that_was_taken_away_counts_no_longer() -> None:
    spent = Changes((AppliedChange("optimizer", 3, 100, {}, {}),), {"optimizer": 1})
    without = settle_changes(trained(beta2(0.9), spent), settings(beta2(0.9)), "run.json")
    assert without == Changes(spent.applied, {})
    again = settle_changes(trained(beta2(0.9), without), settings(beta2(0.8, "optimizer")), "run.json")
    assert [change.update for change in again.applied] == [3, 12]


def test_a_late_piece_can_be_meant() -> None:
    state = trained(changed("learning_rate", to=RATES[:2]))
    meant = settings({**changed("learning_rate", to=RATES), "allow_changes": ["learning_rate"]})
    assert [change.field for change in settle_changes(state, meant, "run.json").applied] == ["learning_rate"]


def test_the_place_of_a_data_line_that_cannot_be_read_is_not_judged() -> None:
    """It may have been moved: what is wrong with it is told by whoever reads it."""
    moved = settings({**BASE, "data": {**BASE["data"], "work": "/elsewhere"}})
    assert settle_changes({**trained(), "held_out": "aa"}, moved, "run.json") == Changes((), {})
    with pytest.raises(Refusal, match=r"data.work was .* and is now '/elsewhere'"):
        settle_changes(trained(), moved, "run.json", "aa")


def test_which_edits_decide_rows() -> None:
    old = dump(settings())
    lengths = {name: {**length, "micro_rows": length["micro_rows"] + 1} for name, length in old["lengths"].items()}
    tracker = {"service": "wandb", "project": "p", "entity": None, "base_url": None}
    for name, value, decides in (
        ("lengths", lengths, True),
        ("validation", {**old["validation"], "every_updates": 99}, True),
        ("optimizer", {**old["optimizer"], "clip_norm": 0.5}, True),
        ("data", {**old["data"], "work": "/elsewhere"}, False),
        ("tracker", tracker, False),
        ("print_every", 99, False),
    ):
        assert other_rows(old, {**old, name: value}) == decides, name
    assert not other_rows(old, old, (AppliedChange("tracker", 12, 1, None, tracker),))
    assert other_rows(old, old, (AppliedChange("held_out", 12, 1, "aa", "bb"),))
