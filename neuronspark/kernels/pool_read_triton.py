"""The pool read on a GPU: attention that never holds a row's scores, with the clock's gradient exact to fp32.

Passes (kernels in `pool_read_kernels.py`; contract and equations in `pool_read.py`):

    clock            fp64 sums over a row: every key's bias relative to its own 64-token block, every block's clock
    forward          a program a query block: online softmax over key blocks, the two parts of the address as two
                     products into one accumulator; writes the read and its log-sum-exp
    query gradient   a program a query block: inner_t = dread_t . read_t, dquery and the row sums of dlogit
    key gradient     a program a key block: dkey, dvalue and the column sums of dlogit
    step gradient    fp64 reverse sums of column - row over a row

Both gradient kernels recompute p and dp from the log-sum-exp: 4 a + 3 d multiply-adds a pair, seven products, against
the 3 a + 2 d, five products, of a single kernel (3.6 and 2.6 times the forward's a + d at 96 and 64). The single
kernel must add up every dquery over all key blocks: with atomics its bits change from run to run; in a fixed order
either each key block waits for its neighbour, or every one keeps a dquery of its own (256 of them at 32K). Here
every element has one owner, no two programs add to one address, and loops run in a fixed order: same input, same bits.

dlogit is formed by the same fp32 operations in both kernels, so that a pair adds to its row sum what it adds to its
column sum, and the two cancel in the clock's gradient wherever a step moves both.

Causality: blocks past the diagonal are never visited; the block on the diagonal has a loop of its own, which masks by
adding 0 or minus infinity. Programs with the longest loops start first; the blocks of one head are neighbours in the
grid, so that its keys and values stay in the L2 cache.

Floor: 2 (a + d) operations a pair forward, L (L + 1) / 2 pairs a head; inputs and outputs once are a few hundredths of
that time from 4096 tokens on. Memory beside inputs and outputs: five fp32 numbers a token and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from neuronspark.kernels import pool_read_kernels as kernels
from neuronspark.kernels.launch import ANY, CompileCase, Launch, pinned, register

PADDED_TOKENS = 128
"""Vectors of a number a token are padded to a multiple of this: the longest block of a kernel."""
DESCRIPTOR_BYTES = 16
"""What a tensor descriptor asks of a tensor's address and strides: multiples of this."""
SMALLEST_DOT = 16
GRID_LIMIT = 65_535
"""Programs that a grid has at most beyond its first direction: rows times heads of a launch."""


# --- launch configurations -----------------------------------------------------------------------------------


def _launches(*choices: tuple[int, int, int, int]) -> list[Launch]:
    """Of (BLOCK_QUERIES, BLOCK_KEYS, warps, stages)."""
    return [Launch({"BLOCK_QUERIES": q, "BLOCK_KEYS": k}, warps, stages) for q, k, warps, stages in choices]


CANDIDATES: dict[str, list[Launch]] = {
    "pool_read_forward/64": _launches(
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4)
    ),
    "pool_read_forward/128": _launches((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (128, 64, 8, 3)),
    "pool_read_forward/fp32": _launches((16, 16, 4, 1)),
    "pool_read_query_gradient/64": _launches(
        (64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 4)
    ),
    "pool_read_query_gradient/128": _launches((64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3)),
    "pool_read_query_gradient/fp32": _launches((16, 16, 8, 1)),
    "pool_read_key_gradient/64": _launches(
        (64, 64, 4, 3), (64, 128, 8, 3), (32, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 4)
    ),
    "pool_read_key_gradient/128": _launches((32, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3)),
    "pool_read_key_gradient/fp32": _launches((16, 16, 8, 1)),
}
"""By kernel and width class; the first of each, the fastest on an H200, is pinned. The block that a loop walks over
(keys in the forward and the query gradient, queries in the key gradient) divides the 64 tokens that share a reference,
and the other block. Blocks of queries of the forward and the query gradient are no shorter than the key gradient's,
which reads what they write of the padding. fp32 products are three of TF32 each (2^-22 of a product is lost): in plain
fp32 no tile is small enough to stay in registers."""

_LATER_CARDS = {"pool_read_key_gradient/64": _launches((64, 64, 8, 2))[0]}
"""What the cards after Hopper have in its place: with four warps it spills registers there."""
for _name, _candidates in CANDIDATES.items():
    register(_name, {ANY: _LATER_CARDS.get(_name, _candidates[0]), "sm_90": _candidates[0]})
CLOCK = register("pool_read_clock", {ANY: Launch({"BLOCKS": 32}, 8)})
"""BLOCKS: 64-token blocks that a step of the scan takes at once."""
STEP_GRADIENT = register("pool_read_step_gradient", {ANY: Launch({"BLOCK": 2048}, 8)})
"""BLOCK: tokens that a step of the scan takes at once."""

KERNELS = {
    "forward": kernels.forward_kernel,
    "query_gradient": kernels.query_gradient_kernel,
    "key_gradient": kernels.key_gradient_kernel,
}


def address_parts(width: int) -> tuple[int, int]:
    """The address's width as two: the largest power of two in it (at least 16), and the rest (0 if none)."""
    first = max(SMALLEST_DOT, 1 << (width.bit_length() - 1))
    return min(width, first), max(0, width - first)


def _block(width: int) -> int:
    """The power of two, at least 16, that a part is padded to on chip; 0 for no part."""
    return max(SMALLEST_DOT, int(triton.next_power_of_2(width))) if width else 0


def widths(address: int, value: int, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments that follow from the widths and the dtype."""
    width_0, width_1 = address_parts(address)
    return {
        "PART_0": _block(width_0),
        "WIDTH_0": width_0,
        "PART_1": _block(width_1),
        "WIDTH_1": width_1,
        "VALUE_BLOCK": _block(value),
        "VALUE": value,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }


def launch_name(kernel: str, constants: Mapping[str, Any]) -> str:
    """The registered name of a kernel's configuration: by dtype, then by the widest part."""
    if constants["PRECISION"] == "tf32x3":
        return f"pool_read_{kernel}/fp32"
    wide = max(constants["PART_0"], constants["VALUE_BLOCK"]) > 64
    return f"pool_read_{kernel}/{128 if wide else 64}"


# --- the operator --------------------------------------------------------------------------------------------


class Clock(NamedTuple):
    """What the attention kernels know of the clock and the write tags, in units of log2."""

    local: Tensor
    """[Z, P]: log2(e) (T_s - T at the first token of s's 64-token block + log w_s)."""
    high: Tensor
    """[Z, P / 64]: log2(e) T at the first token of every 64-token block, rounded to fp32."""
    low: Tensor
    """[Z, P / 64]: what the rounding left."""


class _PoolReadTriton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_BhLa: Tensor, key_BhLa: Tensor, value_BhLd: Tensor, step_BhL: Tensor, log_write_BhL: Tensor
    ) -> Tensor:
        query, key, value = _describable(query_BhLa), _describable(key_BhLa), _describable(value_BhLd)
        clock = run_clock(step_BhL, log_write_BhL)
        constants = widths(query_BhLa.shape[-1], value_BhLd.shape[-1], query_BhLa.dtype)
        read_BhLd, lse_ZP = run_forward(constants, query, key, value, clock)
        ctx.save_for_backward(query, key, value, *clock, read_BhLd, lse_ZP)
        ctx.constants = constants
        return read_BhLd

    @staticmethod
    def backward(ctx: Any, dread_BhLd: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *clock, read_BhLd, lse_ZP = ctx.saved_tensors
        same = (ctx.constants, query, key, value, Clock(*clock), lse_ZP, _describable(dread_BhLd))
        dquery_BhLa, inner_ZP, row_BhL = run_query_gradient(*same, read_BhLd)
        dkey_BhLa, dvalue_BhLd, column_BhL = run_key_gradient(*same, inner_ZP)
        return dquery_BhLa, dkey_BhLa, dvalue_BhLd, run_step_gradient(column_BhL, row_BhL), column_BhL


def pool_read_triton(query: Tensor, key: Tensor, value: Tensor, clock_step: Tensor, log_write: Tensor) -> Tensor:
    """`pool_read` on Triton's kernels; the same contract. Strides are taken as they are if the channels are dense."""
    inputs, rows_at_once = (query, key, value, clock_step, log_write), GRID_LIMIT // query.shape[1]
    if query.shape[0] <= rows_at_once:
        return _PoolReadTriton.apply(*inputs)
    pieces = zip(*(tensor.split(rows_at_once) for tensor in inputs), strict=True)
    return torch.cat([_PoolReadTriton.apply(*piece) for piece in pieces])


def _describable(tensor: Tensor) -> Tensor:
    """The tensor itself if a descriptor can stand for it, else a copy with its channels padded to a whole 16 bytes."""
    unit = DESCRIPTOR_BYTES // tensor.element_size()
    strides_fit = tensor.stride(-1) == 1 and all(step > 0 and step % unit == 0 for step in tensor.stride()[:-1])
    if strides_fit and tensor.data_ptr() % DESCRIPTOR_BYTES == 0:
        return tensor
    return functional.pad(tensor, (0, -tensor.shape[-1] % unit)).contiguous().clone()


# --- the passes ----------------------------------------------------------------------------------------------


def _grid(tensor_BhLc: Tensor, block_tokens: int) -> tuple[int, int]:
    """(blocks of a row, rows times heads)."""
    rows, heads, tokens = tensor_BhLc.shape[:3]
    return triton.cdiv(tokens, block_tokens), rows * heads


def _tiles(tensor_BhLc: Tensor, block_tokens: int, block_channels: int) -> TensorDescriptor:
    """The tensor, to be read in tiles of one row and head."""
    shape = [1, 1, block_tokens, block_channels]
    return TensorDescriptor(tensor_BhLc, list(tensor_BhLc.shape), list(tensor_BhLc.stride()), shape)


def _vectors(tensor_ZP: Tensor, block_tokens: int) -> TensorDescriptor:
    """Numbers a token, to be read a block of one row and head at a time."""
    return TensorDescriptor(tensor_ZP, list(tensor_ZP.shape), list(tensor_ZP.stride()), [1, block_tokens])


def _parts(tensor_BhLa: Tensor, block_tokens: int, constants: Mapping[str, Any]) -> list[TensorDescriptor]:
    """The address's two parts; the first twice if there is one only."""
    widths = (constants["PART_0"], constants["PART_1"] or constants["PART_0"])
    return [_tiles(tensor_BhLa, block_tokens, width) for width in widths]


def _values(tensor_BhLd: Tensor, block_tokens: int, constants: Mapping[str, Any]) -> TensorDescriptor:
    return _tiles(tensor_BhLd, block_tokens, constants["VALUE_BLOCK"])


def _empty(like: Tensor, *shape: int) -> Tensor:
    """fp32."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _dense(like_BhLc: Tensor, width: int) -> Tensor:
    """A contiguous tensor for a result of this many channels."""
    return torch.empty((*like_BhLc.shape[:3], width), dtype=like_BhLc.dtype, device=like_BhLc.device)


def _start(kernel: str, launch: Launch, constants: Mapping[str, Any], like_BhLc: Tensor, *arguments: Any) -> None:
    """Launch one of the attention kernels: a program a block of the side that it owns."""
    owned = launch.blocks["BLOCK_KEYS" if kernel == "key_gradient" else "BLOCK_QUERIES"]
    function, (_, heads, tokens) = KERNELS[kernel], like_BhLc.shape[:3]
    taken = {name: value for name, value in constants.items() if name in function.arg_names}
    padded = triton.cdiv(tokens, PADDED_TOKENS) * PADDED_TOKENS
    function[_grid(like_BhLc, owned)](*arguments, heads, tokens, padded, **taken, **launch.options())


def run_clock(step_BhL: Tensor, log_write_BhL: Tensor) -> Clock:
    """The clock and the write tags as the attention kernels take them."""
    rows, heads, tokens = step_BhL.shape
    padded = triton.cdiv(tokens, PADDED_TOKENS) * PADDED_TOKENS
    blocks = padded // kernels.REFERENCE_TOKENS.value
    local_ZP = _empty(step_BhL, rows * heads, padded)
    high_ZC, low_ZC = (_empty(step_BhL, rows * heads, blocks) for _ in range(2))
    kernels.clock_kernel[(rows * heads,)](
        step_BhL, log_write_BhL, local_ZP, high_ZC, low_ZC, *step_BhL.stride(), *log_write_BhL.stride(),
        heads, tokens, padded, **pinned(CLOCK, step_BhL.device).options(),
    )  # fmt: skip
    return Clock(local_ZP, high_ZC, low_ZC)


def run_forward(
    constants: Mapping[str, Any], query: Tensor, key: Tensor, value: Tensor, clock: Clock, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """The read [B, h, L, d], and its log2-sum-exp2 [Z, P] relative to the clock at the first query of 64 tokens."""
    launch = launch or pinned(launch_name("forward", constants), query.device)
    queries, keys = launch.blocks["BLOCK_QUERIES"], launch.blocks["BLOCK_KEYS"]
    read_BhLd, lse_ZP = _dense(value, constants["VALUE"]), torch.empty_like(clock.local)
    _start(
        "forward", launch, constants, query,
        *_parts(query, queries, constants), *_parts(key, keys, constants), _values(value, keys, constants),
        _vectors(clock.local, keys), clock.high, clock.low, read_BhLd, lse_ZP,
    )  # fmt: skip
    return read_BhLd, lse_ZP


def run_query_gradient(
    constants: Mapping[str, Any], query: Tensor, key: Tensor, value: Tensor, clock: Clock, lse_ZP: Tensor,
    dread: Tensor, read_BhLd: Tensor, launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dquery [B, h, L, a], dread_t . read_t [Z, P], and the row sums of dlogit [B, h, L]."""
    launch = launch or pinned(launch_name("query_gradient", constants), query.device)
    queries, keys = launch.blocks["BLOCK_QUERIES"], launch.blocks["BLOCK_KEYS"]
    dquery_BhLa = _dense(query, constants["WIDTH_0"] + constants["WIDTH_1"])
    inner_ZP, row_BhL = torch.empty_like(lse_ZP), _empty(query, *query.shape[:3])
    _start(
        "query_gradient", launch, constants, query,
        *_parts(query, queries, constants), *_parts(key, keys, constants), _values(value, keys, constants),
        _vectors(clock.local, keys), clock.high, clock.low, read_BhLd, lse_ZP,
        _values(dread, queries, constants), dquery_BhLa, inner_ZP, row_BhL,
    )  # fmt: skip
    return dquery_BhLa, inner_ZP, row_BhL


def run_key_gradient(
    constants: Mapping[str, Any], query: Tensor, key: Tensor, value: Tensor, clock: Clock, lse_ZP: Tensor,
    dread: Tensor, inner_ZP: Tensor, launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dkey [B, h, L, a], dvalue [B, h, L, d], and the column sums of dlogit [B, h, L]."""
    launch = launch or pinned(launch_name("key_gradient", constants), query.device)
    queries, keys = launch.blocks["BLOCK_QUERIES"], launch.blocks["BLOCK_KEYS"]
    dkey_BhLa = _dense(key, constants["WIDTH_0"] + constants["WIDTH_1"])
    dvalue_BhLd, column_BhL = _dense(value, constants["VALUE"]), _empty(query, *query.shape[:3])
    _start(
        "key_gradient", launch, constants, query,
        *_parts(query, queries, constants), *_parts(key, keys, constants), _values(value, keys, constants),
        clock.local, clock.high, clock.low, _vectors(lse_ZP, queries),
        _values(dread, queries, constants), _vectors(inner_ZP, queries),
        dkey_BhLa, dvalue_BhLd, column_BhL,
    )  # fmt: skip
    return dkey_BhLa, dvalue_BhLd, column_BhL


def run_step_gradient(column_BhL: Tensor, row_BhL: Tensor) -> Tensor:
    """Reverse cumulative sum of column - row over a row's tokens [B, h, L]."""
    rows, heads, tokens = column_BhL.shape
    dstep_BhL = torch.empty_like(column_BhL)
    options = pinned(STEP_GRADIENT, column_BhL.device).options()
    kernels.step_gradient_kernel[(rows * heads,)](column_BhL, row_BhL, dstep_BhL, tokens, **options)
    return dstep_BhL


# --- compiling without a GPU ---------------------------------------------------------------------------------

_COMPILED_WIDTHS = ((96, 64), (80, 64), (64, 32), (160, 128))
"""Address and value widths: the presets', and others a configuration may name."""


def compile_cases() -> list[CompileCase]:
    """Every kernel; the attention at the widths of the presets and their neighbours, and at one width in fp32."""
    shapes = [*((pair, torch.bfloat16) for pair in _COMPILED_WIDTHS), (_COMPILED_WIDTHS[0], torch.float32)]
    scans = ((CLOCK, kernels.clock_kernel), (STEP_GRADIENT, kernels.step_gradient_kernel))
    return [
        *(CompileCase(name, function, _scan_types(function)) for name, function in scans),
        *(compile_case_of(kernel, widths(*pair, dtype), dtype) for pair, dtype in shapes for kernel in KERNELS),
    ]


_COMPILED_SIZES = {"heads": 40, "tokens": 4096, "padded": 4096}


def _scan_types(function: Any) -> dict[str, str | int]:
    """fp32 tensors, then sizes, and the strides of logits [B, L, h] read as [B, h, L]."""
    tensors = dict.fromkeys(("step", "log_write", "local", "base_high", "base_low", "column", "row", "dstep"), "*fp32")
    strides = {
        f"{tensor}_{axis}": n for tensor in ("step", "write") for axis, n in (("b", 163840), ("h", 1), ("t", 40))
    }
    types: dict[str, str | int] = {**tensors, **_COMPILED_SIZES, **strides}
    return {name: types[name] for name in function.arg_names if name.islower()}


def compile_case_of(
    kernel: str, constants: Mapping[str, Any], dtype: torch.dtype, launch: Launch | None = None
) -> CompileCase:
    """The case of one kernel; a descriptor's type holds its block, so the case is for one launch configuration."""
    name = launch_name(kernel, constants)
    blocks = (launch or CANDIDATES[name][0]).blocks
    dense = "bf16" if dtype == torch.bfloat16 else "fp32"
    part_1 = constants["PART_1"] or constants["PART_0"]
    channels = {"0": constants["PART_0"], "1": part_1, "e": constants["VALUE_BLOCK"], "d": constants["VALUE_BLOCK"]}
    types: dict[str, str | int] = dict.fromkeys(
        ("local", "base_high", "base_low", "lse", "inner", "row_sum", "column_sum"), "*fp32"
    )
    types |= dict.fromkeys(("read", "dquery", "dkey", "dvalue"), f"*{dense}")
    types |= _COMPILED_SIZES
    for tile in ("query_0", "query_1", "key_0", "key_1", "value", "dread"):
        tokens = blocks["BLOCK_QUERIES" if tile.startswith(("query", "dread")) else "BLOCK_KEYS"]
        types[tile] = f"tensordesc<{dense}[1, 1, {tokens}, {channels[tile[-1]]}]>"
    walked = ("lse", "inner") if kernel == "key_gradient" else ("local",)
    tokens = blocks["BLOCK_QUERIES" if kernel == "key_gradient" else "BLOCK_KEYS"]
    types |= dict.fromkeys(walked, f"tensordesc<fp32[1, {tokens}]>")
    function = KERNELS[kernel]
    own = {name: kind for name, kind in types.items() if name in function.arg_names}
    return CompileCase(name, function, own, {k: v for k, v in constants.items() if k in function.arg_names})
