"""The hippocampal readings but those of attention, against closed forms on hand-made parameters and inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from probe_models import EOS, MEMORY, build, rows_of
from torch import Tensor

from neuronspark import NeuronSpark
from neuronspark.hippocampal import WHOLE_ROWS, HippocampalLayer, PoolEvents
from neuronspark.probe_hippocampal import _comparator_readings, _pool_readings, extended_pairs, memory_readings
from neuronspark.probe_rows import PartReadings, ProbedRows

F64 = torch.float64


def rows_for(events: PoolEvents, tokens: Tensor | None = None, train_length: int = 10_000) -> ProbedRows:
    rows, _, row_tokens = events.clock_step.shape
    tokens = torch.full((rows, row_tokens), 9) if tokens is None else tokens
    return ProbedRows.of(tokens, EOS, train_length)


def random_events(rows: int = 2, heads: int = 2, tokens: int = 1500, **given: Tensor) -> PoolEvents:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    events = PoolEvents(
        x=normal(rows * tokens, 32),
        query=normal(rows, heads, tokens, 24),
        key=normal(rows, heads, tokens, 24),
        value=normal(rows, heads, tokens, 16),
        clock_step=normal(rows, heads, tokens).exp(),
        log_write=-normal(rows, heads, tokens).exp(),
        copy=normal(rows, heads, tokens),
        gain=normal(rows, heads, tokens),
        gate=normal(rows * tokens, 32),
    )
    return dataclasses.replace(events, **given)


def without_inputs(**changes: Any) -> NeuronSpark:
    """A hippocampal model whose decays, clock, tag, copy and gain do not see the token: their biases alone."""
    model = build(layers="H", **changes)
    with torch.no_grad():
        model.layer00.w_control.zero_()
        model.layer00.w_decay.zero_()
    return model


def probed(model: NeuronSpark, tokens: Tensor, train_length: int = 1000) -> PartReadings:
    (part,) = (readings for part, readings in model.probe(tokens, EOS, train_length).items() if part != "rows")
    return {name.partition("/")[2]: values for name, values in part.items()}


# --- trace, clock, write tag -----------------------------------------------------------------------------------


def test_biases_alone_give_their_closed_forms() -> None:
    model = without_inputs()
    layer = model.layer00
    with torch.no_grad():
        layer.clock_bias.copy_(torch.tensor([math.log(math.expm1(1e-4)), math.log(math.expm1(2.0))]))
        layer.write_bias.copy_(torch.tensor([3.0, -1.0]))
        layer.decay_bias.copy_(torch.log(torch.expm1(1 / torch.tensor([55.0, 1.0, 2, 4, 8, 16, 32, 64], dtype=F64))))
    found = probed(model, rows_of(3, 121))
    tau = torch.tensor([55.0, 1, 2, 4, 8, 16, 32, 64], dtype=F64).expand(3, 8)
    assert torch.allclose(found["decay_tau"], tau, rtol=1e-9)
    assert torch.allclose(found["clock_tau"], torch.tensor([1e4, 0.5], dtype=F64).expand(3, 2), rtol=1e-6)
    write = [1 / (1 + math.exp(-3)), 1 / (1 + math.exp(1))]
    assert torch.allclose(found["write"], torch.tensor(write, dtype=F64).expand(3, 2), rtol=1e-9)
    assert torch.allclose(found["clock_boundary_step_ratio"], torch.ones(3, 2, dtype=F64))


def test_uneven_clocks_and_tags_against_plain_means() -> None:
    events = random_events()
    tokens = rows_of(2, 1500)
    found = _pool_readings(events, build(layers="H").config, rows_for(events, tokens))
    assert torch.allclose(found["hippocampal/clock_tau"], 1 / events.clock_step.mean(2))
    assert torch.allclose(found["hippocampal/write"], events.log_write.exp().mean(2))
    for row in range(2):
        starts = {t for t in range(1499) if tokens[row, t] == EOS}
        there = torch.tensor([t in starts or t - 1 in starts for t in range(1500)])
        ratio = events.clock_step[row][:, there].mean(1) / events.clock_step[row][:, ~there].mean(1)
        assert torch.allclose(found["hippocampal/clock_boundary_step_ratio"][row], ratio)


def test_uneven_decays_against_plain_means() -> None:
    """From the parameters and the normalised input, written out."""
    model, tokens = build(layers="H"), rows_of(2, 91)
    layer = model.layer00
    with torch.no_grad():
        h = model.embedding[tokens[:, :-1]]
        x = h / (h.square().mean(2, keepdim=True) + 1e-6).sqrt() * layer.norm
        minus_log_decay = torch.log1p((x @ layer.w_decay.T + layer.decay_bias).exp())
        clock, write = (x @ layer.w_control.T).unflatten(2, (4, 2))[:, :, :2].unbind(2)
        clock_step = torch.log1p((clock + layer.clock_bias).exp())
    found = probed(model, tokens)
    assert torch.allclose(found["decay_tau"], 1 / minus_log_decay.mean(1), rtol=1e-9)
    assert torch.allclose(found["clock_tau"], 1 / clock_step.mean(1), rtol=1e-9)
    assert torch.allclose(found["write"], torch.sigmoid(write + layer.write_bias).mean(1), rtol=1e-9)


# --- rotary pairs ------------------------------------------------------------------------------------------------


def test_which_pairs_outlast_the_training_length() -> None:
    config = build(layers="H").config  # 8 pairs, base 1e6: wavelengths 2 pi 10^(0.75 i)
    wavelengths = [2 * math.pi * 10 ** (0.75 * i) for i in range(8)]
    for train_length in (1, 6, 7, 100, 4096, 10**7):
        expected = [i for i, wavelength in enumerate(wavelengths) if wavelength > train_length]
        assert list(extended_pairs(config, train_length)) == expected
    model = build()
    share = model.probe(rows_of(2, 40), EOS, 100)["rows"]["hippocampal/rope_ext_pairs_frac"]
    assert share.tolist() == [[6 / 8]] * 2


@pytest.mark.parametrize("train_length", [1, 100, 10**9])
def test_energy_in_slow_pairs(train_length: int) -> None:
    """Pair i is channels i and i + d/2; the match behind them does not count. From all pairs to none."""
    events = random_events()
    config = build(layers="H").config
    slow = list(extended_pairs(config, train_length))
    found = _pool_readings(events, config, rows_for(events, train_length=train_length))
    for name, address in (("q", events.query), ("k", events.key)):
        energy = address[..., :8].square() + address[..., 8:16].square()
        expected = energy[..., slow].sum((2, 3)) / energy.sum((2, 3))
        assert torch.allclose(found[f"hippocampal/rope_ext_{name}"], expected, atol=1e-12)


def test_a_query_that_lives_in_one_pair() -> None:
    """The turn by position moves energy inside a pair only, and the query's gain cancels."""
    model = build(layers="H")
    layer = model.layer00
    with torch.no_grad():
        rows = torch.zeros(32, 40, dtype=F64)
        rows[7, 0] = rows[15, 1] = 1  # head 0: the slowest pair
        rows[16, 0] = rows[24, 1] = 1  # head 1: the fastest
        layer.w_q.copy_(rows)
        layer.query_gain.copy_(torch.tensor([3.0, 0.2]))
    found = probed(model, rows_of(2, 50), train_length=4096)
    assert torch.allclose(found["rope_ext_q"], torch.tensor([[1.0, 0.0]] * 2, dtype=F64), atol=1e-12)
    assert ((found["rope_ext_k"] > 0.05) & (found["rope_ext_k"] < 0.95)).all()


# --- the comparator ----------------------------------------------------------------------------------------------


def comparator(events: PoolEvents, read: Tensor, **parameters: float) -> PartReadings:
    layer = build(layers="H").layer00
    assert isinstance(layer, HippocampalLayer)
    with torch.no_grad():
        for name, value in parameters.items():
            layer.get_parameter(name).fill_(value)
        return _comparator_readings(layer, events, read, rows_for(events))


@pytest.mark.parametrize(("sign", "novelty"), [(1.0, 0.0), (-1.0, 1.0)])
def test_reads_that_are_the_value_or_its_opposite(sign: float, novelty: float) -> None:
    """cos = 1 or -1, whatever the lengths; then pi = sigmoid(a - b nu) and g = softplus(gain bias)."""
    still = torch.zeros(2, 2, 1500, dtype=F64)
    events = random_events(copy=still, gain=still)
    scaled = events.value * sign * 0.3
    found = comparator(events, scaled, copy_bias=2.0, novelty_weight=0.5, read_gain_bias=0.54)
    expected = {
        "novelty": novelty,
        "copy_pi": 1 / (1 + math.exp(-(2.0 - 0.5 * novelty))),
        "read_gain": math.log1p(math.exp(0.54)),
    }
    for name, value in expected.items():
        values = found[f"hippocampal/{name}"]
        assert torch.allclose(values, torch.full((2, 2), value, dtype=F64), atol=1e-9), name


def test_the_comparator_against_plain_means() -> None:
    events = random_events()
    read = torch.randn(events.value.shape, generator=torch.Generator().manual_seed(8), dtype=F64)
    found = comparator(events, read, copy_bias=0.3, novelty_weight=1.5, read_gain_bias=-0.2)
    nu = (1 - torch.nn.functional.cosine_similarity(read, events.value, dim=3)) / 2
    assert torch.allclose(found["hippocampal/novelty"], nu.mean(2))
    assert torch.allclose(found["hippocampal/copy_pi"], torch.sigmoid(events.copy + 0.3 - 1.5 * nu).mean(2))
    assert torch.allclose(found["hippocampal/read_gain"], torch.log1p((events.gain - 0.2).exp()).mean(2))


def test_a_model_s_comparator_sees_its_own_read() -> None:
    """A clock that flushes at once leaves each token its own event: it reads its own value, and nothing is novel."""
    model = build(layers="H")
    with torch.no_grad():
        model.layer00.clock_bias.fill_(1e4)
    assert probed(model, rows_of(2, 60))["novelty"].abs().max() < 1e-12
    assert probed(build(layers="H"), rows_of(2, 60))["novelty"].min() > 0.01


# --- memory ------------------------------------------------------------------------------------------------------


def test_memory_readings_by_hand() -> None:
    """Two rows of two tokens, two heads of two slots."""
    slots = torch.tensor([[[5, 9], [9, 0]], [[5, 9], [5, 1]], [[7, 7], [7, 7]], [[7, 7], [7, 7]]], dtype=torch.int32)
    weights = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]] * 2 + [[[0.75, 0.25], [0.5, 0.5]]] * 2, dtype=F64)
    gate = torch.tensor([0.25, 0.75, 1.0, 0.0], dtype=F64)
    rows = ProbedRows.of(torch.full((2, 2), 9), EOS, 2)
    found = memory_readings(slots, weights, gate, rows)
    assert found["hippocampal/pkm_slots_used"].tolist() == [[4.0], [1.0]]
    assert found["hippocampal/pkm_gate"].tolist() == [[0.5], [0.5]]
    uneven = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    expected = torch.tensor([[math.log(2), 0.0], [uneven, math.log(2)]], dtype=F64)
    assert torch.allclose(found["hippocampal/pkm_entropy"], expected)


def test_a_memory_whose_keys_are_all_alike() -> None:
    """Ties take the lowest slots: every token reads the same three with even weights; the gate is its bias alone."""
    model, tokens = build(**MEMORY), rows_of(3, 61)
    layer = model.layer02
    with torch.no_grad():
        layer.w_memory_keys.zero_()
        layer.w_memory_gate.zero_()
        layer.memory_gate_bias.fill_(-0.7)
    found = model.probe(tokens, EOS, 60)["layer02"]
    assert torch.allclose(found["hippocampal/pkm_entropy"], torch.full((3, 2), math.log(3), dtype=F64))
    assert found["hippocampal/pkm_slots_used"].tolist() == [[3.0]] * 3
    gate = 1 / (1 + math.exp(0.7))
    assert torch.allclose(found["hippocampal/pkm_gate"], torch.full((3, 1), gate, dtype=F64))
    assert "hippocampal/pkm_gate" not in model.probe(tokens, EOS, 60)["layer01"]


def test_memory_is_read_with_the_layer_s_own_addresses() -> None:
    from neuronspark.memory import address_memory

    model, tokens = build(**MEMORY), rows_of(2, 81)
    with torch.no_grad():
        h_Td = model.layer01(model.layer00(model.embed(tokens), 80), 80, model.rotary)
        events = model.layer02.events(h_Td, 80, model.rotary, WHOLE_ROWS)
        slots, weights, gate = address_memory(model.layer02, events.x, model.config)
    found = model.probe(tokens, EOS, 80)["layer02"]
    for row in range(2):
        at = slice(80 * row, 80 * (row + 1))
        assert found["hippocampal/pkm_slots_used"][row].item() == len(set(slots[at].flatten().tolist()))
        entropy = -(weights[at] * weights[at].log()).sum(2).mean(0)
        assert torch.allclose(found["hippocampal/pkm_entropy"][row], entropy)
        assert found["hippocampal/pkm_gate"][row].item() == pytest.approx(gate[at].mean().item(), rel=1e-12)
