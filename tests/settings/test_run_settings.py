"""run.json: what is refused and how it is said, and what may change in a line's life."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.errors import Refusal
from nstrain.settings.model import dump, validate
from nstrain.settings.run import FIXED_FIELDS, RunSettings, load_run, refuse_changed_fields, save_run

BASE: dict[str, Any] = {
    "id": "a1",
    "data": {"work": "/work"},
    "model": {"preset": "tiny", "config": {"layers": 2}},
    "seed": 1,
    "threads": 1,
    "device": "cpu",
    "tokens_per_update": 1024,
    "rows": [{"from_cycle": 1, "row_tokens": 256}],
    "lengths": {"256": {"micro_rows": 2}, "512": {"micro_rows": 1}},
    "learning_rate": {"peak": 0.001},
    "optimizer": {"clip_norm": 1.0},
    "validation": {"every_updates": 10, "rows_per_source": 2},
    "checkpoints": {},
}
RAMP = [{"from": 0, "to": 10_240, "tokens": 1024}, {"from": 10_240, "to": None, "tokens": 2048}]


def changed(*place: Any, to: Any) -> dict[str, Any]:
    """The base with the value at a place replaced."""
    value = copy.deepcopy(BASE)
    inner = value
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = to
    return value


def settings(value: dict[str, Any] | None = None) -> RunSettings:
    return validate(RunSettings, value or BASE, "run.json")


def test_a_file_is_written_with_every_field_and_read_back(tmp_path: Path) -> None:
    value = settings(changed("tokens_per_update", to=RAMP))
    save_run(tmp_path / "run.json", value)
    assert load_run(tmp_path / "run.json") == value
    assert set(json.loads((tmp_path / "run.json").read_text())) == set(RunSettings.model_fields)
    assert json.loads((tmp_path / "run.json").read_text())["tokens_per_update"] == RAMP


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown, near": (changed("sede", to=1), "unknown field 'sede' (did you mean 'seed'?)"),
    "unknown, nested": (changed("learning_rate", "peek", to=1), "'learning_rate.peek' (did you mean 'peak'?)"),
    "unknown, in a mapping": (
        changed("lengths", "256", "micro_row", to=1), "'lengths.256.micro_row' (did you mean 'micro_rows'?)"
    ),
    "unknown, in a list": (
        changed("rows", to=[{"from_cycle": 1, "row_tokens": 256, "zzz": 1}]),
        "'rows.0.zzz' (valid fields here: from_cycle, row_tokens)",
    ),
    "unknown, in a ramp": (
        changed("tokens_per_update", to=[{"from": 0, "to": None, "tokens": 1024, "tokns": 1}]),
        "'tokens_per_update.0.tokns' (did you mean 'tokens'?)",
    ),
    "missing": ({k: v for k, v in BASE.items() if k != "seed"}, "field 'seed' is missing"),
    "a number as text": (changed("seed", to="1"), "field 'seed': input should be a valid integer, found '1'"),
    "a truth as number": (changed("seed", to=True), "field 'seed': input should be a valid integer, found True"),
    "a fraction": (changed("threads", to=1.5), "field 'threads': input should be a valid integer, found 1.5"),
    "below its bound": (changed("seed", to=-1), "field 'seed': input should be greater than or equal to 0, found -1"),
    "zero": (changed("optimizer", "clip_norm", to=0.0), "field 'optimizer.clip_norm': input should be greater than 0"),
    "no number": (changed("learning_rate", "peak", to=float("nan")), "'learning_rate.peak': input should be a finite"),
    "infinite where null may be": (
        changed("checkpoints", "every_minutes", to=float("inf")), "checkpoints.every_minutes': input should be a finite"
    ),
    "another choice": (changed("device", to="tpu"), "field 'device': input should be 'cpu' or 'cuda', found 'tpu'"),
    "format": (changed("format", to=2), "field 'format': input should be 1"),
    "no object": (changed("data", to=[]), "field 'data'"),
    "batch 0": (changed("tokens_per_update", to=0), "'tokens_per_update': input should be greater than 0, found 0"),
    "batch text": (changed("tokens_per_update", to="1e6"), "'tokens_per_update': input should be a valid integer"),
    "batch no multiple": (
        changed("tokens_per_update", to=1000), "tokens_per_update: 1,000 is not a multiple of the row length 256"
    ),
    "ramp empty": (changed("tokens_per_update", to=[]), "tokens_per_update must begin with a piece from 0"),
    "ramp late": (
        changed("tokens_per_update", to=[{"from": 5, "to": None, "tokens": 1024}]),
        "tokens_per_update must begin with a piece from 0",
    ),
    "ramp with an end": (
        changed("tokens_per_update", to=[{"from": 0, "to": 5, "tokens": 1024}]), "end with a piece to null"
    ),
    "ramp with a gap": (
        changed("tokens_per_update", to=[RAMP[0], {**RAMP[1], "from": 20_480}]),
        "found to 10240 followed by from 20480",
    ),
    "ramp open in the middle": (
        changed("tokens_per_update", to=[{**RAMP[0], "to": None}, RAMP[1]]), "found to None followed by from 10240"
    ),
    "ramp backwards": (
        changed("tokens_per_update", to=[{**RAMP[0], "to": 0}, {**RAMP[1], "from": 0}]), "found to 0 followed by from 0"
    ),
    "no rows": (changed("rows", to=[]), "rows must begin with a piece from_cycle 1"),
    "rows late": (changed("rows", to=[{"from_cycle": 2, "row_tokens": 256}]), "rows must begin with a piece"),
    "rows twice": (
        changed("rows", to=[{"from_cycle": 1, "row_tokens": 256}] * 2), "rows: from_cycle must grow from piece to piece"
    ),
    "a length without an entry": (
        changed("rows", to=[{"from_cycle": 1, "row_tokens": 1024}]), "lengths has no entry for rows of 1024 tokens"
    ),
    "decay backwards": (
        changed("learning_rate", "decay", to={"from_tokens": 9, "to_tokens": 9}),
        "learning_rate.decay: to_tokens must be greater than from_tokens (9)",
    ),
    "decay inside the warm-up": (
        changed("learning_rate", to={"peak": 1.0, "warmup_tokens": 5, "decay": {"from_tokens": 4, "to_tokens": 9}}),
        "learning_rate: decay.from_tokens lies inside the warm-up",
    ),
    "decay upwards": (
        changed("learning_rate", "decay", to={"from_tokens": 4, "to_tokens": 9, "final": 1.0}),
        "learning_rate: decay.final is above peak",
    ),
    "no checkpoints": (
        changed("checkpoints", to={"every_minutes": None}), "checkpoints: every_updates and every_minutes cannot"
    ),
    "allow what is not fixed": (changed("allow_changes", to=["print_every"]), "no fixed field is called print_every"),
    "allow what never changes": (changed("allow_changes", to=["id"]), "allow_changes: id can never change"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_by_name(what: str) -> None:
    value, message = WRONG[what]
    with pytest.raises(Refusal) as caught:
        settings(value)
    assert str(caught.value).startswith("run.json: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250  # and not the whole file


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(Refusal) as caught:
        settings({**changed("seed", to="1"), "devise": "cpu", "threads": 0})
    message = str(caught.value)
    assert "'seed'" in message
    assert "'devise' (did you mean 'device'?)" in message
    assert "'threads'" in message


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    for text in ("[1]", "3", "null", '"x"'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(Refusal, match=r"run.json: input should be an object"):
            load_run(tmp_path / "run.json")
    (tmp_path / "run.json").write_text('{"seed": 1e999}')
    with pytest.raises(Refusal, match=r"field 'seed'.*found inf"):
        load_run(tmp_path / "run.json")
    with pytest.raises(Refusal, match="no such file"):
        load_run(tmp_path / "none.json")


def test_settings_never_change_once_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().seed = 2  # type: ignore[misc]


def test_batch_and_row_length_are_functions_of_the_position() -> None:
    value = changed("tokens_per_update", to=RAMP)
    value["rows"] = [{"from_cycle": 1, "row_tokens": 256}, {"from_cycle": 3, "row_tokens": 512}]
    ramp = settings(value)
    assert [ramp.batch_tokens_at(p) for p in (0, 10_239, 10_240, 10**12)] == [1024, 1024, 2048, 2048]
    assert [ramp.row_tokens_at(k) for k in (1, 2, 3, 99)] == [256, 256, 512, 512]
    assert settings().batch_tokens_at(10**9) == 1024


# ------------------------------------------------------------------ fields that a line keeps


def now(value: dict[str, Any], *allowed: str) -> Callable[[], None]:
    new = settings({**value, "allow_changes": list(allowed)})
    return lambda: refuse_changed_fields(dump(settings()), new, "/line/run.json")


FIXED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": (changed("seed", to=2), "seed was 1 and is now 2"),
    "data": (changed("data", "work", to="/other"), "data.work was '/work' and is now '/other'"),
    "model": (changed("model", "config", "layers", to=3), "model.config.layers was 2 and is now 3"),
    "threads": (changed("threads", to=2), "threads was 1 and is now 2"),
    "device": (changed("device", to="cuda"), "device was 'cpu' and is now 'cuda'"),
    "tokens_per_update": (changed("tokens_per_update", to=2048), "tokens_per_update was 1024 and is now 2048"),
    "rows": (changed("rows", 0, "row_tokens", to=512), "rows was"),
    "learning_rate": (changed("learning_rate", "peak", to=0.002), "learning_rate.peak was 0.001 and is now 0.002"),
    "optimizer": (changed("optimizer", "beta2", to=0.9), "optimizer.beta2 was 0.95 and is now 0.9"),
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
    assert set(FIXED_FIELDS) == set(FIXED) | {"format", "id", "metrics"}
    for never in ("format", "id", "metrics"):
        with pytest.raises(Refusal, match=f"{never} can never change"):
            now(BASE, never)
    with pytest.raises(Refusal, match="id was 'a1' and is now 'b2'"):
        now(changed("id", to="b2"))()


def test_all_changed_fields_are_named() -> None:
    value = {**changed("seed", to=2), "threads": 4}
    with pytest.raises(Refusal, match=r"seed was 1 and is now 2; threads was 1 and is now 4"):
        now(value)()


def test_other_fields_may_be_edited() -> None:
    value = copy.deepcopy(BASE)
    value["lengths"] |= {"256": {"micro_rows": 8, "recompute": "all"}}
    value["validation"] = {"every_updates": 99, "rows_per_source": 5}
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
    ],
)
def test_a_ramp_only_grows_at_its_end(old: Any, new: Any, grown: bool) -> None:
    before = dump(settings(changed("tokens_per_update", to=old)))
    after = settings(changed("tokens_per_update", to=new))
    if grown:
        refuse_changed_fields(before, after, "run.json")
    else:
        with pytest.raises(Refusal, match="tokens_per_update was"):
            refuse_changed_fields(before, after, "run.json")


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
        with pytest.raises(Refusal, match="rows was"):
            now(value)()
    two = changed("rows", to=[{"from_cycle": 1, "row_tokens": 256}, {"from_cycle": 3, "row_tokens": 512}])
    with pytest.raises(Refusal, match="rows was"):
        refuse_changed_fields(dump(settings(two)), settings(), "run.json")
