"""The graphs' engine where there is no GPU: the order of captures, replays and readings, with pieces run instead.

A replay runs the captured piece again, an arena counts who works in it. What only a card can show - memory, streams,
that a replay has the bits of the piece - is in test_graphs.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_model import TinyModel
from train_helpers import optimizer_settings, random_rows

from nstrain.gpu.arena import ArenaTooSmall
from nstrain.settings.run import LengthSettings
from nstrain.train import graphs as graphs_module
from nstrain.train.engine import EagerEngine, train_update
from nstrain.train.graphs import GraphEngine


class FakeGraph:
    """What was captured, as a function."""

    made = 0

    def __init__(self, piece: Callable[[], None]) -> None:
        FakeGraph.made += 1
        self._piece: Callable[[], None] | None = piece

    def replay(self) -> None:
        assert self._piece is not None, "a graph that was reset is gone"
        self._piece()

    def reset(self) -> None:
        self._piece = None


class FakeArena:
    """An arena that nobody has to be given."""

    made = 0

    def __init__(self, hold_bytes: int | None) -> None:
        FakeArena.made += 1
        self.stream, self.held_bytes, self.grown, self.inside = None, hold_bytes or 0, 0, 0

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        self.inside += 1
        assert self.inside == 1, "one pool is not entered twice"
        yield
        self.inside -= 1

    def grown_segments(self) -> int:
        return self.grown

    def close(self) -> int:
        return self.held_bytes


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> GraphEngine:
    monkeypatch.setattr(graphs_module, "Arena", FakeArena)
    monkeypatch.setattr(graphs_module, "arena_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(GraphEngine, "_captured", lambda self, piece: FakeGraph(piece))
    engine = GraphEngine(TinyModel(seed=1), optimizer_settings(), 1 << 20, with_ema=True)
    engine.set_length(LengthSettings(micro_rows=2))
    return engine


def state_bytes(engine: EagerEngine) -> dict[tuple[str, str], bytes]:
    return {(k, n): a.tobytes() for k in engine.flat.kinds for n, a in engine.flat.export(k).items()}


def test_it_trains_as_the_eager_engine_does(engine: GraphEngine) -> None:
    eager = EagerEngine(TinyModel(seed=1), optimizer_settings(), with_ema=True)
    plan = [(5, 8, 2, None), (4, 8, 2, 0.5), (3, 16, 1, 0.5), (7, 8, 3, None), (4, 8, 2, 0.25)]
    for seed, (rows, tokens, micro_rows, ema) in enumerate(plan):
        for each in (engine, eager):
            each.set_length(LengthSettings(micro_rows=micro_rows))
        batch = random_rows(rows, tokens, seed=seed)
        found, expected = (train_update(each, batch, micro_rows, 1e-2, 0.1, ema) for each in (engine, eager))
        assert found == expected, f"update {seed}"
        with engine.ema_weights() if ema else contextlib.nullcontext():
            engine.token_losses(batch)
        if seed == 2:
            engine.close_arena()
    assert state_bytes(engine) == state_bytes(eager)
    assert engine.counts == eager.counts


def test_a_ramp_of_batches_and_rates_needs_no_new_capture(engine: GraphEngine) -> None:
    """A graph for each shape of micro-batch, two for the update; another shape is captured once, on its first use."""
    before, graphs = FakeGraph.made, []
    for rows, rate in ((2, 1e-3), (4, 2e-3), (7, 3e-3), (16, 2e-3)):
        train_update(engine, random_rows(rows, seed=rows), 2, rate, 0.1, 0.5 if rows > 4 else None)
        graphs.append(FakeGraph.made - before)
    assert graphs == [3, 3, 3, 3]
    shapes = (
        (LengthSettings(micro_rows=2), 16),
        (LengthSettings(micro_rows=1), 16),
        (LengthSettings(micro_rows=1, recompute="all"), 16),
    )
    for length, tokens in shapes * 2:
        engine.set_length(length)
        train_update(engine, random_rows(4, tokens), length.micro_rows, 1e-3, 0.1)
        graphs.append(FakeGraph.made - before)
    assert graphs[4:] == [4, 5, 6, 6, 6, 6]


def test_a_capture_keeps_what_was_accumulated_and_a_skip_every_byte(engine: GraphEngine) -> None:
    eager = EagerEngine(TinyModel(seed=1), optimizer_settings(), with_ema=True)
    eager.set_length(LengthSettings(micro_rows=2))
    for seed, tokens in enumerate((8, 16, 8)):
        for each in (engine, eager):
            each.accumulate(random_rows(2, tokens, seed=seed), 1 / 64)
    assert engine.finish(1e-2, 0.1, 0.5) == eager.finish(1e-2, 0.1, 0.5)
    before = state_bytes(engine)
    engine.accumulate(random_rows(2, seed=9), 1 / 16)
    engine.flat.groups[1].main_grad[3] = math.nan
    assert engine.finish(1e-2, 0.1, 0.5).skipped
    assert state_bytes(engine) == before == state_bytes(eager)


def test_what_still_copies_is_waited_for_between_norms_and_adamw(engine: GraphEngine) -> None:
    train_update(engine, random_rows(2), 2, 1e-2, 0.1, 0.5)
    seen = []
    engine.before_apply = lambda: seen.append((state_bytes(engine), bool(engine.flat.groups[0].main_grad.any())))
    before = state_bytes(engine)
    train_update(engine, random_rows(2, seed=1), 2, 1e-2, 0.1, 0.5)
    assert seen == [(before, True)]


def test_work_that_takes_more_than_is_held_is_refused(engine: GraphEngine) -> None:
    train_update(engine, random_rows(2), 2, 1e-2, 0.1, 0.5)
    before = state_bytes(engine)
    assert engine._arena is not None
    engine._arena.grown = 2  # type: ignore[attr-defined]
    for work in (
        lambda: engine.token_losses(random_rows(2)),
        lambda: engine.optimizer_summaries(1e-3),
        lambda: engine.accumulate(random_rows(2, 16), 1.0),
    ):
        with pytest.raises(ArenaTooSmall, match="took 2 more segments from the driver than the arena held"):
            work()
    assert state_bytes(engine) == before


def test_an_arena_is_opened_once_and_anew_after_it_was_closed(engine: GraphEngine) -> None:
    made = FakeArena.made
    for seed in range(2):
        train_update(engine, random_rows(4, seed=seed), 2, 1e-2, 0.1)
    assert engine.open_arena() == 1 << 20
    assert FakeArena.made == made + 1
    assert engine.close_arena() == 1 << 20
    assert engine.close_arena() == 0
    train_update(engine, random_rows(4, seed=3), 2, 1e-2, 0.1)
    assert FakeArena.made == made + 2


def test_what_it_tells_goes_where_it_is_told_to(
    engine: GraphEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nstrain bench --json` prints JSON alone."""
    told: list[str] = []
    monkeypatch.setattr(engine, "_tell", told.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    train_update(engine, random_rows(2), 2, 1e-3, 0.1)
    assert [line.split()[0] for line in told] == ["holding", "captured"]
    assert capsys.readouterr().out == ""
