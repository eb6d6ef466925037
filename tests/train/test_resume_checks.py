"""state.json: what it says of the position, and what a resume refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows, run_settings

from nstrain.base.errors import Refusal
from nstrain.line.checkpoint import Checkpoint
from nstrain.settings.run import LengthSettings
from nstrain.train.checkpointing import (
    CycleOrder,
    LineState,
    changed_libraries,
    make_checkpoint,
    refuse_other_line,
    refuse_other_order,
    restore,
)
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.flat import TENSOR_KINDS
from nstrain.train.host_copy import HostCopy
from nstrain.train.plan import Position

ORDER = CycleOrder(cycle=3, row_tokens=8, manifest_sha256="ab" * 32, order_digest="cd" * 32)
INSIDE = LineState(Position(41, 3, 17), 5000, 1, ORDER)
BETWEEN = LineState(Position(50, 4, 0), 6000, 2, ORDER)
FRESH = LineState(Position(0, 1, 0), 0, 1, None)


def engine_of(seed: int = 1) -> EagerEngine:
    engine = EagerEngine(TinyModel(seed=seed), optimizer_settings())
    engine.set_length(LengthSettings(micro_rows=4))
    return engine


def checkpoint_of(engine: EagerEngine, line: LineState, reason: str = "rolling", **changes: Any) -> Checkpoint:
    return make_checkpoint(engine, run_settings(**changes), line, reason, HostCopy(engine).take().by_kind)


def state_of(line: LineState, reason: str = "rolling", **changes: Any) -> dict[str, Any]:
    return dict(checkpoint_of(engine_of(), line, reason, **changes).state)


@pytest.mark.parametrize("line", [INSIDE, BETWEEN, FRESH])
def test_the_position_survives_the_way_through_json(line: LineState) -> None:
    state = json.loads(json.dumps(state_of(line)))
    assert LineState.from_json(state) == line
    assert (state["update"], state["tokens"]) == (line.position.update, line.tokens)


def test_between_cycles_the_finished_cycle_is_kept_under_previous() -> None:
    position = state_of(BETWEEN, "cycle_end")["position"]
    assert position["previous"] == dataclasses.asdict(ORDER)
    assert (position["cycle"], position["row"], position["manifest_sha256"]) == (4, 0, None)
    assert state_of(FRESH, "start")["position"]["previous"] is None


@pytest.mark.parametrize(
    ("reason", "kept"),
    [("start", True), ("cycle_end", True), ("length_change", True), ("end", True), ("rolling", False), ("stop", False)],
)
def test_which_checkpoints_are_kept(reason: str, kept: bool) -> None:
    state = state_of(INSIDE, reason)
    assert (state["reason"], state["kept"]) == (reason, kept)


def test_restore_gives_back_every_byte_and_count() -> None:
    engine, other = engine_of(1), engine_of(2)
    for seed in range(3):
        train_update(engine, random_rows(4, seed=seed), 4, 1e-2, 0.1)
    checkpoint = checkpoint_of(engine, INSIDE)
    restore(other, checkpoint, "u41")
    assert other.counts == engine.counts
    for kind in TENSOR_KINDS:
        ours, theirs = engine.flat.export(kind), other.flat.export(kind)
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_restore_refuses_another_models_moments_before_it_changes_anything() -> None:
    checkpoint = checkpoint_of(engine_of(1), INSIDE)
    checkpoint.tensors["exp_avg_sq"].pop("gain0")  # type: ignore[attr-defined]
    other = engine_of(2)
    before = other.flat.export("weights")
    with pytest.raises(Refusal, match="exp_avg_sq of parameter 'gain0': it is missing"):
        restore(other, checkpoint, "u41")
    assert all(before[n].tobytes() == a.tobytes() for n, a in other.flat.export("weights").items())


def test_the_same_line_is_accepted() -> None:
    refuse_other_line(state_of(INSIDE), run_settings(), "u41")
    refuse_other_order(INSIDE, ORDER, "data")
    refuse_other_order(BETWEEN, dataclasses.replace(ORDER, cycle=4, order_digest="ef" * 32), "data")
    assert changed_libraries(state_of(INSIDE)) == changed_libraries(state_of(INSIDE), "cpu") == []


@pytest.mark.parametrize("field", ["manifest_sha256", "order_digest"])
def test_another_order_is_refused(field: str) -> None:
    with pytest.raises(Refusal, match=f"{field} of cycle 3 was {getattr(ORDER, field)} in the checkpoint and is now x"):
        refuse_other_order(INSIDE, dataclasses.replace(ORDER, **{field: "x"}), "data")


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("threads",), 7, "trained with 7 threads, now 2"),
        (("versions", "order_version"), 0, "order_version 0, this nstrain has"),
        (("versions", "encoding_version"), 0, "encoding_version 0, this nstrain has"),
        (("position", "row_tokens"), 16, "inside cycle 3 with rows of 16 tokens, run.json now says 8"),
        (("settings", "seed"), 5, "seed was 5 and is now 1"),
        (("settings", "optimizer", "beta2"), 0.99, "optimizer.beta2 was 0.99 and is now 0.95"),
        (("settings", "id"), "another", "id was 'another'"),
    ],
)
def test_another_line_is_refused(where: tuple[str, ...], value: Any, message: str) -> None:
    state = copy.deepcopy(state_of(INSIDE))
    place = state
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(Refusal, match=message):
        refuse_other_line(state, run_settings(), "u41")


def test_a_thread_count_may_change_where_run_json_allows_it() -> None:
    state = state_of(INSIDE)
    with pytest.raises(Refusal, match="threads"):
        refuse_other_line(state, run_settings(threads=4), "u41")
    refuse_other_line(state, run_settings(threads=4, allow_changes=["threads"]), "u41")


@pytest.mark.parametrize(("begins", "refused"), [(4999, True), (5000, False), (9000, False)])
def test_a_ramp_grows_only_where_the_line_has_not_been(begins: int, refused: bool) -> None:
    ramp = [{"from": 0, "to": begins, "tokens": 64}, {"from": begins, "to": None, "tokens": 128}]
    old, new = (
        state_of(INSIDE, tokens_per_update=[{"from": 0, "to": None, "tokens": 64}]),
        run_settings(tokens_per_update=ramp),
    )
    if refused:
        with pytest.raises(Refusal, match="new piece from 4,999 tokens, but the line stands at 5,000"):
            refuse_other_line(old, new, "u41")
    else:
        refuse_other_line(old, new, "u41")


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("torch", "2.9.0"),
        ("triton", "3.0.0"),
        ("cuda", "12.8"),
        ("cudnn", 91000),
        ("model_package", "baselines"),
        ("model_code", "0123456789abcdef"),
        ("kernel_choice", "reference"),
    ],
)
def test_a_changed_library_is_named(name: str, before: str | int) -> None:
    state = copy.deepcopy(state_of(INSIDE))
    assert state["versions"][name] != before
    state["versions"][name] = before
    assert [line.split(",")[0] for line in changed_libraries(state)] == [f"{name} was {before}"]
    refuse_other_line(state, run_settings(), "u41")


def test_another_machine_is_named_where_the_line_goes_on() -> None:
    state = copy.deepcopy(state_of(INSIDE))
    here = state["versions"]["device"]
    state["versions"]["device"] = "NVIDIA H200"
    assert changed_libraries(state, "cpu") == [f"device was NVIDIA H200, is now {here}"]
    assert changed_libraries(state) == [], "a check looks at no card"


def test_a_checkpoint_of_before_says_nothing_of_what_it_does_not_have() -> None:
    state = copy.deepcopy(state_of(INSIDE))
    old = ("nstrain", "python", "torch", "numpy", "order_version", "encoding_version")
    state["versions"] = {name: state["versions"][name] for name in old}
    refuse_other_line(state, run_settings(), "u41")
    assert changed_libraries(state, "cpu") == []
