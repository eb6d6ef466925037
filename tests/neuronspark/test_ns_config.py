"""The configuration: what is refused and how, what it counts, and the presets."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from neuronspark import ConfigError, ModelConfig, NeuronSpark, load_preset, padded_vocabulary, preset_names

SMALL = {"vocab_size": 256, "width": 64, "layers": "DH", "rope_max_seq_len": 64, "ffn_width": 96}


def build(config: ModelConfig, device: str = "cpu", **options: Any) -> NeuronSpark:
    return NeuronSpark(config, device, **{"seed": 0, **options})


def test_round_trip_through_json() -> None:
    config = ModelConfig.from_dict({**SMALL, "z_loss_weight": 1e-4})
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_field_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'ffn_widht': did you mean 'ffn_width'"):
        ModelConfig.from_dict({**SMALL, "ffn_widht": 3})


def test_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match="without a value: layers, ffn_width"):
        ModelConfig.from_dict({"vocab_size": 256, "width": 64, "rope_max_seq_len": 64})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "DXH"}, "layers is 'DXH'"),
        ({"layers": ""}, "layers is ''"),
        ({"layers": 3}, "layers is 3: expected a string"),
        ({"width": 96}, "width is 96: expected a positive multiple of pool_head_width"),
        ({"width": 64.0}, "width is 64.0: expected a whole number"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 0}, "vocab_size is 0: expected a finite number > 0"),
        ({"ffn_width": 10**400}, "ffn_width is 10*: expected a finite number > 0"),
        ({"state_groups": 3}, "dendritic heads is 2: expected a positive multiple of state_groups"),
        ({"dendritic_head_width": 48}, "expected a positive multiple of dendritic_head_width"),
        ({"pool_head_width": 1}, "rotary pairs"),
        ({"threshold_init": -0.5}, "threshold_init is -0.5"),
        ({"z_loss_weight": math.nan}, "z_loss_weight is nan"),
        ({"rope_base": "1e6"}, "rope_base is '1e6': expected a number"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**SMALL, **change})


def test_every_field_is_documented() -> None:
    import ast
    import inspect
    import itertools

    import neuronspark.config as module

    (body,) = (n.body for n in ast.parse(inspect.getsource(module)).body if getattr(n, "name", "") == "ModelConfig")
    documented = {
        field.target.id  # type: ignore[union-attr]
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert documented == {field.name for field in dataclasses.fields(ModelConfig)}


def test_vocabulary_is_padded() -> None:
    assert [padded_vocabulary(n) for n in (1, 128, 129, 130_560)] == [128, 128, 256, 130_560]
    assert ModelConfig.from_dict(SMALL).with_vocabulary(8_000).vocab_size == 8_064
    with pytest.raises(ConfigError, match="at least one token"):
        ModelConfig.from_dict(SMALL).with_vocabulary(0)


def test_parameter_count_is_that_of_the_built_model() -> None:
    for layers in ("D", "H", "DDH"):
        config = ModelConfig.from_dict({**SMALL, "layers": layers})
        assert config.parameter_count() == sum(p.numel() for p in build(config).parameters())


def test_presets() -> None:
    assert preset_names() == ["ns-1p3b", "ns-2b", "tiny-32k"]
    tiny, large, larger = (load_preset(name) for name in ("tiny-32k", "ns-1p3b", "ns-2b"))
    assert 3.9e6 <= tiny.parameter_count() <= 10e6
    assert tiny.vocab_size == 8192
    assert large.parameter_count() == pytest.approx(1.3e9, rel=0.05)
    assert larger.parameter_count() == pytest.approx(2.0e9, rel=0.05)
    for config in (tiny, large, larger):
        assert config.rope_max_seq_len == 32768
        assert config.rope_base == 1e6
        assert config.ffn_width == 2.75 * config.width
        assert config.trace_width == config.width / 4
        assert {config.dendritic_head_width, config.pool_head_width, config.state_width} == {64}
        assert (config.dendritic_expansion, config.match_width) == (2, 32)
        assert (config.spike_levels, config.surrogate_margin, config.threshold_init) == (4, 1.0, 0.6)
    for config in (large, larger):
        assert config.vocab_size == 130_560
    with pytest.raises(ConfigError, match="no model preset 'ns-2B': did you mean 'ns-2b'"):
        load_preset("ns-2B")


def test_a_large_preset_is_counted_and_built_without_memory() -> None:
    config = load_preset("ns-2b")
    model = build(config, "meta")
    assert sum(p.numel() for p in model.parameters()) == config.parameter_count()


def test_flops_per_token() -> None:
    """By hand for one dendritic and one hippocampal layer, rows of 8 tokens (shorter than a chunk)."""
    config = ModelConfig.from_dict({**SMALL, "trace_width": 16})
    matrices = 256 * 64  # the tied head
    matrices += 64 * (128 + 128 + 2 * 64 + 2) + 128 * 64  # z, v, B and C, dt; out
    matrices += 64 * (16 + 16) + (64 + 16) * (64 + 64 + 32)  # trace, decay; q, k, p
    matrices += 64 * (64 + 4 + 64) + 64 * 64 + 64 * 96 * 3  # v, controls, gate; out; feed-forward
    scan = 8 * 64 + 8 * 128 + 2 * 128 * 64
    pool = 4.5 * 1 * (2 * 64 + 32)
    assert config.flops_per_token(8) == 6 * (matrices + scan + pool)
    assert config.flops_per_token(64) > config.flops_per_token(8)
