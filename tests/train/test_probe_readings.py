"""From a probe's numbers to the journal's: quantiles, weights, names, what is left out, alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import neuronspark.probe
from nstrain.base.errors import Refusal
from nstrain.train.probe_readings import (
    RULES,
    ProbedBatch,
    fraction_above,
    probe_row,
    rule_of,
    weighted_mean,
    weighted_quantile,
)

VALUES = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=30)


def ones(count: int) -> np.ndarray:
    return np.ones(count)


# --- statistics --------------------------------------------------------------------------------------------------


@given(VALUES, st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_a_quantile_is_the_first_value_that_reaches_the_share(values: list[float], share: float) -> None:
    found = weighted_quantile(np.array(values), ones(len(values)), share)
    assert found == sorted(values)[math.ceil(share * len(values) - 1e-9) - 1]


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 6)), min_size=1, max_size=12))
def test_a_weight_is_a_number_of_repetitions(pairs: list[tuple[int, int]]) -> None:
    values = np.array([float(value) for value, _ in pairs])
    weights = np.array([float(weight) for _, weight in pairs])
    repeated = np.repeat(values, [weight for _, weight in pairs])
    for share in (0.25, 0.5, 0.9):
        assert weighted_quantile(values, weights, share) == weighted_quantile(repeated, ones(repeated.size), share)
    assert weighted_mean(values, weights) == pytest.approx(repeated.mean())
    assert fraction_above(values, weights, 0.5) == pytest.approx((repeated > 0.5).mean())


PAIRS = st.tuples(st.floats(-9, 9, allow_subnormal=False), st.floats(0.01, 1))


@given(st.lists(PAIRS, min_size=1, max_size=20), st.randoms())
def test_a_quantile_depends_on_no_order(pairs: list[tuple[float, float]], random: object) -> None:
    def quantiles(of: list[tuple[float, float]]) -> list[float]:
        values, weights = (np.array(column) for column in zip(*of, strict=True))
        return [weighted_quantile(values, weights, share) for share in (0.1, 0.5, 0.9)]

    shuffled = pairs.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert quantiles(pairs) == quantiles(shuffled)


def test_quantiles_of_thirds_infinities_and_nan() -> None:
    thirds = np.array([1 / 3] * 3)
    assert weighted_quantile(np.array([3.0, 1.0, 2.0]), thirds, 1 / 3) == 1.0
    assert weighted_quantile(np.array([1.0, math.inf, math.inf]), thirds, 0.5) == math.inf
    assert weighted_quantile(np.arange(20.0), np.full(20, 0.05), 0.5) == 9.0, (
        "ten of these weights are a hair below half"
    )
    assert math.isnan(weighted_quantile(np.array([1.0, math.nan, 2.0]), thirds, 0.5))
    assert math.isnan(fraction_above(np.array([1.0, math.nan, 2.0]), thirds, 0.5))


# --- rows and names ----------------------------------------------------------------------------------------------


def batch(weights: list[float], **parts: dict[str, list[list[float]]]) -> ProbedBatch:
    return ProbedBatch(
        {part: {name: np.array(v) for name, v in readings.items()} for part, readings in parts.items()},
        np.array(weights),
    )


def test_pairs_of_all_layers_and_of_each() -> None:
    """Two rows, weights 3 and 1; two heads a layer."""
    retention = "dendritic/retention"
    row = probe_row(
        [
            batch(
                [3.0, 1.0],
                layer00={retention: [[0.1, 0.95], [0.2, 0.6]]},
                layer01={retention: [[0.3, 0.4], [0.92, 0.7]]},
            )
        ],
        64,
    )
    prefix = "val_64/dendritic"
    # In order, with weights: .1 (3) .2 (1) .3 (3) .4 (3) | .6 (1) .7 (1) .92 (1) .95 (3): half of 16 is reached at .4
    assert row[f"{prefix}/retention_p50"] == 0.4
    assert row[f"{prefix}/retention_max"] == 0.95
    assert row[f"{prefix}/retention_frac_gt_0.9"] == 4 / 16
    assert row[f"{prefix}/retention_frac_gt_0.5"] == 6 / 16
    assert row[f"{prefix}/layer00/retention_p50"] == 0.2
    assert row[f"{prefix}/layer01/retention_max"] == 0.92
    assert len(row) == 3 * 4


def test_heads_are_listed_by_layer_only() -> None:
    row = probe_row([batch([1.0, 3.0], layer02={"hippocampal/write": [[0.2, 0.5], [0.4, 0.9]]})], 8)
    assert row.pop("val_8/hippocampal/layer02/write_head0") == pytest.approx(0.35)
    assert row.pop("val_8/hippocampal/layer02/write_head1") == pytest.approx(0.8)
    assert row == {
        "val_8/hippocampal/write_p50": 0.4,
        "val_8/hippocampal/write_max": 0.9,
        "val_8/hippocampal/layer02/write_p50": 0.4,
        "val_8/hippocampal/layer02/write_max": 0.9,
    }


def test_a_head_s_clock_is_the_median_of_its_rows() -> None:
    """One row in which the clock stood still must not stand for the head."""
    row = probe_row([batch([1.0, 1.0, 1.0], layer02={"hippocampal/clock_tau": [[10.0], [12.0], [1e12]]})], 8)
    assert row["val_8/hippocampal/layer02/clock_tau_head0"] == 12.0
    assert row["val_8/hippocampal/clock_tau_max"] == 1e12


def test_rows_without_a_boundary_are_left_out_there() -> None:
    nan = math.nan
    name = "dendritic/boundary_retention"
    rows = {"dendritic/boundaries": [[0.0], [2.0]]}
    row = probe_row([batch([1.0, 1.0], rows=rows, layer00={name: [[nan, nan], [0.25, 0.75]]})], 8)
    assert row == {
        "val_8/dendritic/boundaries": 2.0,
        "val_8/dendritic/boundary_retention_p50": 0.25,
        "val_8/dendritic/boundary_retention_max": 0.75,
        "val_8/dendritic/layer00/boundary_retention_p50": 0.25,
        "val_8/dendritic/layer00/boundary_retention_max": 0.75,
    }
    weighted = probe_row([batch([9.0, 1.0, 4.0], layer00={name: [[nan, nan], [0.1, 0.2], [0.3, 0.4]]})], 8)
    assert weighted["val_8/dendritic/boundary_retention_p50"] == 0.3, "the other rows keep their own weights"
    none = probe_row([batch([1.0], rows={"dendritic/boundaries": [[0.0]]}, layer00={name: [[nan, nan]]})], 8)
    assert none == {"val_8/dendritic/boundaries": 0.0}


def test_any_other_nan_stays_visible() -> None:
    row = probe_row([batch([1.0, 1.0], layer00={"dendritic/tau": [[1.0, math.nan], [2.0, 3.0]]})], 8)
    assert all(math.isnan(value) for value in row.values())
    assert len(row) == 6
    boundary = {"dendritic/boundary_retention": [[math.nan, math.nan], [0.1, math.nan]]}
    row = probe_row([batch([1.0, 1.0], layer00=boundary)], 8)
    assert all(math.isnan(value) for value in row.values()), "of a row with a boundary, too"
    assert len(row) == 4


def test_rows_of_no_weight_are_left_out() -> None:
    firing = "dendritic/firing"
    padded = batch([1.0, 0.0], rows={"dendritic/boundaries": [[3.0], [5.0]]}, layer00={firing: [[0.5], [math.nan]]})
    assert probe_row([padded], 8) == {
        "val_8/dendritic/boundaries": 3.0,
        "val_8/dendritic/firing": 0.5,
        "val_8/dendritic/layer00/firing": 0.5,
    }
    assert probe_row([batch([0.0], layer00={firing: [[0.5]]})], 8) == {}


def test_batches_that_lack_a_reading_take_no_part_in_it() -> None:
    """The weights by distance are asked of some micro-batches only."""
    firing, entropy = "dendritic/firing", "hippocampal/attn_entropy"
    batches = [
        batch([1.0], layer00={firing: [[0.2]]}, layer01={entropy: [[1.0, 3.0]]}),
        batch([3.0], layer00={firing: [[0.6]]}),
    ]
    row = probe_row(batches, 8)
    assert row["val_8/dendritic/firing"] == pytest.approx(0.5)
    assert row["val_8/hippocampal/attn_entropy_max"] == 3.0
    assert row["val_8/hippocampal/layer01/attn_entropy_head1"] == 3.0


def test_splitting_rows_into_batches_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.random((6, 3)), rng.random(6)
    name = "hippocampal/rope_ext_q"
    whole = probe_row([ProbedBatch({"layer00": {name: values}}, weights)], 8)
    parts = [ProbedBatch({"layer00": {name: values[at]}}, weights[at]) for at in (slice(0, 2), slice(2, 6))]
    assert probe_row(parts, 8) == whole


# --- rules -------------------------------------------------------------------------------------------------------


def test_every_reading_of_the_model_has_a_rule_and_every_rule_a_reading() -> None:
    assert set(neuronspark.probe.reading_names()) == set(RULES)
    assert rule_of("dendritic/retention_seg12") is RULES["dendritic/retention_seg<k>"]
    assert rule_of("hippocampal/attn_dist_bin0") is RULES["hippocampal/attn_dist_bin<k>"]


def test_a_reading_without_a_rule_is_refused() -> None:
    with pytest.raises(Refusal, match="'cortical/depth', which has no rule"):
        probe_row([batch([1.0], layer00={"cortical/depth": [[1.0]]})], 8)


def test_a_real_model_s_probe_becomes_a_row() -> None:
    import torch

    from neuronspark import ModelConfig, NeuronSpark

    config = ModelConfig.from_dict(
        {
            "vocab_size": 64,
            "width": 32,
            "layers": "DH",
            "rope_max_seq_len": 64,
            "ffn_width": 48,
            "dendritic_head_width": 8,
            "pool_head_width": 16,
        }
    )
    tokens = torch.randint(0, 9, (3, 41), generator=torch.Generator().manual_seed(0))
    found = NeuronSpark(config, seed=0).probe(tokens, 3, 16)
    readings = {part: {name: v.numpy() for name, v in values.items()} for part, values in found.items()}
    row = probe_row([ProbedBatch(readings, np.array([0.5, 0.25, 0.25]))], 40)
    assert all(math.isfinite(value) for value in row.values())
    assert row["val_40/dendritic/boundaries"] == (tokens[:, :-2] == 3).sum()
    for name in (
        "dendritic/retention_seg2_p50",
        "dendritic/firing_seg1",
        "dendritic/layer00/tau_p90",
        "hippocampal/layer01/attn_dist_bin3",
        "hippocampal/layer01/rope_ext_k_head1",
        "hippocampal/clock_boundary_step_ratio",
        "hippocampal/rope_ext_pairs_frac",
    ):
        assert f"val_40/{name}" in row
    assert sum(row[f"val_40/hippocampal/attn_dist_bin{k}"] for k in range(7)) == pytest.approx(1, abs=1e-6)
    assert not any("/rows/" in name for name in row)
