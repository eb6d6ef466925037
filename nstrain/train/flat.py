"""A model's parameters, gradients and moments in flat, contiguous buffers, one set for each optimizer group.

Layout rule: parameters in the order of `parameter_places`, every slice beginning at a multiple of ALIGNMENT elements.
So a buffer's length is a multiple of 8 x 128 elements - it can be cut evenly over up to eight devices, each piece
aligned - and no block of the gradient norm holds two parameters. The gaps are zero and stay zero: no gradient reaches
them, and AdamW keeps a zero with zero moments where it is.

Masters, gradients, moments and the weights' moving average, if the line has one, are fp32. A parameter computes in the
dtype the model gave it: if that is fp32 (on a CPU) the parameter *is* a view of its master; otherwise the group has one
more buffer, rounded from the masters after each update, and the parameter is a view of that.

On disk nothing of this layout shows: tensors are exported and imported by parameter name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nstrain.base.errors import Refusal
from nstrain.train.model import ParameterPlace

if TYPE_CHECKING:
    from nstrain.train.norms import StretchTable

ALIGNMENT = 1024
"""Elements at whose multiples parameters begin."""

TensorKind = Literal["weights", "exp_avg", "exp_avg_sq", "ema"]
TENSOR_KINDS: tuple[TensorKind, ...] = ("weights", "exp_avg", "exp_avg_sq")
"""What every checkpoint holds of every parameter, in fp32: the masters and AdamW's two moments."""

Arrays = dict[str, npt.NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class Slice:
    """Where a parameter lies in its group's buffers."""

    name: str
    part: str
    shape: tuple[int, ...]
    first: int
    """Its first element; a multiple of ALIGNMENT."""

    @property
    def elements(self) -> int:
        """Elements of the parameter, without the gap after it."""
        return int(np.prod(self.shape, dtype=np.int64))

    def of(self, buffer: Tensor) -> Tensor:
        """The parameter's view of one of its group's buffers, in its own shape."""
        return buffer[self.first : self.first + self.elements].view(self.shape)


class FlatGroup:
    """The buffers of one optimizer group."""

    def __init__(self, name: str, places: Sequence[ParameterPlace], with_ema: bool = False) -> None:
        first = places[0].parameter
        for place in places:
            if place.parameter.dtype != first.dtype or place.parameter.device != first.device:
                raise Refusal(
                    f"group {name!r} holds {places[0].name!r} ({first.dtype}, {first.device}) and {place.name!r} "
                    f"({place.parameter.dtype}, {place.parameter.device}); a group has one dtype and one device"
                )
        self.name = name
        self.slices = _lay_out(places)
        self.parts = _part_extents(self.slices, elements := _padded_end(self.slices[-1]))
        """First and last element (exclusive) of each part, gaps included; together they cover the buffer."""
        zeros = lambda: torch.zeros(elements, dtype=torch.float32, device=first.device)  # noqa: E731
        self.master, self.main_grad, self.exp_avg, self.exp_avg_sq = zeros(), zeros(), zeros(), zeros()
        self.ema = zeros() if with_ema else None
        """The masters' moving average; zeros until it begins."""
        self.compute = self.master if first.dtype == torch.float32 else self.master.to(first.dtype)
        for place, cut in zip(places, self.slices, strict=True):
            _move_into(place.parameter, cut, self)

    def buffer(self, kind: TensorKind) -> Tensor:
        """The fp32 buffer that a checkpoint calls `kind`."""
        if kind == "ema":
            assert self.ema is not None, "this line has no moving average of its weights"
            return self.ema
        return {"weights": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[kind]

    def refresh_compute(self) -> None:
        """Round the masters into the parameters, if these are not the masters themselves."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


class FlatParameters:
    """All of a model's parameters in flat buffers. Building it moves them there, values unchanged."""

    def __init__(self, places: Sequence[ParameterPlace], with_ema: bool = False) -> None:
        names = dict.fromkeys(place.group for place in places)
        self.groups = tuple(FlatGroup(n, [place for place in places if place.group == n], with_ema) for n in names)
        self.has_ema = with_ema
        """Whether there are buffers for a moving average of the weights."""
        self.ema_begun = False
        """Whether that average has begun: from then on it is part of the line's state."""
        self.part_names = tuple(dict.fromkeys(part for group in self.groups for part in group.parts))
        """Parts in the order they appear in the buffers."""
        self.device = self.groups[0].master.device
        self.stretches: StretchTable | None = None
        """Made by the gradient norms on a GPU when they are first taken."""

    @property
    def elements(self) -> int:
        """Parameters of the model, gaps not counted."""
        return sum(cut.elements for group in self.groups for cut in group.slices)

    @property
    def kinds(self) -> tuple[TensorKind, ...]:
        """What a checkpoint of the present state holds: TENSOR_KINDS, and `ema` once that has begun."""
        return (*TENSOR_KINDS, "ema") if self.ema_begun else TENSOR_KINDS

    def export(self, kind: TensorKind) -> Arrays:
        """Host copies by parameter name, which later updates do not touch."""
        arrays: Arrays = {}
        for group in self.groups:
            # One copy of the whole buffer; the arrays are views of that copy.
            host = group.buffer(kind).detach().to("cpu", copy=True)
            arrays |= {cut.name: cut.of(host).numpy() for cut in group.slices}
        return arrays

    def refuse_other_shapes(self, kind: str, arrays: Mapping[str, npt.NDArray[np.float32]], where: str) -> None:
        """Raise `Refusal` naming the first parameter whose name, shape or dtype differs from the model's."""
        expected = {cut.name: cut.shape for group in self.groups for cut in group.slices}
        for name in sorted(expected.keys() | arrays.keys()):
            if name not in arrays:
                problem = "it is missing there"
            elif name not in expected:
                problem = "the model has no such parameter"
            elif tuple(arrays[name].shape) != expected[name]:
                problem = f"expected shape {list(expected[name])}, found {list(arrays[name].shape)}"
            elif arrays[name].dtype != np.float32:
                problem = f"expected float32, found {arrays[name].dtype}"
            else:
                continue
            raise Refusal(f"{where}: {kind} of parameter {name!r}: {problem}; it belongs to another model")

    def load(self, kind: TensorKind, arrays: Mapping[str, npt.NDArray[np.float32]], where: str) -> None:
        """Set one kind of tensor from arrays by parameter name. Raises `Refusal` before anything is changed.

        A moving average that is loaded has begun.
        """
        self.refuse_other_shapes(kind, arrays, where)
        for group in self.groups:
            for cut in group.slices:
                cut.of(group.buffer(kind)).copy_(torch.from_numpy(np.asarray(arrays[cut.name])))
            if kind == "weights":
                group.refresh_compute()
        self.ema_begun = self.ema_begun or kind == "ema"


def _lay_out(places: Sequence[ParameterPlace]) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    for place in places:
        first = _padded_end(slices[-1]) if slices else 0
        slices.append(Slice(place.name, place.part, tuple(place.parameter.shape), first))
    return tuple(slices)


def _padded_end(cut: Slice) -> int:
    return -(-(cut.first + cut.elements) // ALIGNMENT) * ALIGNMENT


def _part_extents(slices: Sequence[Slice], elements: int) -> dict[str, tuple[int, int]]:
    firsts = {cut.part: cut.first for cut in reversed(slices)}
    ordered = sorted(firsts.items(), key=lambda item: item[1])
    ends = [first for _, first in ordered[1:]] + [elements]
    return {part: (first, end) for (part, first), end in zip(ordered, ends, strict=True)}


def _move_into(parameter: nn.Parameter, cut: Slice, group: FlatGroup) -> None:
    """Make a parameter a view of its group's buffer and give it its gradient buffer."""
    with torch.no_grad():
        cut.of(group.master).copy_(parameter)
        if group.compute is not group.master:
            cut.of(group.compute).copy_(parameter)
        parameter.data = cut.of(group.compute)
    parameter.main_grad = cut.of(group.main_grad)  # type: ignore[attr-defined]
    parameter.register_post_accumulate_grad_hook(_add_to_main_grad)


def _add_to_main_grad(parameter: Tensor) -> None:
    """For gradients that reach autograd's `.grad`: the model's own operators add to main_grad by themselves."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
