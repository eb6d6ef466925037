"""A probe as a whole: the stream it walks, names, shapes, rows, firing, memory, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_models import EOS, MEMORY, build, rows_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from neuronspark import NeuronSpark, load_preset
from neuronspark import probe as probes
from neuronspark.hippocampal import WHOLE_ROWS
from neuronspark.probe_attention import probe_attention
from neuronspark.probe_dendritic import decay_readings
from neuronspark.probe_hippocampal import memory_readings
from neuronspark.probe_rows import ProbedRows, fired_counts, firing

MODELS: dict[str, dict[str, Any]] = {
    "D": {"layers": "D"},
    "H": {"layers": "H"},
    "mixed": {"layers": "DHDDH"},
    "memory": MEMORY,
}


def stem(reading: str) -> str:
    return re.sub(r"(_seg|_bin)\d+$", r"\1<k>", reading)


def equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.nan_to_num(nan=-1.0), right.nan_to_num(nan=-1.0))


# --- what it walks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_the_stream_is_the_forward_s_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model = build(dtype, **MODELS[name])
    tokens = rows_of(3, 101)
    tokens[1, 40] = -100
    with torch.no_grad():
        h_Td = model.embed(tokens)
        walk = list(probes.visit(model, h_Td, ProbedRows.of(tokens[:, :-1], EOS, 32), attention=True))
        for part, after_Td, _ in walk:
            layer = model.get_submodule(part)
            options = {} if "w_dt" in dict(layer.named_parameters()) else {"rotary": model.rotary}
            h_Td = layer(h_Td, row_tokens=100, **options)
            assert torch.equal(h_Td, after_Td), part
    assert [part for part, _, _ in walk] == [part for part in model.parts() if part.startswith("layer")]


def test_probing_changes_nothing_and_is_repeatable() -> None:
    model, tokens = build(torch.float32, **MEMORY), rows_of(2, 81)
    model.requires_grad_(True)

    def gradients() -> list[Tensor]:
        for p in model.parameters():
            p.grad = None
        model.loss(tokens, torch.tensor(0.1))[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    first, second = (model.probe(tokens, EOS, 32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))
    for part, readings in first.items():
        for name, values in readings.items():
            assert equal(values, second[part][name]), (part, name)
            assert not values.requires_grad


class _NoReadBack(TorchDispatchMode):
    """Refuses operators that a GPU could only run by waiting for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not re.search(r"_local_scalar_dense|nonzero\b|masked_select|unique", name), name
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_from_the_device() -> None:
    model, tokens = build(torch.float32, **MEMORY), rows_of(2, 71)
    with _NoReadBack():
        model.probe(tokens, EOS, 32)


# --- names, shapes, rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_absent_is_there_and_nothing_else(name: str) -> None:
    model = build(**MODELS[name])
    absent = model.absent_readings()
    found = {stem(reading) for readings in model.probe(rows_of(2, 71), EOS, 32).values() for reading in readings}
    assert found | set(absent) == set(probes.reading_names())
    assert not found & set(absent)
    assert all(reason for reason in absent.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_what_its_probe_gives(name: str) -> None:
    """Its parts, readings and members, on long rows that are asked for everything."""
    model = build(**MODELS[name])
    found = model.probe(rows_of(2, 71), EOS, 32)
    members = {part: {stem(reading): v.shape[1] for reading, v in of.items()} for part, of in found.items()}
    assert members == model.probe_members()


def test_on_training_rows_there_are_no_segments() -> None:
    readings = build().probe(rows_of(2, 71), EOS, 70)
    found = {stem(reading) for part in readings.values() for reading in part}
    assert {reading for reading in probes.reading_names() if reading not in found} == {
        *(reading for reading in probes.reading_names() if "_seg" in reading),
        *probes.MEMORY_READINGS,
    }


def test_attention_may_be_left_out_and_the_rest_stays() -> None:
    model, tokens = build(), rows_of(2, 71)
    whole, less = model.probe(tokens, EOS, 32), model.probe(tokens, EOS, 32, attention=False)
    for part, readings in whole.items():
        kept = {name: values for name, values in readings.items() if "/attn_" not in name}
        assert kept.keys() == less[part].keys()
        assert all(equal(values, less[part][name]) for name, values in kept.items())
    assert len(whole["layer02"]) > len(less["layer02"])


def test_shapes() -> None:
    model = build(**MEMORY)
    heads, pool_heads, channels, memory_heads = 8, 2, 8, 2
    members = {
        "dendritic/firing": 1,
        "dendritic/boundaries": 1,
        "hippocampal/decay_tau": channels,
        "hippocampal/pkm_entropy": memory_heads,
        "hippocampal/pkm_slots_used": 1,
        "hippocampal/pkm_gate": 1,
        "hippocampal/rope_ext_pairs_frac": 1,
    }
    for readings in model.probe(rows_of(5, 71), EOS, 32).values():
        for name, values in readings.items():
            default = 1 if "_firing" in name or "/firing" in name else heads if "dendritic" in name else pool_heads
            assert values.shape == (5, members.get(name, default)), name
            assert values.dtype == torch.float64


def test_rows_are_independent() -> None:
    model, tokens = build(**MEMORY), rows_of(4, 71)
    together = model.probe(tokens, EOS, 32)
    for row in range(4):
        alone = model.probe(tokens[row : row + 1], EOS, 32)
        for part, readings in together.items():
            for name, values in readings.items():
                assert torch.allclose(values[row], alone[part][name][0], rtol=1e-9, atol=1e-12, equal_nan=True), name


def test_the_target_after_the_inputs_is_not_read() -> None:
    model, tokens = build(), rows_of(2, 71)
    other = tokens.clone()
    other[:, -1] = EOS
    first, second = model.probe(tokens, EOS, 32), model.probe(other, EOS, 32)
    assert all(equal(v, second[part][name]) for part, readings in first.items() for name, v in readings.items())


# --- boundaries ------------------------------------------------------------------------------------------------


def test_where_documents_meet() -> None:
    inputs = torch.tensor(
        [
            [EOS, 9, 8, EOS, 7, EOS],  # one at the start; the last EOS has nothing after it
            [9, EOS, EOS, 8, 7, 6],  # an empty document between two
            [9, 8, 7, EOS, -100, -100],  # padding begins no document
            [9, 8, 7, 6, 5, 4],
        ]
    )
    rows = ProbedRows.of(inputs, EOS, 6)
    assert rows.boundaries[:, 0].tolist() == [2, 2, 0, 0]
    at = [[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0] * 6, [0] * 6]
    assert rows.at_boundary.int().tolist() == at


def test_a_ratio_at_boundaries_by_hand() -> None:
    inputs = torch.tensor([[9, EOS, 8, 7], [9, 8, 7, 6], [EOS, 9, EOS, 9]])
    step = torch.tensor([[1.0, 5.0, 7.0, 3.0]] * 3)[..., None]
    ratio = ProbedRows.of(inputs, EOS, 4).boundary_ratio(step)[:, 0]
    assert ratio[0].item() == pytest.approx(6 / 2, rel=1e-15)
    assert ratio[1:].isnan().all(), "a row without a boundary, and one of nothing else, have no ratio"


# --- firing ----------------------------------------------------------------------------------------------------


def test_firing_is_counted_exactly() -> None:
    """Past a block of tokens, with every count a known one, in every dtype; -0.0 is no spike."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        s_TC = torch.zeros(3000, 700, dtype=dtype)
        s_TC[:, 0] = -0.0
        s_TC[5:2100, 3:9] = -0.6
        s_TC[2999, 699] = 2.4
        counts_T = fired_counts(s_TC)
        assert counts_T.tolist() == [6.0 * (5 <= t < 2100) + (t == 2999) for t in range(3000)]
        rows = ProbedRows.of(torch.zeros(1, 3000, dtype=torch.long), EOS, 1024)
        shares = firing(rows, "x", counts_T, 700)
        assert shares["x"].item() == (2095 * 6 + 1) / (3000 * 700)
        assert shares["x_seg0"].item() == 1019 * 6 / (1024 * 700)
        assert shares["x_seg2"].item() == (52 * 6 + 1) / (952 * 700)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_firing_of_every_neuron_is_that_of_its_release(dtype: torch.dtype) -> None:
    """Against round(u / theta) != 0 on the potentials that the layers' own methods give."""
    model, tokens = build(dtype, layers="DH"), rows_of(2, 61)
    readings = model.probe(tokens, EOS, 60)
    with torch.no_grad():
        h_Td = model.embed(tokens)
        dendritic, hippocampal = model.layer00, model.layer01
        spikes = (dendritic.spikes(h_Td, 60) != 0).view(2, -1).double().mean(1, keepdim=True)
        assert torch.allclose(readings["layer00"]["dendritic/firing"], spikes, rtol=1e-12)
        h_Td = dendritic(h_Td, 60)
        events = hippocampal.events(h_Td, 60, model.rotary, WHOLE_ROWS)
        read = WHOLE_ROWS.read(events.query, events.key, events.value, events.clock_step, events.log_write)
        s_Td, gate_Tf, up_Tf = hippocampal.feed_forward_sides(hippocampal.respond(h_Td, events, read))
        potentials = {
            "gate": (events.gate, hippocampal.gate_log_threshold, 0),
            "ffn_in": (s_Td, None, -4),
            "ffn_gate": (gate_Tf, hippocampal.ffn_gate_log_threshold, 0),
            "ffn_up": (up_Tf, hippocampal.ffn_up_log_threshold, -4),
        }
        for name, (u, log_threshold, lowest) in potentials.items():
            quanta = u if log_threshold is None else torch.round(u.to(log_threshold.dtype) / log_threshold.exp())
            expected = (quanta.clamp(lowest, 4) != 0).view(2, -1).double().mean(1, keepdim=True)
            assert torch.allclose(readings["layer01"][f"hippocampal/{name}_firing"], expected, rtol=1e-12), name
            assert 0.02 < expected.min() <= expected.max() < 0.98, "a share at an end would show nothing"


def test_no_firing_and_all_firing() -> None:
    model = build(layers="DH")
    for log_threshold, expected in ((50.0, 0.0), (-50.0, 1.0)):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "log_threshold" in name:
                    p.fill_(log_threshold)
        shares = {name: v for part in model.probe(rows_of(1, 40), EOS, 39).values() for name, v in part.items()}
        for name in ("dendritic/firing", "hippocampal/ffn_in_firing"):
            assert shares[name].item() == expected


# --- memory ----------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes of CPU memory that torch holds at a time of what it allocates while `run` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_probe_holds_no_more_than_a_forward_and_its_bound(dtype: torch.dtype) -> None:
    model, tokens = build(dtype, **MEMORY, rope_max_seq_len=1500), rows_of(2, 1501)

    def forward() -> None:
        with torch.no_grad():
            model._final_hidden(tokens)

    element_bytes = dtype.itemsize
    readings = model.probe(tokens, EOS, 500)  # also the first run, which sets up what later ones find
    kept = sum(values.nbytes for part in readings.values() for values in part.values())
    bound = peak_bytes(forward) + probes.extra_bytes(model.config, 2, 1500, element_bytes) + kept
    assert peak_bytes(lambda: model.probe(tokens, EOS, 500)) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_reduction_stays_inside_its_part_of_the_bound(dtype: torch.dtype) -> None:
    """Every reduction alone, its inputs made before: what it allocates itself, on rows of 32,768 tokens."""
    config = load_preset("tiny-32k")
    tokens, heads, address = 32_768, config.pool_heads, config.pool_head_width + config.match_width
    rows = ProbedRows.of(torch.randint(0, 9, (1, tokens)), EOS, 256)
    query, key = (torch.randn(1, heads, tokens, address).to(dtype) for _ in range(2))
    step, log_write = torch.rand(1, heads, tokens) * 0.01, -torch.rand(1, heads, tokens)
    log_decay = -torch.rand(1, tokens, config.dendritic_heads)
    potentials = torch.randn(tokens, config.ffn_width).to(dtype)
    slots, weights = torch.randint(0, 99, (tokens, 1, 32), dtype=torch.int32), torch.rand(tokens, 1, 32)
    bound = probes.extra_bytes(config, 1, tokens, dtype.itemsize)
    used = {
        "attention": peak_bytes(lambda: probe_attention(query, key, step, log_write, rows)),
        "decays": peak_bytes(lambda: decay_readings(log_decay, rows)),
        "firing": peak_bytes(lambda: fired_counts(potentials, torch.relu)),
        "memory": peak_bytes(lambda: memory_readings(slots, weights, torch.rand(tokens), rows)),
    }
    assert max(used.values()) <= bound, used
    assert used["attention"] > bound / 2, "the bound says little about what takes the most"
    assert used["firing"] <= 3 * 4 * 1024 * config.ffn_width + 16 * tokens
    assert used["memory"] <= 24 * 32 * tokens


def test_the_bound_at_full_size() -> None:
    assert probes.extra_bytes(load_preset("ns-2b"), 1, 32_768, 2) < 256 << 20
    assert probes.extra_bytes(load_preset("ns-2b"), 4, 4_096, 2) < 256 << 20


# --- refusals, documentation -----------------------------------------------------------------------------------


def test_refusals() -> None:
    model = build()
    with pytest.raises(ValueError, match="rows of 1 token: a probe needs rows of at least 2"):
        model.probe(rows_of(1, 2), EOS, 8)
    with pytest.raises(ValueError, match="train_length is 0"):
        model.probe(rows_of(1, 9), EOS, 0)
    with pytest.raises(ValueError, match=r"rope_max_seq_len \(300\)"):
        model.probe(rows_of(1, 302), EOS, 8)


def test_the_shortest_rows() -> None:
    model: NeuronSpark = build(**MEMORY)
    for readings in model.probe(rows_of(1, 3), EOS, 1).values():
        for name, values in readings.items():
            assert "boundary" in name or values.isfinite().all(), name


def test_every_reading_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    for name in probes.reading_names():
        assert f"`{name.partition('/')[2]}`" in manual, name
