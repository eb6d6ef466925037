"""The contract with the trainer, held against NeuronSpark and both baselines alike."""

from __future__ import annotations

import math

import pytest
import torch
from contract_models import (
    BASELINES,
    KINDS,
    LONGEST,
    VOCABULARY,
    Kind,
    away_from_the_start,
    differing,
    gradients,
    on_flat_buffers,
    rows_of,
    scale_of,
)
from torch import Tensor
from train_helpers import optimizer_settings, random_rows

from nstrain.settings.run import LengthSettings
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.model import parameter_places


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


# --- what the parameters are ----------------------------------------------------------------------------------


def test_without_a_seed_only_the_parameters_values_are_missing(kind: Kind) -> None:
    """So that a checkpoint, which holds parameters alone, gives the whole model back."""
    drawn, empty = kind.build(seed=3), kind.build(seed=None)
    with torch.no_grad():
        for (name, value), (other, to_fill) in zip(drawn.named_parameters(), empty.named_parameters(), strict=True):
            assert (name, value.dtype) == (other, to_fill.dtype)
            to_fill.copy_(value)
    rows = rows_of(2, LONGEST)
    assert torch.equal(empty.token_losses(rows), drawn.token_losses(rows))


def test_groups_and_parts_hold_every_parameter_once(kind: Kind) -> None:
    model = kind.build()
    places = parameter_places(model)  # refuses what is in none or in two
    assert {place.part for place in places} == {"layer00", "layer01", "embedding", "norm"}
    for place in places:
        matrix = place.parameter.dim() == 2 and place.group != "norm"
        assert (place.group in ("matrix", "embedding")) == matrix, place.name
        assert place.name.startswith(place.part), "a part is a prefix"


def test_the_costs_are_those_of_what_is_built(kind: Kind) -> None:
    config, places = kind.config, parameter_places(kind.build("meta"))
    assert config.parameter_count() == sum(place.parameter.numel() for place in places)
    for of, found in (("part", config.parameters_by_part()), ("group", config.parameters_by_group())):
        counted: dict[str, int] = {}
        for place in places:
            label = getattr(place, of)
            counted[label] = counted.get(label, 0) + place.parameter.numel()
        assert found == counted
    assert set(config.kinds_by_part()) == set(config.flops_by_part(64)) == set(config.parameters_by_part())
    assert config.flops_per_token(64) == sum(config.flops_by_part(64).values())
    assert type(config).from_dict(config.to_dict()) == config


def test_start_depends_on_the_seed_alone(kind: Kind) -> None:
    first, second, other = (dict(kind.build(seed=seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding"], other["embedding"])


def test_first_loss_is_that_of_a_uniform_guess(kind: Kind) -> None:
    loss = kind.build().token_losses(rows_of(4, 100)).mean()
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.15)


# --- the loss ---------------------------------------------------------------------------------------------------


def test_loss_is_the_scaled_sum_of_the_token_losses(kind: Kind) -> None:
    model, tokens = kind.build(compute_dtype=torch.float64), rows_of(2, 70)
    losses_BL = model.token_losses(tokens)
    assert losses_BL.shape == (2, 70)
    assert not losses_BL.requires_grad
    loss, terms = model.loss(tokens, scale_of(0.5))
    assert torch.allclose(loss, 0.5 * losses_BL.sum())
    assert torch.allclose(terms["ce_sum"], losses_BL.sum())
    assert not any(term.requires_grad for term in terms.values())


def test_an_ignored_token_is_no_target_and_reads_as_token_0(kind: Kind) -> None:
    model, tokens = kind.build(compute_dtype=torch.float64), rows_of(1, 70)
    marked, zeroed = tokens.clone(), tokens.clone()
    marked[0, 30], zeroed[0, 30] = -100, 0
    found, expected = model.token_losses(marked), model.token_losses(zeroed)
    assert found[0, 29] == 0
    expected[0, 29] = 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("at", [0, 5, 63, 64, 99])
def test_a_token_changes_no_loss_before_it(kind: Kind, at: int) -> None:
    model, tokens = kind.build(compute_dtype=torch.float64), rows_of(1, 100)
    changed = tokens.clone()
    changed[0, at] = (changed[0, at] + 1) % VOCABULARY
    before, after = model.token_losses(tokens)[0], model.token_losses(changed)[0]
    # Position t - 1 has token t as its target; what is earlier has not seen it.
    assert torch.allclose(before[: max(at - 1, 0)], after[: max(at - 1, 0)], rtol=1e-12, atol=1e-12)
    # It reaches tokens after the next, too: a model of one token's context would pass the rest of these tests.
    assert (before[at] - after[at]).abs() > 1e-6
    assert at == 99 or (before[at + 1 :] - after[at + 1 :]).abs().max() > 1e-9


def test_a_row_does_not_depend_on_its_neighbours(kind: Kind) -> None:
    model, tokens = kind.build(compute_dtype=torch.float64), rows_of(4, 77)
    alone = torch.cat([model.token_losses(tokens[i : i + 1]) for i in range(4)])
    assert torch.allclose(model.token_losses(tokens), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, LONGEST])
def test_any_row_length_that_the_model_reads(kind: Kind, tokens: int) -> None:
    model = kind.build()
    on_flat_buffers(model)
    found = gradients(model, rows_of(2, tokens), 1 / tokens)
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("shape", [(2, LONGEST + 2), (2, 1), (10,)])
def test_rows_of_a_wrong_shape_are_refused(kind: Kind, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"L from 1 to rope_max_seq_len \({LONGEST}\)"):
        kind.build().loss(torch.zeros(shape, dtype=torch.long), scale_of())


def test_nothing_is_read_back_by_the_host(kind: Kind) -> None:
    """On the meta device a value has no bytes, so whoever asks for one gets an error: what a graph cannot hold."""
    model = kind.build("meta")
    tokens = torch.empty(2, 71, dtype=torch.int64, device="meta")
    loss, terms = model.loss(tokens, torch.empty((), device="meta"))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(term.device.type == "meta" for term in terms.values())
    assert model.token_losses(tokens).shape == (2, 70)


# --- gradients --------------------------------------------------------------------------------------------------


def test_main_grad_receives_what_grad_would(kind: Kind) -> None:
    plain, flat, tokens = kind.build(), kind.build(), rows_of(3, 70)
    on_flat_buffers(flat)
    found = gradients(flat, tokens, 0.01)
    plain.loss(tokens, scale_of(0.01))[0].backward()
    for name, p in plain.named_parameters():
        assert flat.get_parameter(name).grad is None, name
        scale = p.grad.abs().max()
        assert scale > 0, f"{name} has no influence"
        assert (p.grad - found[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Of every parameter along a random direction. NeuronSpark's pass straight through its rounding, so not its own."""
    model, tokens = BASELINES[name].build(compute_dtype=torch.float64), rows_of(2, 70)
    away_from_the_start(model)
    model.loss(tokens, scale_of())[0].backward()
    for index, (parameter_name, p) in enumerate(model.named_parameters()):
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(index), dtype=p.dtype)
        sides = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p += step * direction
                sides.append(model.loss(tokens, scale_of())[0])
                p -= step * direction
        slope, expected = (p.grad * direction).sum(), (sides[0] - sides[1]) / 2e-5
        assert abs(expected) > 1e-3, f"{parameter_name} has no influence"
        assert slope.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5), parameter_name


def test_the_differing_twice(kind: Kind) -> None:
    model, tokens = kind.build(), rows_of(3, 130)
    on_flat_buffers(model)
    first, losses = gradients(model, tokens, 0.01), model.token_losses(tokens)
    gradients(model, rows_of(2, 50, seed=1), 0.1)  # what comes in between leaves nothing behind
    assert not differing(first, gradients(model, tokens, 0.01))
    assert torch.equal(losses, model.token_losses(tokens))
    again = kind.build()
    on_flat_buffers(again)
    assert not differing(first, gradients(again, tokens, 0.01))


@pytest.mark.parametrize("mode", ["dendritic", "all"])
def test_recomputation_changes_no_bit(kind: Kind, mode: str) -> None:
    model, tokens = kind.build(), rows_of(2, 70)
    on_flat_buffers(model)
    model.recompute("none")
    kept = gradients(model, tokens, 0.01)
    model.recompute(mode)
    assert not differing(kept, gradients(model, tokens, 0.01))


@pytest.mark.parametrize(("layers", "modes"), [("neuronspark", 2), ("llama", 1), ("mamba2", 2), ("hybrid", 2)])
def test_recomputation_keeps_less(layers: str, modes: int) -> None:
    """Bytes that autograd keeps by its own account: less with all than with none, in as many steps as there are."""
    tokens = rows_of(2, 128)

    def kept_bytes(mode: str) -> int:
        model, storages = KINDS[layers].build(), {}
        model.recompute(mode)

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = model.loss(tokens, scale_of())
        del loss
        return sum(storages.values())

    none, dendritic, whole = (kept_bytes(mode) for mode in ("none", "dendritic", "all"))
    assert whole < 1.5 * none
    assert whole <= dendritic <= none
    # A Llama has no layer of the dendritic kind.
    assert (dendritic < 0.8 * none) == (modes == 2)


def test_an_unknown_recompute_mode_is_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match="'some': expected one of none, dendritic, all"):
        kind.build().recompute("some")


# --- padding ----------------------------------------------------------------------------------------------------


def test_padding_rows_add_exactly_nothing(kind: Kind) -> None:
    model = kind.build()
    on_flat_buffers(model)
    found = gradients(model, torch.full((3, 51), -100), 1.0)
    assert all((gradient == 0).all() for gradient in found.values())


def test_padding_rows_beside_real_ones_change_nothing(kind: Kind) -> None:
    real, results = rows_of(2, 40), []
    for tokens in (real, torch.cat((real, torch.full((2, 41), -100)))):
        model = kind.build(compute_dtype=torch.float64)
        loss, _ = model.loss(tokens, scale_of())
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for alone, padded in zip(*results, strict=True):
        assert torch.allclose(alone, padded, rtol=1e-10, atol=1e-12)


# --- types and training -----------------------------------------------------------------------------------------


def test_half_precision_matrices_with_fp32_scalars(kind: Kind) -> None:
    """The types of a GPU, on the CPU: one a group, losses near those in fp32, gradients in fp32 and alike."""
    exact, half, tokens = kind.build(), kind.build(compute_dtype=torch.bfloat16), rows_of(2, 70)
    for group, names in half.groups().items():
        wanted = torch.bfloat16 if group in ("matrix", "embedding") else torch.float32
        assert {half.get_parameter(name).dtype for name in names} == {wanted}, group
    on_flat_buffers(exact)
    on_flat_buffers(half)
    found, expected = gradients(half, tokens, 1 / 140), gradients(exact, tokens, 1 / 140)
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), abs=0.02)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        if gradient.dim() == 2:  # the small ones' are differences of large sums and may be mostly rounding
            similarity = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), 0)
            assert similarity > 0.75, name  # a rounded input flips a neuron's quanta near a tie


def test_updates_have_equal_bits_and_learn_a_batch_by_heart(kind: Kind) -> None:
    engines = [EagerEngine(kind.build(), optimizer_settings()) for _ in range(2)]
    for engine, recompute in zip(engines, ("none", "all"), strict=True):
        engine.set_length(LengthSettings.model_validate({"micro_rows": 2, "recompute": recompute}))
    rows = random_rows(3, 24, VOCABULARY)
    for _ in range(40):
        readings = [train_update(engine, rows, 2, 1e-2, 0.0) for engine in engines]
        assert readings[0] == readings[1]
    assert readings[0].loss < 1.5
