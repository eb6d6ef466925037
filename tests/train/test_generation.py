"""How new tokens are chosen: the greedy one, draws that follow the probabilities, and what their seed decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nstrain.base.errors import NstrainError, Refusal
from nstrain.train.generation import NewToken, Sampling, continue_tokens

VOCABULARY, PADDED, EOS = 6, 8, 5


class Table:
    """A model whose next token's logits are a row of a table, chosen by the tokens' sum; two rows are padding."""

    def __init__(self, logits: Tensor) -> None:
        self.config = SimpleNamespace(rope_max_seq_len=20, vocab_size=PADDED)
        self.logits = nn.Parameter(logits)
        self.read: list[int] = []

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter([("logits", self.logits)])

    def prefill(self, tokens: Tensor) -> tuple[Tensor, int]:
        assert tokens.shape[0] == 1
        self.read += tokens[0].tolist()
        total = int(tokens.sum())
        return self.logits[total % len(self.logits)][None], total

    def step(self, token: Tensor, state: int) -> tuple[Tensor, int]:
        self.read += token.tolist()
        total = state + int(token)
        return self.logits[total % len(self.logits)][None], total


def random_table(rows: int = 50, seed: int = 0) -> Tensor:
    """Logits in which EOS is improbable and the padding the most probable of all."""
    logits = torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed))
    logits[:, EOS] = -50
    logits[:, VOCABULARY:] = 10
    return logits


def generated(model: Table, sampling: Sampling, tokens: int = 12, prompt: tuple[int, ...] = (1, 2)) -> list[NewToken]:
    return list(continue_tokens(model, prompt, tokens, sampling, VOCABULARY, EOS))


def test_greedy_takes_the_most_probable_and_tells_the_models_own_probability() -> None:
    model = Table(random_table())
    found = generated(model, Sampling())
    total = 3
    for token in found:
        logits = model.logits[total % 50].detach().double()
        assert token.id == int(logits[:VOCABULARY].argmax())
        assert token.log_probability == pytest.approx(float(logits.log_softmax(0)[token.id]), abs=1e-12)
        total += token.id
    assert len(found) == 12
    assert len({token.id for token in found}) > 1
    assert model.read == [1, 2, *(token.id for token in found[:-1])], "each token is read once, the last one never"


def test_of_equal_logits_greedy_takes_the_lowest_id() -> None:
    assert Sampling().choose(np.zeros(5), 0) == 0


def test_padding_rows_are_never_chosen() -> None:
    for sampling in (Sampling(), Sampling(5.0), Sampling(1.0, top_k=8)):
        assert all(token.id < VOCABULARY for token in generated(Table(random_table()), sampling))


def test_it_ends_after_an_end_of_document() -> None:
    logits = random_table()
    logits[:, EOS] = -50
    first = int(logits[3, :VOCABULARY].argmax())
    logits[3 + first, EOS] = 50
    found = generated(Table(logits), Sampling())
    assert [token.id for token in found][-1] == EOS
    assert len(found) == 2


def test_one_seed_one_text() -> None:
    texts = {seed: generated(Table(random_table()), Sampling(2.0, seed=seed)) for seed in range(20)}
    assert texts[3] == generated(Table(random_table()), Sampling(2.0, seed=3))
    assert len({tuple(token.id for token in text) for text in texts.values()}) == 20


def test_a_shorter_continuation_is_the_beginning_of_a_longer_one() -> None:
    sampling = Sampling(2.0, seed=1)
    assert generated(Table(random_table()), sampling, 5) == generated(Table(random_table()), sampling, 12)[:5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_probabilities(temperature: float) -> None:
    """4000 draws; a frequency is within five standard deviations of its probability."""
    logits = np.array([0.3, -1.0, 2.0, 0.0, 1.0])
    weights = np.exp(logits / temperature)
    sampling = Sampling(temperature, seed=11)
    drawn = Counter(sampling.choose(logits, place) for place in range(4000))
    for id, probability in enumerate(weights / weights.sum()):
        deviation = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(drawn[id] / 4000 - probability) < 5 * deviation


def test_top_k_draws_from_the_most_probable_only() -> None:
    logits = np.array([0.3, -1.0, 2.0, 0.3, 1.0])
    assert {Sampling(9.0, 2, seed).choose(logits, 0) for seed in range(200)} == {2, 4}
    assert {Sampling(9.0, 3, seed).choose(logits, 0) for seed in range(200)} == {0, 2, 4}, "of equals the lowest id"
    assert {Sampling(9.0, 1, seed).choose(logits, 0) for seed in range(50)} == {2}
    assert {Sampling(9.0, 50, seed).choose(logits, 0) for seed in range(200)} == {0, 1, 2, 3, 4}


@given(
    st.lists(st.floats(-1e30, 1e30, allow_subnormal=False), min_size=1, max_size=9),
    st.floats(1e-300, 1e6, allow_subnormal=False),
    st.integers(1, 12),
    st.integers(-5, 2**70),
)
def test_any_logits_give_one_of_the_most_probable(
    logits: list[float], temperature: float, top_k: int, seed: int
) -> None:
    with np.errstate(over="ignore"):
        chosen = Sampling(temperature, top_k, seed).choose(np.array(logits), 0)
    assert logits[chosen] >= sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]


def test_refusals() -> None:
    for temperature in (-0.1, math.nan, math.inf):
        with pytest.raises(Refusal, match="temperature"):
            Sampling(temperature)
    with pytest.raises(Refusal, match="top-k 0"):
        Sampling(1.0, 0)
    with pytest.raises(Refusal, match="has no tokens"):
        generated(Table(random_table()), Sampling(), prompt=())
    assert len(generated(Table(random_table()), Sampling(), 18)) == 18
    with pytest.raises(Refusal, match="2 tokens and 19 new ones are more than the model reads.* 20 tokens"):
        generated(Table(random_table()), Sampling(), 19)


def test_logits_that_are_not_finite_are_an_error() -> None:
    logits = random_table()
    logits[3, 0] = math.nan
    with pytest.raises(NstrainError, match="new token 0 are not finite"):
        generated(Table(logits), Sampling())
