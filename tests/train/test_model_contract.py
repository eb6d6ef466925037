"""A model that breaks the contract is refused at construction, naming the parameter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import TinyModel

from nstrain.base.errors import Refusal
from nstrain.settings.run import ModelSettings
from nstrain.train.model import GROUPS, build, parameter_places


def test_order_is_by_group_then_part_then_the_models_own() -> None:
    places = parameter_places(TinyModel())
    assert [(p.group, p.part, p.name) for p in places] == [
        ("matrix", "layer00", "w0"),
        ("matrix", "layer01", "w1"),
        ("embedding", "embedding", "embedding"),
        ("memory", "layer00", "memory0"),
        ("memory", "layer01", "memory1"),
        ("neuron", "layer00", "gain0"),
        ("neuron", "layer01", "gain1"),
        ("norm", "norm", "norm"),
    ]
    assert set(GROUPS) == {p.group for p in places}


def test_order_does_not_depend_on_how_the_groups_are_listed() -> None:
    model = TinyModel()
    expected = [p.name for p in parameter_places(model)]
    groups, parts = model.groups(), model.parts()
    model.groups = lambda: {g: groups[g][::-1] for g in reversed(groups)}  # type: ignore[method-assign]
    model.parts = lambda: {p: parts[p] for p in reversed(parts)}  # type: ignore[method-assign]
    assert [p.name for p in parameter_places(model)] == expected


Listing = dict[str, list[str]]


@pytest.mark.parametrize("kind", ["group", "part"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda owners: [names.remove("w1") for names in owners.values() if "w1" in names], "'w1' is in no {}"),
        (lambda owners: owners["norm"].append("w0"), "'w0' is in the {}s"),
        (lambda owners: owners["norm"].append("norm"), "'norm' is in the {}s 'norm' and 'norm'"),
        (lambda owners: owners["norm"].append("w7"), "names 'w7', but there is no such parameter"),
    ],
)
def test_every_parameter_has_one_owner(kind: str, spoil: Callable[[Listing], None], message: str) -> None:
    model = TinyModel()
    owners = {"group": model.groups(), "part": model.parts()}[kind]
    spoil(owners)
    setattr(model, f"{kind}s", lambda: owners)
    with pytest.raises(Refusal, match=message.format(kind)):
        parameter_places(model)


def test_a_group_that_the_optimizer_does_not_know_is_refused() -> None:
    model = TinyModel()
    owners = model.groups()
    owners["vector"] = owners.pop("neuron")
    model.groups = lambda: owners  # type: ignore[method-assign]
    with pytest.raises(Refusal, match="'vector'; the optimizer knows matrix, embedding, memory, neuron, norm"):
        parameter_places(model)


def test_a_package_that_cannot_do_without_a_seed_is_refused_before_a_line_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needs_a_seed(config: Any, device: torch.device, *, seed: int) -> TinyModel:
        torch.Generator().manual_seed(seed)
        return TinyModel(config.vocab_size, seed=seed)

    configuration = SimpleNamespace(from_dict=lambda values: SimpleNamespace(**values))
    package = SimpleNamespace(ModelConfig=configuration, NeuronSpark=needs_a_seed, __path__=["the package"])
    monkeypatch.setattr("nstrain.train.model._package", lambda needed="NeuronSpark": package)
    settings = ModelSettings(preset="own", config={"vocab_size": 64})
    for seed in (11, None):
        with pytest.raises(Refusal, match=r"in the package makes no .*seed=None\).* raises RuntimeError\(.*NoneType"):
            build(settings, 64, "cpu", seed)
