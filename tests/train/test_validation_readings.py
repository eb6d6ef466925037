"""Validation: weights by stratum, the recipe's mix, the plain mean, which rows are asked, and training undisturbed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from readings_line import LONG_TOKENS, ROW_TOKENS, make_readings_line, train
from real_line import make_data_line, prepare, rows_of, tensors_of
from train_helpers import random_rows

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.line import DataLine
from nstrain.data.val import ValidationRow
from nstrain.line.paths import LinePaths
from nstrain.settings.run import load_run
from nstrain.train.engine import EagerEngine
from nstrain.train.held_out import Asked, HeldOut, RowSet, long_row_tokens
from nstrain.train.model import build
from nstrain.train.optimizer_summaries import OptimizerSummaries, OptimizerSummary
from nstrain.train.position_readings import document_bins, document_losses, segment_losses
from nstrain.train.probe_readings import ProbedBatch, probe_row
from nstrain.train.validation import Moment, Validation, optimizer_readings, source_losses

RECIPE = {"books": 2, "code": 1}


def row_set(sources: dict[str, list[float]], row_tokens: int = 8) -> RowSet:
    weights = [(source, weight) for source, ws in sources.items() for weight in ws]
    tokens = random_rows(len(weights), row_tokens, seed=77)
    return RowSet.of([ValidationRow(s, "a", weight, tokens[i]) for i, (s, weight) in enumerate(weights)])


# --- losses ------------------------------------------------------------------------------------------------------


def test_losses_follow_the_formulas() -> None:
    rows = row_set({"books": [0.5, 0.25, 0.25], "code": [0.9, 0.1]})
    losses = np.random.default_rng(0).random((5, 8))
    means = losses.mean(axis=1)
    books, code = means[:3] @ [0.5, 0.25, 0.25], means[3:] @ [0.9, 0.1]
    assert source_losses("val_8", rows, losses, {"books": 3, "code": 1}) == pytest.approx(
        {
            "val_8/books": books,
            "val_8/code": code,
            "val_8/mix": 0.75 * books + 0.25 * code,
            "val_8/mean": (books + code) / 2,
        },
        rel=1e-12,
    )


def losses_of(values: dict[str, float]) -> tuple[RowSet, npt.NDArray[np.float64]]:
    """One row a source, of the same loss at every token."""
    rows = row_set({source: [1.0] for source in values})
    return rows, np.repeat(np.array(list(values.values()))[:, None], 8, axis=1)


def test_a_source_outside_the_recipe_counts_in_the_mean_alone() -> None:
    found = source_losses("val_16", *losses_of({"a": 2.0, "b": 4.0, "c": 9.0}), {"b": 1, "a": 1})
    assert found == {"val_16/a": 2.0, "val_16/b": 4.0, "val_16/c": 9.0, "val_16/mix": 3.0, "val_16/mean": 5.0}


def test_a_source_of_the_recipe_without_held_out_rows_is_refused() -> None:
    with pytest.raises(Refusal, match=r"source 'b' of the recipe has no held-out row.*data val"):
        source_losses("val_16", *losses_of({"a": 2.0}), {"a": 1, "b": 1})


def test_weights_are_those_of_the_mix() -> None:
    rows = row_set({"a": [0.25, 0.75], "b": [1.0], "left_out": [1.0]})
    weights = rows.mix_weights({"a": 3, "b": 1})
    assert weights.tolist() == [0.1875, 0.5625, 0.25, 0.0]
    losses = np.random.default_rng(1).random((4, 8))
    mix = source_losses("val_8", rows, losses, {"a": 3, "b": 1})["val_8/mix"]
    assert (weights * losses.mean(axis=1)).sum() == pytest.approx(mix)


def test_some_rows_stand_for_a_source() -> None:
    rows = row_set({"a": [0.1, 0.45, 0.45], "b": [1.0], "c": [0.6, 0.1, 0.3]})
    one = rows.some_a_source(1)
    assert one.sources == ("a", "b", "c")
    assert one.parts.tolist() == [1.0, 1.0, 1.0]
    assert np.array_equal(one.tokens, rows.tokens[[1, 3, 4]])
    two = rows.some_a_source(2)
    assert two.sources == ("a", "a", "b", "c", "c")
    assert two.parts == pytest.approx([0.5, 0.5, 1.0, 2 / 3, 1 / 3])
    assert np.array_equal(two.tokens, rows.tokens[[1, 2, 3, 4, 6]])
    assert np.array_equal(rows.some_a_source(3).parts, rows.parts)


# --- which rows --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 2)
    prepare(line.work, 2)
    return line


@pytest.mark.parametrize(
    ("unit", "longest", "row_tokens", "long_tokens"),
    [(64, 64, 16, 64), (64, 32, 16, 32), (64, 48, 16, 32), (64, 128, 16, 64), (64, 64, 64, None), (64, 8, 16, None)],
)
def test_long_rows_are_the_longest_that_can_be_read_and_cut(
    unit: int, longest: int, row_tokens: int, long_tokens: int | None, data: DataLine, tmp_path: Path
) -> None:
    settings = load_run(make_readings_line(tmp_path / "run", data).run_json)
    model = settings.model.model_copy(update={"config": {"rope_max_seq_len": longest}})
    assert long_row_tokens(settings.model_copy(update={"model": model}), unit, row_tokens) == long_tokens
    none = settings.validation.model_copy(update={"long_rows_per_source": 0})
    assert long_row_tokens(settings.model_copy(update={"model": model, "validation": none}), unit, row_tokens) is None


def test_fewer_rows_may_be_probed_and_are_some_of_the_others(data: DataLine, tmp_path: Path) -> None:
    changed = {"every_updates": 4, "rows_per_source": 6, "probe_rows_per_source": 2, "long_rows_per_source": 1}
    settings = load_run(make_readings_line(tmp_path / "run", data, validation=changed).run_json)
    rows = HeldOut.open(data, settings, ROW_TOKENS)
    assert rows.long is not None
    assert len(rows.probed.tokens) == 4
    assert len(rows.long.tokens) == 2
    assert len(rows.losses.tokens) == 12
    all_rows = {tokens.tobytes() for tokens in rows.losses.tokens}
    assert all(tokens.tobytes() in all_rows for tokens in rows.probed.tokens)
    for some in (rows.losses, rows.probed, rows.long):
        assert some.mix_weights(RECIPE).sum() == pytest.approx(1)
        assert set(some.sources) == {"books", "code"}
    # Each source has two strata, so losses are of two rows of it at least, whatever is asked for.
    for rows_per_source, most, probed in ((1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 9, 2), (6, 6, 6), (6, 9, 6)):
        validation = settings.validation.model_copy(
            update={"rows_per_source": rows_per_source, "probe_rows_per_source": most}
        )
        rows = HeldOut.open(data, settings.model_copy(update={"validation": validation}), ROW_TOKENS)
        assert len(rows.losses.tokens) == 2 * max(2, rows_per_source)
        assert len(rows.probed.tokens) == 2 * probed
        assert rows.probed.mix_weights(RECIPE).sum() == pytest.approx(1)


def test_what_can_be_asked_follows_from_the_tokens() -> None:
    eos = 1
    rows = RowSet(("a", "b"), np.ones(2), np.array([[5, 6, eos, 7, 8, 9], [5, 5, 5, 5, eos, 5]]))
    none, both = (False, False), (False, True)
    assert Asked.of(rows, np.array([1.0, 1.0]), none, eos) == Asked(boundary=True, step_ratio=True, attention=False)
    # The other row's EOS is its last input: no boundary. And the row that is asked does not count.
    assert Asked.of(rows, np.array([0.0, 1.0]), both, eos) == Asked(boundary=False, step_ratio=False, attention=True)
    assert not Asked.of(rows, np.array([1.0, 0.0]), both, eos).attention
    two = RowSet(("a",), np.ones(1), np.array([[eos, 5, 7]]))
    assert Asked.of(two, np.ones(1), (True,), eos) == Asked(boundary=True, step_ratio=False, attention=True)


# --- a real model ------------------------------------------------------------------------------------------------


def validation_of(paths: LinePaths, data: DataLine) -> tuple[EagerEngine, Validation]:
    torch.set_num_threads(1)  # the rows are short: threads would only wait for each other
    settings = load_run(paths.run_json)
    engine = EagerEngine(build(settings.model, data.vocab_size, "cpu", 3), settings.optimizer, with_ema=True)
    return engine, Validation(engine, settings, data, lambda: None)


def moment(**changes: Any) -> Moment:
    return dataclasses.replace(Moment(ROW_TOKENS, 4, RECIPE, 1e-3), **changes)


def without_time(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith("time/")}


def test_rows_are_asked_by_their_index_however_many_go_at_once(data: DataLine, tmp_path: Path) -> None:
    """The same rows, the same questions, the same names, and the same values up to rounding."""
    engine, validation = validation_of(make_readings_line(tmp_path / "run", data), data)
    probe, asked = engine.probe, {}

    def watched(rows: Any, eos_id: int, train_length: int, attention: bool = True) -> Any:
        assert len(rows) == 1 or rows.shape[1] == ROW_TOKENS + 1, "long rows go one at a time"
        for row in rows:
            asked.setdefault(micro_rows, {})[row.tobytes()] = attention
        return probe(rows, eos_id, train_length, attention)

    engine.probe = watched  # type: ignore[method-assign]
    found = {}
    for micro_rows in (1, 3, 4):
        found[micro_rows] = without_time(validation.read(moment(micro_rows=micro_rows)))
    assert asked[1] == asked[3] == asked[4]
    rows = validation.held_out(ROW_TOKENS)
    assert rows.long is not None
    expected = {tokens.tobytes(): i % 2 == 0 for i, tokens in enumerate(rows.probed.tokens)}
    expected |= {tokens.tobytes(): i % 4 == 0 for i, tokens in enumerate(rows.long.tokens)}
    assert asked[1] == expected
    for micro_rows in (3, 4):
        assert found[micro_rows].keys() == found[1].keys()
        for name, value in found[micro_rows].items():
            assert value == pytest.approx(found[1][name], rel=2e-3, abs=2e-4), name
    again = without_time(validation.read(moment(micro_rows=4)))
    assert again == found[4], "twice the same bits"


def test_every_reading_is_what_its_parts_say(data: DataLine, tmp_path: Path) -> None:
    """Positions, long rows, the average and the optimizer, each from the engine's own numbers."""
    engine, validation = validation_of(make_readings_line(tmp_path / "run", data), data)
    engine.set_length(load_run(tmp_path / "run" / "run.json").lengths["16"])
    for seed in range(3):
        engine.accumulate(random_rows(4, ROW_TOKENS, 384, seed), 1 / (4 * ROW_TOKENS))
        engine.finish(1e-2, 0.1, 0.25)
    found, rows = validation.read(moment()), validation.held_out(ROW_TOKENS)
    assert rows.long is not None

    def losses(of: RowSet) -> npt.NDArray[np.float64]:
        return np.concatenate([engine.token_losses(row[None]) for row in of.tokens]).astype(np.float64)

    expected = source_losses("val_16", rows.losses, losses(rows.losses), RECIPE)
    weights = rows.losses.mix_weights(RECIPE)
    expected |= document_losses(losses(rows.losses), rows.losses.tokens, data.eos_id, weights)
    expected |= source_losses("val_32", rows.long, losses(rows.long), RECIPE)
    expected |= segment_losses(losses(rows.long), rows.long.tokens, ROW_TOKENS, rows.long.mix_weights(RECIPE))
    expected |= optimizer_readings(engine.optimizer_summaries(1e-3))
    weights_then = engine.flat.export("weights")
    average = {name: array.copy() for name, array in engine.flat.export("ema").items()}
    engine.flat.load("weights", average, "the average")
    expected |= source_losses("ema/val_16", rows.losses, losses(rows.losses), RECIPE)
    one = rows.long.some_a_source(1)
    expected |= source_losses("ema/val_32", one, losses(one), RECIPE)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    engine.flat.load("weights", weights_then, "the weights")
    probed: dict[str, float] = {}
    for of, attention_every in ((rows.probed, 2), (rows.long, 4)):
        batches = [
            ProbedBatch(engine.probe(row[None], data.eos_id, ROW_TOKENS, i % attention_every == 0), weight[None])
            for i, (row, weight) in enumerate(zip(of.tokens, of.mix_weights(RECIPE), strict=True))
        ]
        probed |= probe_row(batches, of.row_tokens)
    assert {name: found[name] for name in probed} == pytest.approx(probed, rel=2e-3, abs=2e-4), "up to rounding"
    others = {name for name in found if name not in expected and name not in probed}
    assert all(name.startswith("time/") for name in others)
    assert found["val_16/hippocampal/attn_beyond_train_max"] == 0
    assert found["val_32/hippocampal/attn_beyond_train_max"] > 0
    assert found["opt/matrix/update_norm"] > 0
    assert found["ema/val_16/mix"] != found["val_16/mix"]
    # Segments are as long as the rows that are trained now, not as those that the line began with.
    shorter = moment(row_tokens=ROW_TOKENS // 2)
    found = validation.read(shorter)
    assert validation.other_names(found, shorter) is None
    assert {f"val_32/pos/seg{k}" in found for k in range(4)} == {True}


def test_a_part_is_a_layer_by_its_whole_name() -> None:
    """Another package's part may begin like one; the table of readings expects opt/part/... of it."""
    of_part = OptimizerSummary(1.0, 1.0, 1.0, 1.0, 1.0)
    found = optimizer_readings(OptimizerSummaries({}, dict.fromkeys(("layer07", "layer123", "layer_norm"), of_part)))
    assert {name.rpartition("/")[0] for name in found} == {"opt/layer07", "opt/layer123", "opt/part/layer_norm"}


def test_bins_are_known_from_the_tokens(data: DataLine, tmp_path: Path) -> None:
    _, validation = validation_of(make_readings_line(tmp_path / "run", data), data)
    rows = validation.held_out(ROW_TOKENS).losses
    for recipe in (RECIPE, {"books": 1}, {"code": 1}):
        weights = rows.mix_weights(recipe)
        found = document_losses(np.ones((len(rows.tokens), ROW_TOKENS)), rows.tokens, data.eos_id, weights)
        bins = document_bins(rows.tokens, data.eos_id, weights)
        assert {f"val_16/docpos/bin{k}" for k in bins} == found.keys() - {"val_16/docpos/tokens_frac"}


def test_one_row_through_each_probe(data: DataLine, tmp_path: Path) -> None:
    engine, validation = validation_of(make_readings_line(tmp_path / "run", data), data)
    before = {name: array.tobytes() for name, array in engine.flat.export("weights").items()}
    found = validation.warm(moment())
    for length in (ROW_TOKENS, LONG_TOKENS):
        for name in ("dendritic/tau_p50", "hippocampal/attn_entropy_p50", "hippocampal/layer02/pkm_gate"):
            assert f"val_{length}/{name}" in found
    assert {name: array.tobytes() for name, array in engine.flat.export("weights").items()} == before


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_training_has_the_same_bits_with_and_without_validations(data: DataLine, tmp_path: Path, device: str) -> None:
    """Every fifth update, with probes, long rows and the average - and only at cycles' ends."""
    few = {"every_updates": 1000, "rows_per_source": 1, "long_rows_per_source": 0}
    often = make_readings_line(
        tmp_path / "often", data, device=device, validation={"every_updates": 5, "rows_per_source": 2}
    )
    seldom = make_readings_line(tmp_path / "seldom", data, device=device, validation=few)
    for paths in (often, seldom):
        assert train(paths, 26) == ExitCode.DONE
    assert tensors_of(often, 26) == tensors_of(seldom, 26)
    assert {kind for kind, _ in tensors_of(often, 26)} == {"weights", "exp_avg", "exp_avg_sq", "ema"}
    trained = [{n: v for n, v in row.items() if n.startswith("train/")} for row in rows_of(often)]
    assert trained == [{n: v for n, v in row.items() if n.startswith("train/")} for row in rows_of(seldom)]


@pytest.mark.parametrize("device", DEVICES)
def test_stopped_and_resumed_a_line_s_readings_are_the_same(data: DataLine, tmp_path: Path, device: str) -> None:
    """Stopped before the average begins, in a cycle and just before a validation: all rows are equal to the bit.

    On a GPU each launch but the first sends a row through each probe before it captures.
    """
    through, line = (make_readings_line(tmp_path / name, data, device=device) for name in ("through", "run"))
    assert train(through, 26) == ExitCode.DONE
    for stop_after in (1, 15, 25):
        assert train(line, stop_after) == ExitCode.STOPPED
    assert train(line, 26) == ExitCode.DONE
    assert rows_of(line) == rows_of(through)
    assert tensors_of(line, 26) == tensors_of(through, 26)
    assert "train/loss_jump" in rows_of(through)[26], "formed again from the journal by the last launch"
