"""Flat buffers: layout, gaps that stay zero, gradients that land in them, export and import by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows, same_bits

from nstrain.base.errors import Refusal
from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.flat import ALIGNMENT, TENSOR_KINDS, FlatGroup, FlatParameters
from nstrain.train.model import parameter_places


def flatten(model: TinyModel) -> FlatParameters:
    return FlatParameters(parameter_places(model))


def gaps(group: FlatGroup, buffer: torch.Tensor) -> torch.Tensor:
    """Every element of a buffer that belongs to no parameter."""
    inside = torch.zeros(buffer.numel(), dtype=torch.bool)
    for cut in group.slices:
        inside[cut.first : cut.first + cut.elements] = True
    return buffer[~inside]


def test_layout_can_be_sharded_and_parts_cover_it() -> None:
    flat = flatten(TinyModel())
    for group in flat.groups:
        assert group.master.is_contiguous()
        assert group.master.numel() % (8 * 128) == 0
        assert all(cut.first % ALIGNMENT == 0 for cut in group.slices)
        extents = list(group.parts.values())
        assert extents[0][0] == 0
        assert extents[-1][1] == group.master.numel()
        assert all(a[1] == b[0] for a, b in itertools.pairwise(extents))
        for cut in group.slices:
            first, last = group.parts[cut.part]
            assert first <= cut.first < cut.first + cut.elements <= last
    assert flat.part_names == ("layer00", "layer01", "embedding", "norm")


def test_moving_a_model_keeps_its_values_and_its_loss() -> None:
    model, moved = TinyModel(seed=3), TinyModel(seed=3)
    flat = flatten(moved)
    for (name, old), (_, new) in zip(model.named_parameters(), moved.named_parameters(), strict=True):
        assert same_bits(old.detach(), new.detach()), name
    tokens = torch.from_numpy(random_rows(4))
    assert same_bits(model.token_losses(tokens), moved.token_losses(tokens))
    assert flat.elements == sum(p.numel() for p in model.parameters())


def test_an_fp32_parameter_is_its_master() -> None:
    model = TinyModel()
    flat = flatten(model)
    matrix = flat.groups[0]
    matrix.master.fill_(7.0)
    assert matrix.compute is matrix.master
    assert (model.w0 == 7.0).all()
    assert (model.w1 == 7.0).all()


def test_a_bf16_parameter_is_a_rounded_copy_of_its_fp32_master() -> None:
    model = TinyModel()
    model.w0.data, model.w1.data = model.w0.data.bfloat16(), model.w1.data.bfloat16()
    flat = flatten(model)
    matrix = flat.groups[0]
    assert matrix.compute.dtype == torch.bfloat16
    matrix.master.fill_(1.0 + 2.0**-12)
    matrix.refresh_compute()
    assert (model.w0 == 1.0).all()
    assert model.w0.dtype == torch.bfloat16
    assert model.w0.main_grad.dtype == torch.float32


def test_gradients_of_ordinary_parameters_end_in_main_grad() -> None:
    model, plain = TinyModel(seed=1), TinyModel(seed=1)
    flat = flatten(model)
    for seed in (5, 6):
        tokens = torch.from_numpy(random_rows(4, seed=seed))
        model.loss(tokens, torch.tensor(0.5))[0].backward()
        plain.loss(tokens, torch.tensor(0.5))[0].backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is None, name
        assert same_bits(p.main_grad, q.grad), name
    assert all((gaps(group, group.main_grad) == 0).all() for group in flat.groups)


def test_gaps_stay_zero_over_updates() -> None:
    engine = EagerEngine(TinyModel(), optimizer_settings(weight_decay=0.3))
    engine.set_length(LengthSettings(micro_rows=3))
    for seed in range(5):
        train_update(engine, random_rows(7, seed=seed), 3, 1e-2, 0.3)
    for group in engine.flat.groups:
        for buffer in (group.master, group.exp_avg, group.exp_avg_sq, group.main_grad):
            assert (gaps(group, buffer).view(torch.int32) == 0).all()


def test_export_and_load_by_name_restore_every_byte() -> None:
    source, target = EagerEngine(TinyModel(seed=1), optimizer_settings()), flatten(TinyModel(seed=2))
    source.set_length(LengthSettings(micro_rows=4))
    train_update(source, random_rows(4), 4, 1e-2, 0.1)
    for kind in TENSOR_KINDS:
        target.load(kind, source.flat.export(kind), "here")
        for a, b in zip(source.flat.groups, target.groups, strict=True):
            assert same_bits(a.buffer(kind), b.buffer(kind))


def test_an_export_is_not_changed_by_later_updates() -> None:
    engine = EagerEngine(TinyModel(), optimizer_settings())
    engine.set_length(LengthSettings(micro_rows=4))
    taken = engine.flat.export("weights")
    copies = {name: array.copy() for name, array in taken.items()}
    train_update(engine, random_rows(4), 4, 1e-1, 0.1)
    assert all(np.array_equal(taken[name], copies[name]) for name in copies)
    assert not np.array_equal(engine.flat.export("weights")["w0"], copies["w0"])
    assert all(array.flags.c_contiguous and array.dtype == np.float32 for array in taken.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("gain1"), r"weights of parameter 'gain1': it is missing there"),
        (lambda a: a.update(extra=a["gain0"]), r"'extra': the model has no such parameter"),
        (lambda a: a.update(w1=a["w1"].T.copy()), r"'w1': expected shape \[24, 48\], found \[48, 24\]"),
        (lambda a: a.update(w1=a["w1"].astype(np.float64)), r"'w1': expected float32, found float64"),
    ],
)
def test_tensors_of_another_model_are_refused_and_nothing_is_changed(change, message: str) -> None:  # type: ignore[no-untyped-def]
    flat = flatten(TinyModel(seed=1))
    arrays = flatten(TinyModel(seed=2)).export("weights")
    change(arrays)
    before = flat.export("weights")
    with pytest.raises(Refusal, match=message):
        flat.load("weights", arrays, "u00000012")
    assert all(np.array_equal(before[name], after) for name, after in flat.export("weights").items())


def test_a_group_of_two_dtypes_is_refused() -> None:
    model = TinyModel()
    model.w1.data = model.w1.data.bfloat16()
    with pytest.raises(Refusal, match=r"group 'matrix' holds 'w0' \(torch.float32.*'w1' \(torch.bfloat16"):
        flatten(model)
