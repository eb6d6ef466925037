"""`nstrain model list | show`: what a model holds and costs, counted against the model itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from neuronspark import NeuronSpark, load_preset, preset_names
from nstrain.base.errors import Refusal
from nstrain.cli.main import app
from nstrain.ops.model_show import describe_model, describe_presets


def printed(*arguments: object) -> str:
    """What the command prints."""
    ran = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.mark.parametrize("preset", ["tiny-32k", "ns-1p3b", "ns-2b"])
def test_counts_are_the_models(preset: str) -> None:
    cost = describe_model(preset)
    model = NeuronSpark(load_preset(preset), "meta", seed=None)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert cost.parameters == sum(sizes.values())
    assert {part: of.parameters for part, of in cost.parts.items()} == {
        part: sum(sizes[name] for name in names) for part, names in model.parts().items()
    }
    assert cost.groups == {group: sum(sizes[name] for name in names) for group, names in model.groups().items()}
    kinds = {"D": "dendritic", "H": "hippocampal"}
    assert [cost.parts[f"layer{i:02d}"].kind for i in range(len(model.config.layers))] == [
        kinds[letter] for letter in model.config.layers
    ]


def test_flops_of_the_parts_are_those_of_the_model() -> None:
    cost = describe_model("ns-2b", 4096)
    config = load_preset("ns-2b")
    assert math.isclose(sum(of.flops_per_token for of in cost.parts.values()), config.flops_per_token(4096))
    assert cost.parts["embedding"].flops_per_token == 6 * config.vocab_size * config.width
    assert cost.parts["norm"].flops_per_token == 0
    dendritic, hippocampal = cost.parts["layer00"], cost.parts["layer03"]
    longer = describe_model("ns-2b", 8192)
    assert longer.parts["layer00"] == dendritic, "a dendritic layer costs the same in any row"
    more = longer.parts["layer03"].flops_per_token - hippocampal.flops_per_token
    assert more == 6 * 2048 * config.pool_heads * (2 * config.pool_head_width + config.match_width)


def test_rows_longer_than_the_model_reads_are_cut() -> None:
    cost = describe_model("tiny-32k", 10**6)
    assert cost.row_tokens == 32768
    assert cost == describe_model("tiny-32k", 32768)


def test_json() -> None:
    value = json.loads(printed("model", "show", "ns-2b", "--json"))
    assert value["config"] == load_preset("ns-2b").to_dict()
    assert (value["parameters"], value["row_tokens"]) == (load_preset("ns-2b").parameter_count(), 4096)
    assert value["flops_per_token"] == load_preset("ns-2b").flops_per_token(4096)
    assert set(value["parts"]["layer00"]) == {"kind", "parameters", "flops_per_token"}
    shorter = json.loads(printed("model", "show", "ns-2b", "--json", "--row-tokens", 256))
    assert shorter["flops_per_token"] == load_preset("ns-2b").flops_per_token(256)


def test_tables() -> None:
    text = printed("model", "show", "ns-2b")
    config = load_preset("ns-2b")
    for part in (f"dendritic x {config.layers.count('D')}", f"{config.parameter_count():,}", "rows of 4,096", "neuron"):
        assert part in text
    listed = printed("model", "list")
    assert all(name in listed for name in preset_names())
    assert json.loads(printed("model", "list", "--json")).keys() == set(preset_names())
    assert describe_presets()["ns-2b"] == describe_model("ns-2b")


def test_a_configuration_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    value: dict[str, Any] = load_preset("tiny-32k").to_dict()
    path.write_text(json.dumps({**value, "layers": "DDHH"}))
    assert len(describe_model(str(path)).parts) == 6
    path.write_text(json.dumps({**value, "layers": "DHDH", "memory_layers": [3]}))
    assert [of.kind for of in describe_model(str(path)).parts.values()][2:] == [
        *("dendritic", "hippocampal", "dendritic", "hippocampal with memory")
    ]
    path.write_text(json.dumps({**value, "widht": 1}))
    with pytest.raises(Refusal, match=r"mine\.json: unknown model field 'widht': did you mean 'width'"):
        describe_model(str(path))
    path.write_text("[]")
    with pytest.raises(Refusal, match=r"mine\.json: expected a model's configuration, a JSON object, found list"):
        describe_model(str(path))
    with pytest.raises(Refusal, match=r"absent\.json: no such file"):
        describe_model(str(tmp_path / "absent.json"))


def test_unknown_preset() -> None:
    with pytest.raises(Refusal, match="no model preset 'ns-2c': did you mean 'ns-2b'"):
        describe_model("ns-2c")
