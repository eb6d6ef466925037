"""The rows of a probe: where documents meet, and sums over tokens a block at a time.

A document boundary is an EOS at token e of a row's inputs followed by another token at e + 1, the next document's
first. An EOS that ends the row's inputs, or before padding, is not one: nothing of a next document was read.

Sums are in float64, over blocks of `BLOCK_TOKENS` tokens of all rows together, so that what a probe forms for them is
small beside the layer it looks into. Nothing is read back from the device.

Shapes: B rows, L tokens, m members of a quantity (heads, channels, or 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from neuronspark.kernels.cross_entropy import IGNORED
from neuronspark.kernels.gradient import at_least_fp32

BLOCK_TOKENS = 1024
"""Tokens of all rows together whose values are formed at once."""

PartReadings = dict[str, Tensor]
"""One part's readings by name, each [rows, members] in float64."""


@dataclasses.dataclass(frozen=True)
class ProbedRows:
    """Rows of L input tokens, and what is asked about them."""

    boundary: Tensor
    """Whether a token is an EOS that the next document's first token follows: [B, L], bool."""
    train_length: int
    """The training row length in tokens: segments are this long."""

    @classmethod
    def of(cls, inputs_BL: Tensor, eos_id: int, train_length: int) -> ProbedRows:
        """The rows of these input tokens."""
        boundary_BL = torch.zeros_like(inputs_BL, dtype=torch.bool)
        boundary_BL[:, :-1] = (inputs_BL[:, :-1] == eos_id) & (inputs_BL[:, 1:] != IGNORED)
        return cls(boundary_BL, train_length)

    @property
    def rows(self) -> int:
        """B."""
        return self.boundary.shape[0]

    @property
    def row_tokens(self) -> int:
        """L."""
        return self.boundary.shape[1]

    @property
    def boundaries(self) -> Tensor:
        """The number of boundaries of each row: [B, 1]."""
        return self.boundary.sum(1, keepdim=True).double()

    @property
    def at_boundary(self) -> Tensor:
        """Whether a token is one of a boundary's two: the EOS or the token after it: [B, L]."""
        at_boundary_BL = self.boundary.clone()
        at_boundary_BL[:, 1:] |= self.boundary[:, :-1]
        return at_boundary_BL

    @property
    def segments(self) -> list[tuple[int, int]]:
        """(first, end) of the row's segments of the training length; the last may be shorter."""
        firsts = range(0, self.row_tokens, self.train_length)
        return [(first, min(first + self.train_length, self.row_tokens)) for first in firsts]

    @property
    def is_long(self) -> bool:
        """Whether rows are longer than those of training."""
        return self.row_tokens > self.train_length

    def total(self, values: Callable[[slice], Tensor], first: int = 0, end: int | None = None) -> Tensor:
        """The sum over tokens first ... end - 1 of what `values` gives for a block of tokens, [B, b, m]: [B, m]."""
        end = self.row_tokens if end is None else end
        block = max(1, BLOCK_TOKENS // self.rows)
        parts = [values(slice(at, min(at + block, end))).double().sum(1) for at in range(first, end, block)]
        return torch.stack(parts).sum(0)

    def mean(self, values: Callable[[slice], Tensor]) -> Tensor:
        """The mean over all tokens of what `values` gives for a block of them."""
        return self.total(values) / self.row_tokens

    def boundary_ratio(self, step_BLm: Tensor) -> Tensor:
        """A step's mean over the boundaries' tokens over its mean elsewhere, [B, m]; NaN for a row without either."""
        at_boundary_BL1 = self.at_boundary[..., None]
        there_B1 = at_boundary_BL1.sum(1).double()
        there_Bm = self.total(lambda at: step_BLm[:, at].double() * at_boundary_BL1[:, at])
        # Both sums by themselves: the difference from the whole would cancel where one step flushes.
        elsewhere_Bm = self.total(lambda at: step_BLm[:, at].double() * ~at_boundary_BL1[:, at])
        return (there_Bm / there_B1) / (elsewhere_Bm / (self.row_tokens - there_B1))


def fired_counts(u_TC: Tensor, neuron: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """In how many of its channels each token's `neuron(u)` releases anything: [T], exact, in float64.

    Without a neuron, u is what was released already.
    """
    # The 0-norm counts what is not 0 in one pass and without a mask as large as the potentials.
    counts = []
    for block_tC in u_TC.split(BLOCK_TOKENS):
        released_tC = block_tC if neuron is None else neuron(block_tC)
        counts.append(torch.linalg.vector_norm(at_least_fp32(released_tC), ord=0, dim=1))
    return torch.cat(counts).double()


def firing(rows: ProbedRows, name: str, counts_T: Tensor, channels: int) -> PartReadings:
    """The share of a neuron's tokens and channels that release, [B, 1]; on long rows also by segment."""
    counts_BL = counts_T.view(rows.rows, rows.row_tokens)

    def share(first: int, end: int) -> Tensor:
        return counts_BL[:, first:end].sum(1, keepdim=True) / ((end - first) * channels)

    readings = {name: share(0, rows.row_tokens)}
    if rows.is_long:
        readings |= {f"{name}_seg{k}": share(first, end) for k, (first, end) in enumerate(rows.segments)}
    return readings
