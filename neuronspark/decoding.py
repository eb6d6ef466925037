"""One-token decoding: the model as a recurrence, equal to its parallel form.

A layer's equations and parameters stay in the layer. Only what it does along a row is exchanged for an operator that
goes on from a state and leaves the state after it:

    dendritic      potentials V [B, H, P, N]                                     constant size
    hippocampal    trace [B, K], the last token's match projection [B, r]        constant size
                   the pool: keys, values, clocks and write tags of the events   grows by one event a token

`prefill` runs the parallel operators over whole rows and keeps what they end with; `step` reads one token more. A state
is a value: it may be kept and gone on from as often as one likes. The pool's tensors are shared between the states that
follow each other (see `Pool`), so a token costs no copy of the past.

Potentials and trace are at least fp32. Clocks are fp64: a step reads their differences, which are small beside the sums
of a long row.

Shapes: B rows, L tokens, T = B L, d width, V vocabulary; H heads, P compartments, N states, G groups of a dendritic
layer; h heads, e events, a address width, K trace channels, r match width of a hippocampal layer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuronspark.dendritic import DendriticLayer
from neuronspark.hippocampal import WholeRows
from neuronspark.kernels.cross_entropy import IGNORED
from neuronspark.kernels.dendritic_scan import dendritic_scan
from neuronspark.kernels.embedding import lookup
from neuronspark.kernels.exponential import LOWEST_LOG
from neuronspark.kernels.gradient import at_least_fp32, tapped
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.trace_scan import log_decay, trace_scan

if TYPE_CHECKING:
    from neuronspark.model import NeuronSpark

FIRST_CAPACITY_EVENTS = 64
"""Events that a pool has room for at first; each time it is full its room doubles."""


# --- states --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Buffers:
    """The tensors behind one or more pools, of capacity C; only what lies beyond `filled` events is ever written."""

    key: Tensor
    """[B, h, C, a]"""
    value: Tensor
    """[B, h, C, d]"""
    clock: Tensor
    """T, the summed clock steps: [B, h, C], fp64"""
    log_write: Tensor
    """[B, h, C]"""
    filled: int = 0
    """Events of the longest pool in here."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four."""
        return self.key, self.value, self.clock, self.log_write


@dataclasses.dataclass(frozen=True)
class Pool:
    """The first `events` events of every row, in buffers of capacity C >= events.

    Appending gives a new pool. It writes behind the events, into the same buffers, if nothing lies there yet; a pool
    that is full, or was appended to before, is copied into buffers of twice the size first. So an old pool keeps its
    events whatever follows, and a row of L tokens copies less than 2 L events in all.
    """

    buffers: _Buffers
    events: int

    @classmethod
    def empty(cls, rows: int, heads: int, address_width: int, value_width: int, like: Tensor) -> Pool:
        """A pool without events, with keys and values in the dtype and on the device of `like`."""
        shape = (rows, heads, FIRST_CAPACITY_EVENTS)
        return cls(
            _Buffers(
                like.new_empty(*shape, address_width),
                like.new_empty(*shape, value_width),
                like.new_empty(shape, dtype=torch.float64),
                like.new_empty(shape, dtype=at_least_fp32(like[:0]).dtype),
            ),
            events=0,
        )

    def append(self, key_BhLa: Tensor, value_BhLd: Tensor, clock_step_BhL: Tensor, log_write_BhL: Tensor) -> Pool:
        """The pool with L more events; their clocks go on from the last event's."""
        end = self.events + key_BhLa.shape[2]
        clock_BhL = clock_step_BhL.double().cumsum(2)
        if self.events:
            clock_BhL += self.buffers.clock[:, :, self.events - 1, None]
        buffers = self._with_room(end)
        for buffer, added in zip(buffers.tensors, (key_BhLa, value_BhLd, clock_BhL, log_write_BhL), strict=True):
            buffer[:, :, self.events : end] = added
        buffers.filled = end
        return Pool(buffers, end)

    def _with_room(self, end: int) -> _Buffers:
        """Buffers that hold this pool's events, reach up to `end`, and hold nothing behind the events."""
        capacity = self.buffers.clock.shape[2]
        if self.buffers.filled == self.events and end <= capacity:
            return self.buffers
        capacity = max(capacity, end, 2 * self.events)

        def grown(tensor: Tensor) -> Tensor:
            larger = tensor.new_empty(*tensor.shape[:2], capacity, *tensor.shape[3:])
            larger[:, :, : self.events] = tensor[:, :, : self.events]
            return larger

        key, value, clock, log_write = map(grown, self.buffers.tensors)
        return _Buffers(key, value, clock, log_write)

    def read(self, query_Bha: Tensor) -> Tensor:
        """What a query of the last event reads from all events: [B, h, d]; the equation is in kernels/pool_read.py."""
        key, value, clock, log_write = (tensor[:, :, : self.events] for tensor in self.buffers.tensors)
        since_Bhe = (clock[:, :, -1:] - clock).to(log_write.dtype)
        logits_Bhe = torch.matmul(at_least_fp32(key), at_least_fp32(query_Bha)[..., None])[..., 0]
        weights_Bhe = (logits_Bhe - since_Bhe + log_write).softmax(2)
        return torch.matmul(weights_Bhe.to(value.dtype)[:, :, None], value)[:, :, 0]


@dataclasses.dataclass(frozen=True)
class HippocampalState:
    """A hippocampal layer after some tokens."""

    trace: Tensor
    """[B, K]"""
    preceding: Tensor
    """The last token's match projection p, 0 before the first: [B, r]"""
    pool: Pool


@dataclasses.dataclass(frozen=True)
class DecodingState:
    """The model after the first tokens of B rows."""

    rows: int
    tokens: int
    """Tokens of each row read so far; also the position of the next one."""
    layers: tuple[Tensor | HippocampalState, ...]
    """Each layer's state; of a dendritic layer its potentials [B, H, P, N]."""


def initial_state(model: NeuronSpark, rows: int) -> DecodingState:
    """The state before the first token of `rows` rows. Raises ValueError for fewer than one."""
    if rows < 1:
        raise ValueError(f"rows is {rows}: expected at least 1")
    config, table = model.config, model.embedding.detach()
    fp32_or_more = torch.promote_types(table.dtype, torch.float32)
    states: list[Tensor | HippocampalState] = []
    for layer in model.children():
        if isinstance(layer, DendriticLayer):
            shape = (rows, config.dendritic_heads, config.dendritic_head_width, config.state_width)
            states.append(table.new_zeros(shape, dtype=fp32_or_more))
        else:
            address_width = config.pool_head_width + config.match_width
            pool = Pool.empty(rows, config.pool_heads, address_width, config.pool_head_width, table)
            trace_BK = table.new_zeros(rows, config.trace_width, dtype=fp32_or_more)
            states.append(HippocampalState(trace_BK, table.new_zeros(rows, config.match_width), pool))
    return DecodingState(rows, 0, tuple(states))


# --- what a layer does along a row, from a state to a state ----------------------------------------------------


class _DendriticStep:
    """The dendritic recurrence of kernels/dendritic_scan.py for one token; `state` becomes the potentials after it."""

    def __init__(self, state_BHPN: Tensor) -> None:
        self.state = state_BHPN

    def __call__(
        self, v_B1HP: Tensor, log_decay_B1H: Tensor, factor_B1H: Tensor, b_B1GN: Tensor, c_B1GN: Tensor, skip_H: Tensor
    ) -> Tensor:
        """V <- exp(a) V + (f v) (x) B;  y = V C + skip v."""
        v_BHP = v_B1HP[:, 0]
        b_BHN, c_BHN = (_by_head(part[:, 0], v_BHP.shape[1]) for part in (b_B1GN, c_B1GN))
        drive_BHP = factor_B1H[:, 0, :, None] * v_BHP
        kept = log_decay_B1H[:, 0].exp()[..., None, None] * self.state
        self.state = torch.addcmul(kept, drive_BHP[..., None], b_BHN[:, :, None].to(kept.dtype))
        y_BHP = torch.matmul(self.state, c_BHN[..., None].to(kept.dtype))[..., 0] + skip_H[:, None] * v_BHP
        return y_BHP[:, None].to(v_B1HP.dtype)


class _DendriticRow:
    """The parallel scan from a row's start; `state` becomes the potentials after its last token."""

    def __init__(self, empty_BHPN: Tensor) -> None:
        self.state = empty_BHPN

    def __call__(
        self, v_BLHP: Tensor, log_decay_BLH: Tensor, factor_BLH: Tensor, b_BLGN: Tensor, c_BLGN: Tensor, skip_H: Tensor
    ) -> Tensor:
        """y, and V_L = sum over t of exp(a_{t+1} + ... + a_L) (f_t v_t) (x) B_t."""
        a_BLH = log_decay_BLH.double().clamp(min=LOWEST_LOG)
        since_BLH = a_BLH.flip(1).cumsum(1).flip(1) - a_BLH
        factor_BLH1 = (factor_BLH * since_BLH.exp().to(factor_BLH.dtype))[..., None]
        b_BHLN = _by_head(b_BLGN, v_BLHP.shape[2]).transpose(1, 2).to(self.state.dtype)
        self.state = torch.matmul((v_BLHP * factor_BLH1).permute(0, 2, 3, 1), b_BHLN)
        return dendritic_scan(v_BLHP, log_decay_BLH, factor_BLH, b_BLGN, c_BLGN, skip_H)


def _by_head(tensor_xGN: Tensor, heads: int) -> Tensor:
    """B or C of every head instead of every group: [..., H, N]."""
    return tensor_xGN.repeat_interleave(heads // tensor_xGN.shape[-2], -2)


class _HippocampalStep:
    """A hippocampal layer's row operators for one token; what they leave is in `after`."""

    def __init__(self, before: HippocampalState) -> None:
        self.after = before

    def trace(self, u_B1K: Tensor, logit_B1K: Tensor, bias_K: Tensor) -> Tensor:
        """c <- lambda c + (1 - lambda) u."""
        log_decay_B1K = log_decay(logit_B1K, bias_K)
        kept = log_decay_B1K[:, 0].exp() * self.after.trace
        trace_BK = torch.addcmul(kept, log_decay_B1K[:, 0].expm1(), at_least_fp32(u_B1K[:, 0]), value=-1)
        self.after = dataclasses.replace(self.after, trace=trace_BK)
        return trace_BK[:, None].to(u_B1K.dtype)

    def preceding(self, p_B1r: Tensor) -> Tensor:
        """The p of the token before."""
        before_Br = self.after.preceding
        self.after = dataclasses.replace(self.after, preceding=p_B1r[:, 0])
        return before_Br

    def read(
        self, query_Bh1a: Tensor, key_Bh1a: Tensor, v_Bh1d: Tensor, clock_step_Bh1: Tensor, log_write_Bh1: Tensor
    ) -> Tensor:
        """The token's event joins the pool, its query reads from all events, its own included."""
        pool = self.after.pool.append(key_Bh1a, v_Bh1d, clock_step_Bh1, log_write_Bh1)
        self.after = dataclasses.replace(self.after, pool=pool)
        return pool.read(query_Bh1a[:, :, 0])[:, :, None]


class _HippocampalRow:
    """The parallel row operators from a row's start; what they leave is in `after`."""

    def __init__(self, empty: HippocampalState) -> None:
        self.after = empty

    def trace(self, u_BLK: Tensor, logit_BLK: Tensor, bias_K: Tensor) -> Tensor:
        """The parallel trace, in at least fp32 until the state is kept."""
        trace_BLK = trace_scan(at_least_fp32(u_BLK), log_decay(logit_BLK, bias_K))
        self.after = dataclasses.replace(self.after, trace=trace_BLK[:, -1].clone())
        return trace_BLK.to(u_BLK.dtype)

    def preceding(self, p_BLr: Tensor) -> None:
        """None: rows start here."""
        self.after = dataclasses.replace(self.after, preceding=p_BLr[:, -1].clone())

    def read(
        self, query_BhLa: Tensor, key_BhLa: Tensor, v_BhLd: Tensor, clock_step_BhL: Tensor, log_write_BhL: Tensor
    ) -> Tensor:
        """The parallel read; all events join the pool."""
        pool = self.after.pool.append(key_BhLa, v_BhLd, clock_step_BhL, log_write_BhL)
        self.after = dataclasses.replace(self.after, pool=pool)
        return WholeRows.read(query_BhLa, key_BhLa, v_BhLd, clock_step_BhL, log_write_BhL)


# --- the model -----------------------------------------------------------------------------------------------


@torch.no_grad()
def step(model: NeuronSpark, token_B: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
    """Read one more token of every row: the next token's logits [B, V], at least fp32, and the state after it.

    In float64 the logits are the parallel form's to rounding. A token of -100 is read as token 0. Raises ValueError for
    another number of rows than the state's, and once `rope_max_seq_len` tokens have been read.
    """
    longest = model.config.rope_max_seq_len
    if token_B.shape != (state.rows,):
        raise ValueError(f"token has shape {tuple(token_B.shape)}: expected one token of each of {state.rows} rows")
    if state.tokens >= longest:
        raise ValueError(f"{state.tokens} tokens have been read: the rows are full (rope_max_seq_len is {longest})")
    rotary = model.rotary[:, state.tokens : state.tokens + 1]
    h_Bd, layers = _run(model, token_B, 1, rotary, state, _DendriticStep, _HippocampalStep)
    return _logits(model, h_Bd), DecodingState(state.rows, state.tokens + 1, layers)


@torch.no_grad()
def prefill(model: NeuronSpark, tokens_BL: Tensor) -> tuple[Tensor, DecodingState]:
    """Read the first L tokens of every row at once: the logits [B, V] after the last, and the state there.

    The same as L steps, up to rounding, at the parallel form's speed. Raises ValueError for rows of no tokens or of
    more than `rope_max_seq_len`.
    """
    longest = model.config.rope_max_seq_len
    if tokens_BL.dim() != 2 or not 1 <= tokens_BL.shape[1] <= longest:
        raise ValueError(
            f"tokens have shape {tuple(tokens_BL.shape)}: expected [rows, L] with L from 1 to "
            f"rope_max_seq_len ({longest})"
        )
    rows, row_tokens = tokens_BL.shape
    empty = initial_state(model, rows)
    h_Td, layers = _run(model, tokens_BL.reshape(-1), row_tokens, model.rotary, empty, _DendriticRow, _HippocampalRow)
    last_Bd = h_Td.unflatten(0, (rows, row_tokens))[:, -1]
    return _logits(model, last_Bd), DecodingState(rows, row_tokens, layers)


def _run(
    model: NeuronSpark,
    tokens_T: Tensor,
    row_tokens: int,
    rotary: Tensor,
    before: DecodingState,
    scan_from: type[_DendriticStep] | type[_DendriticRow],
    along_from: type[_HippocampalStep] | type[_HippocampalRow],
) -> tuple[Tensor, tuple[Tensor | HippocampalState, ...]]:
    """Hidden states [T, d] after all layers, and the layers' states after the tokens."""
    h_Td = lookup(model.embedding, torch.where(tokens_T == IGNORED, 0, tokens_T))
    after: list[Tensor | HippocampalState] = []
    for layer, state in zip(model.children(), before.layers, strict=True):
        if isinstance(state, Tensor):
            scan = scan_from(state)
            h_Td = layer(h_Td, row_tokens, scan)
            after.append(scan.state)
        else:
            along = along_from(state)
            h_Td = layer(h_Td, row_tokens, rotary, along)
            after.append(along.after)
    return h_Td, tuple(after)


def _logits(model: NeuronSpark, h_Bd: Tensor) -> Tensor:
    x_Bd = rms_norm(h_Bd, tapped(model.norm), model.config.norm_eps)
    return at_least_fp32(torch.mm(x_Bd, model.embedding.t()))
