"""Step-by-step float64 recurrences of the model's equations, one token at a time, in plain autograd.

Written from the equations and independent of the package's operators: it imports nothing of them. Slow on purpose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Table = dict[str, Tensor]


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def release(u: Tensor, log_theta: Tensor, lo: int, hi: int, margin: float) -> Tensor:
    """theta * n, with the straight-through and learned-step-size gradients put in by hand."""
    theta = log_theta.exp()
    ratio = (u / theta).detach()
    n = torch.clamp(torch.round(ratio), lo, hi)
    inside = ((ratio > lo - margin) & (ratio < hi + margin)).to(u.dtype)
    return n * theta + inside * (u - u.detach()) - inside * ratio * (theta - theta.detach())


def dendritic(v: Tensor, log_decay: Tensor, factor: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """v [B,L,H,P], log_decay and factor [B,L,H], b and c [B,L,G,N] -> [B,L,H,P]."""
    rows, tokens, heads, width = v.shape
    group = [head // (heads // b.shape[2]) for head in range(heads)]
    state = v.new_zeros(rows, heads, width, b.shape[3])
    outputs = []
    for t in range(tokens):
        drive = factor[:, t, :, None, None] * v[:, t, :, :, None] * b[:, t, group, None, :]
        state = log_decay[:, t].exp()[..., None, None] * state + drive
        outputs.append((state * c[:, t, group, None, :]).sum(-1) + skip[:, None] * v[:, t])
    return torch.stack(outputs, 1)


def trace(u: Tensor, log_decay: Tensor) -> Tensor:
    c, outputs = torch.zeros_like(u[:, 0]), []
    for t in range(u.shape[1]):
        keep = log_decay[:, t].exp()
        c = keep * c + (1 - keep) * u[:, t]
        outputs.append(c)
    return torch.stack(outputs, 1)


def rope(x: Tensor, base: float) -> Tensor:
    """x [B,L,h,d], half-split pairs."""
    tokens, width = x.shape[1], x.shape[3]
    out = torch.empty_like(x)
    for i in range(width // 2):
        angle = torch.arange(tokens, dtype=torch.float64) * base ** (-2 * i / width)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., i], x[..., i + width // 2]
        out[..., i], out[..., i + width // 2] = a * cos - b * sin, a * sin + b * cos
    return out


def pool(query: Tensor, key: Tensor, value: Tensor, step: Tensor, log_write: Tensor) -> Tensor:
    """[B,h,L,*]: one query at a time, the clock's bias as T_s - T_t."""
    clock, reads = step.cumsum(-1), []
    for t in range(query.shape[2]):
        logits = (query[:, :, t, None] * key[:, :, : t + 1]).sum(-1)
        logits = logits - (clock[:, :, t, None] - clock[:, :, : t + 1]) + log_write[:, :, : t + 1]
        reads.append((logits.softmax(-1)[..., None] * value[:, :, : t + 1]).sum(2))
    return torch.stack(reads, 2)


def dendritic_layer(h: Tensor, p: Table, c) -> Tensor:
    """h [B,L,d]; p the layer's parameters; c the config."""
    lead, heads, width = h.shape[:2], c.dendritic_heads, c.dendritic_head_width
    x = rms(h, c.norm_eps) * p["norm"]
    z, v = x @ p["w_z"].T, (x @ p["w_v"].T).view(*lead, heads, width)
    bc = (x @ p["w_bc"].T).view(*lead, 2, c.state_groups, c.state_width)
    bc = rms(bc, c.norm_eps) * p["bc_gain"] + p["bc_bias"]
    dt = torch.log1p((x @ p["w_dt"].T + p["dt_bias"]).exp())
    decay = -p["a_log"].exp() * dt
    y = dendritic(v, decay, dt * p["input_gain"], bc[:, :, 0], bc[:, :, 1] / math.sqrt(c.state_width), p["skip"])
    m = y * (z * torch.sigmoid(z)).view_as(y)
    u = (rms(m, c.norm_eps)).flatten(2) * p["soma_norm"]
    s = release(u, p["log_threshold"], -c.spike_levels, c.spike_levels, c.surrogate_margin)
    return h + s @ p["w_out"].T


def hippocampal_layer(h: Tensor, p: Table, c) -> Tensor:
    rows, tokens, d = h.shape
    heads, width = c.pool_heads, c.pool_head_width
    levels, margin = c.spike_levels, c.surrogate_margin
    x = rms(h, c.norm_eps) * p["norm"]
    log_decay = -torch.log1p((x @ p["w_decay"].T + p["decay_bias"]).exp())
    xc = torch.cat((x, trace(x @ p["w_trace"].T, log_decay)), -1)

    def split(t: Tensor) -> Tensor:
        return t.view(rows, tokens, heads, width)

    q = rope(rms(split(xc @ p["w_q"].T), c.norm_eps) * p["query_gain"][:, None], c.rope_base).transpose(1, 2)
    k = rope(rms(split(xc @ p["w_k"].T), c.norm_eps), c.rope_base).transpose(1, 2)
    v = split(x @ p["w_v"].T).transpose(1, 2)
    match = rms(xc @ p["w_p"].T, c.norm_eps)
    controls = (x @ p["w_control"].T).view(rows, tokens, 4, heads)
    clock, write, copy, gain = (controls[:, :, i].transpose(1, 2) for i in range(4))
    T = torch.log1p((clock + p["clock_bias"][:, None]).exp()).cumsum(-1)
    tag = torch.sigmoid(write + p["write_bias"][:, None])

    reads = []
    for t in range(tokens):
        logits = []
        for s in range(t + 1):
            m = (match[:, t] * match[:, s - 1]).sum(-1) / c.match_width if s else match.new_zeros(rows)
            logits.append(
                4 * (q[:, :, t] * k[:, :, s]).sum(-1) / math.sqrt(width)
                + 2 * p["match_gain"] * m[:, None]
                - (T[:, :, t] - T[:, :, s])
                + tag[:, :, s].log()
            )
        weights = torch.stack(logits, -1).softmax(-1)
        reads.append((weights[..., None] * v[:, :, : t + 1]).sum(2))
    read = torch.stack(reads, 2)
    norms = read.norm(dim=-1).clamp(min=1e-6) * v.norm(dim=-1).clamp(min=1e-6)
    novelty = (1 - (read * v).sum(-1) / norms) / 2
    pi = torch.sigmoid(copy + p["copy_bias"][:, None] - p["novelty_weight"][:, None] * novelty)[..., None]
    g = torch.log1p((gain + p["read_gain_bias"][:, None]).exp())[..., None]
    mixed = (g * pi * read + (1 - pi) * v).transpose(1, 2).reshape(rows, tokens, d)
    h = h + (release(x @ p["w_gate"].T, p["gate_log_threshold"], 0, levels, margin) * mixed) @ p["w_o"].T
    if "memory_table" in p:
        h = h + memory(x, p, c)

    s = release(rms(h, c.norm_eps) * p["ffn_norm"], p["ffn_in_log_threshold"], -levels, levels, margin)
    gate = release(s @ p["w_ffn_gate"].T, p["ffn_gate_log_threshold"], 0, levels, margin)
    up = release(s @ p["w_ffn_up"].T, p["ffn_up_log_threshold"], -levels, levels, margin)
    return h + (gate * up) @ p["w_ffn_down"].T


def memory(x: Tensor, p: Table, c) -> Tensor:
    """What the product-key memory adds: every slot is scored, the best by (logit, lowest slot) are read."""
    query = (x @ p["w_memory_query"].T).view(*x.shape[:-1], c.memory_heads, 2, c.memory_query_width // 2)
    query = rms(query, c.norm_eps)
    keys = p["w_memory_keys"].view(c.memory_heads, 2, c.memory_keys, -1)
    score = (query[..., None, :] * keys).sum(-1)
    logit = (score[..., 0, :, None] + score[..., 1, None, :]).flatten(-2)
    slots = logit.detach().sort(dim=-1, descending=True, stable=True).indices[..., : c.memory_top_k]
    weights = torch.zeros_like(logit).scatter(-1, slots, logit.gather(-1, slots).softmax(-1))
    read = torch.einsum("...hs,sv->...v", weights, p["memory_table"])
    gate = torch.sigmoid(x @ p["w_memory_gate"].T + p["memory_gate_bias"])
    return gate * (read @ p["w_memory_out"].T)


def token_losses(tokens: Tensor, parameters: Table, c) -> Tensor:
    """Cross-entropy of each target [B, L], 0 where it is -100."""
    inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
    h = parameters["embedding"][inputs]
    for index, kind in enumerate(c.layers):
        prefix = f"layer{index:02d}."
        p = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        h = dendritic_layer(h, p, c) if kind == "D" else hippocampal_layer(h, p, c)
    logits = (rms(h, c.norm_eps) * parameters["norm"]) @ parameters["embedding"].T
    ce = logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return ce * (targets != -100)
