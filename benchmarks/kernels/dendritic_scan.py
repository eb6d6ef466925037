"""The dendritic scan at ns-2b's widths (80 heads of 64 compartments, 64 states, 1 group), bf16, forward and backward.

Shapes: 4 rows of 4096 tokens, 1 of 32,768, 64 of 256, 1 of 65,536. Bytes are the floor: v and y, b, c, the log decays
and factors once forward; v, dy, dv, b, c, db, dc, the decays, the factors and their gradients once backward. Operations
are the model's count, 2 (Q N + Q I + 2 I N) a token forward with Q = 64 and I = 5120, and twice that backward. Ours is
replayed from CUDA graphs, as the trainer runs it; "ours, states not saved" is the forward pass of evaluation.

Peer in the same run: flash-linear-attention's scalar-decay chunk operator (package `fla-core`, with `einops`),
`chunk_simple_gla` with q = C, k = B, v = x, g = the log decay. It takes C and B a head, has no factor and no skip:
"as is" is the operator alone on inputs that are so already, "in our place" adds what it takes to call it with our
inputs and get our gradients. Its results are compared with ours first. On Hopper with Triton 3.4 to 3.7.0 it refuses
its own gated backward as miscompiled (its issue 640); that is then lifted for the timing, and the line says so. Each of
its kernels chooses the fastest of at most 4 of its launch configurations, of four warps if it has any, since to compile
all takes minutes; it is timed at the first two shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Ceilings, Reading, forward_backward, milliseconds
from torch import Tensor

from neuronspark.kernels import dendritic_scan_triton_backward, dendritic_scan_triton_forward, launch
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.launch import Launch

SHAPES = ((4, 4096), (1, 32768), (64, 256), (1, 65536))
"""(rows, tokens)."""
HEADS, COMPARTMENTS, STATES = 80, 64, 64
PEER_SHAPES = SHAPES[:2]
"""Where the peer is timed."""
PEER_CONFIGURATIONS = 4
"""The most launch configurations that each of the peer's kernels is compiled and tuned with."""
COUNTED_CHUNK = 64
BF16_TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class _Case:
    """The operator's inputs at one shape."""

    rows: int
    tokens: int
    inputs: list[Tensor]
    """v, log_decay, factor, b, c, skip."""

    @property
    def forward_bytes(self) -> float:
        """Read and written once by a forward pass."""
        a_token = 2 * (2 * HEADS * COMPARTMENTS + 2 * STATES) + 4 * 2 * HEADS
        return self.rows * self.tokens * a_token

    @property
    def backward_bytes(self) -> float:
        """Read and written once by a backward pass."""
        a_token = 2 * (3 * HEADS * COMPARTMENTS + 4 * STATES) + 4 * 4 * HEADS
        return self.rows * self.tokens * a_token

    @property
    def forward_flops(self) -> float:
        """Of a forward pass, as the model counts them."""
        inner = HEADS * COMPARTMENTS
        return 2 * self.rows * self.tokens * (COUNTED_CHUNK * STATES + COUNTED_CHUNK * inner + 2 * inner * STATES)

    def reading(self, what: str, ms: float, backward: bool) -> Reading:
        """A time of this case, with its floors."""
        flops, moved = self.forward_flops, self.forward_bytes
        if backward:
            flops, moved = 3 * flops, moved + self.backward_bytes
        passes = "forward + backward" if backward else "forward"
        return Reading(f"{what}, {passes}, {self.rows} x {self.tokens}", ms, flops, moved)


def _case(rows: int, tokens: int) -> _Case:
    """Decays as at a model's start: e-folds of 2 to 1000 tokens, and one head in eight of 40K to 256K."""

    def normal(*widths: int) -> Tensor:
        return torch.randn(rows, tokens, *widths, device="cuda")

    slow = HEADS // 8
    efold = torch.cat((torch.logspace(0.3, 3, HEADS - slow), torch.logspace(4.6, 5.4, slow))).cuda()
    log_decay = -torch.exp(0.1 * normal(HEADS)) / efold
    factor = torch.exp(0.1 * normal(HEADS)) * efold.rsqrt()
    dense = [normal(HEADS, COMPARTMENTS), normal(1, STATES), normal(1, STATES) * STATES**-0.5]
    v, b, c = (tensor.bfloat16() for tensor in dense)
    inputs = (v, log_decay, factor, b, c, torch.ones(HEADS, device="cuda"))
    return _Case(rows, tokens, [tensor.requires_grad_() for tensor in inputs])


def _replayed(work: Callable[[], Any]) -> Callable[[], None]:
    """The work as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _times(case: _Case, what: str, function: Callable[..., Tensor], inputs: list[Tensor]) -> Iterator[Reading]:
    """Forward with what a backward needs, then both passes."""
    yield case.reading(what, milliseconds(_replayed(lambda: function(*inputs))), backward=False)
    yield case.reading(what, milliseconds(_replayed(forward_backward(function, inputs))), backward=True)


def _evaluation(inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return dendritic_scan(*inputs)


def measure(ceilings: Ceilings) -> Iterator[Reading]:
    """Every shape: ours, then the peer."""
    for rows, tokens in SHAPES:
        case = _case(rows, tokens)
        for what, readings in (
            ("dendritic scan", lambda case=case: _times(case, "dendritic scan", dendritic_scan, case.inputs)),
            ("dendritic scan, states not saved", lambda case=case: _not_saved(case)),
            ("fla", lambda case=case: _peer(case)),
        ):
            try:
                yield from readings()
            except Exception:
                print(f"{what} at {rows} x {tokens} FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
                torch.cuda.synchronize()
        del case
        torch.cuda.empty_cache()


def _not_saved(case: _Case) -> Iterator[Reading]:
    what = "dendritic scan, states not saved"
    yield case.reading(what, milliseconds(_replayed(lambda: _evaluation(case.inputs))), backward=False)


# --- the peer ------------------------------------------------------------------------------------------------


def _peer(case: _Case) -> Iterator[Reading]:
    """flash-linear-attention's operator, with and without what stands between it and our inputs."""
    if (case.rows, case.tokens) not in PEER_SHAPES:
        return
    try:
        with _few_configurations():
            chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    except ImportError as error:
        print(f"no peer: {error} (packages fla-core and einops)", flush=True)
        return

    def as_is(q: Tensor, k: Tensor, x: Tensor, log_decay: Tensor) -> Tensor:
        found: Tensor = chunk_simple_gla(q, k, x, log_decay, scale=1.0)[0]
        return found

    def in_our_place(v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
        q, k = (tensor.expand(-1, -1, HEADS, -1).contiguous() for tensor in (c, b))
        return as_is(q, k, (v * factor[..., None]).to(v.dtype), log_decay) + v * skip[:, None].to(v.dtype)

    note = _lift_refusal()
    _compare(case, in_our_place, note)
    v, log_decay, factor, b, c, _ = (tensor.detach() for tensor in case.inputs)
    q, k = (tensor.expand(-1, -1, HEADS, -1).contiguous() for tensor in (c, b))
    own = [q, k, (v * factor[..., None]).to(v.dtype), log_decay.clone()]
    yield from _times(case, f"  fla as is{note}", as_is, [tensor.requires_grad_() for tensor in own])
    yield from _times(case, f"  fla in our place{note}", in_our_place, case.inputs)


@contextlib.contextmanager
def _few_configurations() -> Iterator[None]:
    """Kernels that are defined inside keep `PEER_CONFIGURATIONS` of their launch configurations to choose from."""
    from triton.runtime.autotuner import Autotuner

    begin = Autotuner.__init__

    def begin_with_few(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        kept = [config for config in configs if config.num_warps == 4] or configs
        if len(kept) > PEER_CONFIGURATIONS:
            kept = [kept[index * len(kept) // PEER_CONFIGURATIONS] for index in range(PEER_CONFIGURATIONS)]
        begin(self, fn, arg_names, kept, *args, **kwargs)

    Autotuner.__init__ = begin_with_few
    try:
        yield
    finally:
        Autotuner.__init__ = begin


def _lift_refusal() -> str:
    """Have the peer run a backward that it holds to be miscompiled here; returns what to add to its name then."""
    utils = importlib.import_module("fla.utils")
    if not getattr(utils, "IS_NVIDIA_HOPPER", False) or getattr(utils, "TRITON_ABOVE_3_7_1", True):
        return ""
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True  # type: ignore[attr-defined]
    return " (miscompiled)"


def _compare(case: _Case, function: Callable[..., Tensor], note: str) -> None:
    """Print how far the peer's output and gradients are from ours."""
    gradient = torch.randn_like(case.inputs[0])
    results = []
    for scan in (dendritic_scan, function):
        y = scan(*case.inputs)
        results.append([y.detach(), *torch.autograd.grad(y, case.inputs, gradient)])
    names = ("y", "v", "log_decay", "factor", "b", "c", "skip")
    off = {
        name: float((theirs.double() - ours.double()).norm() / ours.double().norm())
        for name, ours, theirs in zip(names, *results, strict=True)
    }
    wrong = [name for name, error in off.items() if not error < BF16_TOLERANCE]
    print(f"fla{note} against ours: {', '.join(f'{name} {error:.1e}' for name, error in off.items())}", end="")
    print(f"; NOT THE SAME: {', '.join(wrong)}" if wrong else "", flush=True)


# --- candidates for the pinned configurations ----------------------------------------------------------------


def search() -> Iterator[tuple[str, Launch, float]]:
    """Forward + backward with each candidate in turn, the other kernels as pinned."""
    for rows, tokens in SHAPES[:2]:
        case = _case(rows, tokens)
        for module in (dendritic_scan_triton_forward, dendritic_scan_triton_backward):
            for name, candidates in module.CANDIDATES.items():
                for candidate in candidates:
                    launch.use({name: {launch.ANY: dataclasses.asdict(candidate)}})
                    try:
                        ms = milliseconds(_replayed(forward_backward(dendritic_scan, case.inputs)))
                        yield f"{name} {rows} x {tokens}", candidate, ms
                    except Exception as error:
                        print(f"{name} {candidate} FAILED: {error}", flush=True)
                    finally:
                        launch.use({})
