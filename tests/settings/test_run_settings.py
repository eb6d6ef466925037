"""run.json: what is refused and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_json import BASE, RAMP, RATES, changed, settings

from nstrain.base.errors import Refusal
from nstrain.settings.run import RunSettings, load_run, save_run


def test_a_file_is_written_with_every_field_and_read_back(tmp_path: Path) -> None:
    value = settings(changed("tokens_per_update", to=RAMP))
    save_run(tmp_path / "run.json", value)
    assert load_run(tmp_path / "run.json") == value
    assert set(json.loads((tmp_path / "run.json").read_text())) == set(RunSettings.model_fields)
    assert json.loads((tmp_path / "run.json").read_text())["tokens_per_update"] == RAMP


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown, near": (changed("sede", to=1), "unknown field 'sede' (did you mean 'seed'?)"),
    "unknown, nested": (changed("learning_rate", 0, "strat", to=1), "'learning_rate.0.strat' (did you mean 'start'?)"),
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
    "beyond fp32, eps": (
        changed("optimizer", "eps", to=1e-46), "'optimizer.eps': input should be greater than or equal to 0.0000"
    ),
    "beyond fp32, beta": (
        changed("optimizer", "beta2", to=1 - 1e-9), "'optimizer.beta2': input should be less than or equal to 0.99999"
    ),
    "beyond fp32, clipping": (
        changed("optimizer", "clip_norm", to=1e-40),
        "'optimizer.clip_norm': input should be greater than or equal to 0.0",
    ),
    "no number": (
        changed("learning_rate", 0, "start", to=float("nan")), "'learning_rate.0.start': input should be a finite"
    ),
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
    "no rate": (changed("learning_rate", to=[]), "learning_rate must begin with a piece from 0"),
    "rate late": (changed("learning_rate", 0, "from", to=5), "learning_rate must begin with a piece from 0"),
    "rates in no order": (
        changed("learning_rate", to=[RATES[0], RATES[2], RATES[1]]),
        "learning_rate: from must grow from piece to piece, found from 900 followed by from 100",
    ),
    "a decay backwards": (
        changed("learning_rate", to=[{**RATES[0], "from": 0, "to": 0}]),
        "learning_rate.0: to must be greater than from (0), found 0",
    ),
    "a decay without an end": (
        changed("learning_rate", to=[{"from": 0, "shape": "linear", "start": 1.0}]), "linear piece needs to and end"
    ),
    "a constant with an end": (
        changed("learning_rate", to=[{**RATES[1], "from": 0, "end": 0.1}]), "a constant piece has no to and no end"
    ),
    "a rate below 0": (changed("learning_rate", 0, "start", to=-1.0), "'learning_rate.0.start': input should be great"),
    "another shape": (changed("learning_rate", 0, "shape", to="step"), "'learning_rate.0.shape': input should be"),
    "an average over nothing": (
        changed("ema", to={"horizon_tokens": 0, "from_tokens": 0}), "'ema.horizon_tokens': input should be greater"
    ),
    "a tracker nobody knows": (
        changed("tracker", to={"service": "wandbe", "project": "p"}), "'tracker.service': input should be 'wandb'"
    ),
    "a tracker without a project": (changed("tracker", to={"service": "wandb"}), "'tracker.project' is missing"),
    "a project of no letters": (
        changed("tracker", to={"service": "wandb", "project": ""}), "'tracker.project': string should have at least 1"
    ),
    "a project and its owner in one": (
        changed("tracker", to={"service": "wandb", "project": "a/b"}),
        "'tracker.project': expected a name without any of / \\ # ? % : and without spaces around it, found 'a/b'",
    ),
    "an address without its scheme": (
        changed("tracker", to={"service": "wandb", "project": "p", "base_url": "wandb.example.org"}),
        "'tracker.base_url': expected an address like https://wandb.example.org",
    ),
    "a key in an address": (
        changed("tracker", to={"service": "wandb", "project": "p", "base_url": "https://key@host"}), "without a key"
    ),
    "no checkpoints": (
        changed("checkpoints", to={"every_minutes": None}), "checkpoints: every_updates and every_minutes cannot"
    ),
    "allow what is not fixed": (changed("allow_changes", to=["print_every"]), "no fixed field is called print_every"),
    "allow what never changes": (changed("allow_changes", to=["id"]), "allow_changes: id can never change"),
    "allow other readings": (changed("allow_changes", to=["metrics"]), "allow_changes: metrics can never change"),
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


def test_a_branch_is_not_bound_by_the_batch_before_its_fork() -> None:
    value = changed("rows", to=[{"from_cycle": 1, "row_tokens": 512}])
    value["tokens_per_update"] = [{"from": 0, "to": 10_240, "tokens": 256}, {"from": 10_240, "to": None, "tokens": 512}]
    with pytest.raises(Refusal, match="256 is not a multiple of the row length 512"):
        settings(value)
    value["branch"] = {"from": "/trunk", "line": "t", "at_cycle": 1, "update": 40, "tokens": 10_240}
    assert settings(value).batch_tokens_at(10_240) == 512
    value["branch"]["tokens"] = 10_239
    with pytest.raises(Refusal, match="256 is not a multiple"):
        settings(value)
