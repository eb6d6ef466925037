"""Gradient norms: exact against fp64, the same on any thread count, and a NaN anywhere is seen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TinyModel

from nstrain.train.flat import FlatParameters
from nstrain.train.model import parameter_places
from nstrain.train.norms import CHUNK, NODE, gradient_norms, tree_sum


class Wide(TinyModel):
    """A model large enough for sums on several threads and of several levels."""

    def __init__(self) -> None:
        super().__init__(vocab_size=20_000, width=96)


def with_gradients(model: TinyModel, seed: int = 0) -> FlatParameters:
    flat = FlatParameters(parameter_places(model))
    random = torch.Generator().manual_seed(seed)
    for group in flat.groups:
        for cut in group.slices:
            view = cut.of(group.main_grad)
            view.copy_(
                torch.randn(view.shape, generator=random) * 10.0 ** float(torch.randint(-6, 6, (1,), generator=random))
            )
    return flat


def test_norms_equal_fp64_sums() -> None:
    model = Wide()
    flat = with_gradients(model)
    squares = {name: float((p.main_grad.double() ** 2).sum()) for name, p in model.named_parameters()}
    norms = gradient_norms(flat)
    assert norms.total.item() == pytest.approx(math.sqrt(math.fsum(squares.values())), rel=1e-13)
    for found, owners in ((norms.groups, model.groups()), (norms.parts, model.parts())):
        assert found.keys() == owners.keys()
        for name, names in owners.items():
            assert found[name].item() == pytest.approx(math.sqrt(math.fsum(squares[n] for n in names)), rel=1e-13)


def test_norms_do_not_depend_on_the_thread_count() -> None:
    flat = with_gradients(Wide())
    seen = set()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        norms = gradient_norms(flat)
        seen.add((norms.total.item(), *(v.item() for v in (*norms.groups.values(), *norms.parts.values()))))
    assert len(seen) == 1


def test_norms_do_not_depend_on_how_much_is_squared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = with_gradients(Wide())
    expected = gradient_norms(flat)
    for nodes in (1, 7, 100_000):
        monkeypatch.setitem(CHUNK, "cpu", nodes * NODE)
        norms = gradient_norms(flat)
        assert norms.total.item() == expected.total.item()
        assert all(norms.parts[part].item() == expected.parts[part].item() for part in expected.parts)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3_000_000), st.integers(0, 2**32))
def test_tree_sum_of_any_length(length: int, seed: int) -> None:
    values = torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    total = tree_sum(values).item()
    assert total == pytest.approx(math.fsum(values.tolist()), rel=1e-13)
    torch.set_num_threads(1)
    try:
        assert tree_sum(values).item() == total
    finally:
        torch.set_num_threads(2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_bad_element_of_any_parameter_is_seen(bad: float, where: str) -> None:
    for name, _ in TinyModel().named_parameters():
        model = TinyModel()
        flat = with_gradients(model)
        element = model.get_parameter(name).main_grad.view(-1)
        element[{"first": 0, "middle": len(element) // 2, "last": -1}[where]] = bad
        norms = gradient_norms(flat)
        assert not math.isfinite(norms.total.item()), name
        for found, owners in ((norms.groups, model.groups()), (norms.parts, model.parts())):
            for owner, names in owners.items():
                assert math.isfinite(found[owner].item()) == (name not in names), (name, owner)


def test_gradients_whose_squares_overflow_fp32_still_have_a_norm() -> None:
    model = TinyModel()
    flat = FlatParameters(parameter_places(model))
    model.norm.main_grad.fill_(1e30)
    assert gradient_norms(flat).total.item() == pytest.approx(1e30 * math.sqrt(24), rel=1e-6)
