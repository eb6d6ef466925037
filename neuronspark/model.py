"""NeuronSpark: the embedding, a pattern of dendritic and hippocampal layers, and a tied head.

    h_0 = E[x];  h <- layer(h);  logits = RMSNorm(h) E^T

What a trainer may rely on:
- Parameters are leaves. Their `.data` may be pointed at other storage of the same shape and dtype at any time between
  calls; a parameter with an fp32 `main_grad` of its shape collects its gradient there (it is added), and its `.grad`
  stays None.
- `loss` and `token_losses` keep no state between calls, read nothing back from the device, draw no random numbers, and
  give the same bits for the same input, weights, device and thread count. A row's values do not depend on the other
  rows of its micro-batch except for rounding: matrix products over more tokens may sum in another order.
- A token of -100 carries no loss as a target and is read as token 0 as an input; a row of nothing but -100 adds exactly
  zero to every gradient.

Shapes: B rows, L tokens, T = B L, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from neuronspark import decoding, parameters, probe
from neuronspark.config import DENDRITIC, ModelConfig
from neuronspark.decoding import DecodingState
from neuronspark.dendritic import DendriticLayer, dendritic_specs
from neuronspark.hippocampal import HippocampalLayer, hippocampal_specs
from neuronspark.kernels.cross_entropy import IGNORED, linear_cross_entropy, token_cross_entropy
from neuronspark.kernels.embedding import lookup
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.rotary import rotary_table
from neuronspark.memory import memory_specs
from neuronspark.parameters import ParameterModule, ParameterSpec
from neuronspark.probe import Readings

EMBEDDING_STD = 0.02
RECOMPUTE_MODES = ("none", "dendritic", "all")


def layer_name(index: int) -> str:
    """The name of a layer's part and the prefix of its parameters: layer00, layer01, ..."""
    return f"layer{index:02d}"


def parameter_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every parameter of the model by its full name, in the order of `named_parameters()`."""
    width = config.width
    specs = {
        "embedding": ParameterSpec((config.vocab_size, width), "embedding", parameters.normal(EMBEDDING_STD)),
        "norm": ParameterSpec((width,), "norm", parameters.constant(1.0)),
    }
    for index, kind in enumerate(config.layers):
        layer = dendritic_specs(config) if kind == DENDRITIC else hippocampal_specs(config)
        if index in config.memory_layers:
            layer = {**layer, **memory_specs(config)}
        specs.update({f"{layer_name(index)}.{name}": spec for name, spec in layer.items()})
    return specs


class NeuronSpark(ParameterModule):
    """The model of a config on a device; `compute_dtype` holds matrices and activations (fp32 on a CPU, bf16 on a GPU).

    Starting values are a function of (seed, parameter name, config) alone; see parameters.py. Without a seed they are
    left to whoever loads them; on the meta device the parameters have shapes and no values.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        *,
        seed: int | None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.compute_dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        self._recompute = "none"
        specs = parameter_specs(config)

        def add(module: ParameterModule, prefix: str, names: list[str]) -> None:
            table = {name: specs[prefix + name] for name in names}
            parameters.add_parameters(
                module, table, prefix=prefix, seed=seed, device=device, compute_dtype=self.compute_dtype
            )

        add(self, "", ["embedding", "norm"])
        for index, kind in enumerate(config.layers):
            has_memory = index in config.memory_layers
            layer = DendriticLayer(config) if kind == DENDRITIC else HippocampalLayer(config, has_memory)
            prefix = f"{layer_name(index)}."
            add(layer, prefix, [name.removeprefix(prefix) for name in specs if name.startswith(prefix)])
            self.add_module(layer_name(index), layer)
        table = rotary_table(
            config.rope_max_seq_len,
            config.pool_head_width,
            config.rope_base,
            device,
            torch.promote_types(self.compute_dtype, torch.float32),
        )
        self.register_buffer("rotary", table, persistent=False)
        self._groups = self._partition({name: spec.group for name, spec in specs.items()}, "group")
        self._parts = self._partition({name: name.partition(".")[0] for name in specs}, "part")

    # --- what the parameters are ---------------------------------------------------------------------------

    def _partition(self, label_of: dict[str, str], kind: str) -> dict[str, list[str]]:
        """Names by label, in the parameters' order; raises if they are not exactly the model's parameters."""
        names = [name for name, _ in self.named_parameters()]
        if sorted(names) != sorted(label_of):
            strays = sorted(set(names) ^ set(label_of))
            raise RuntimeError(f"every parameter needs exactly one {kind}; these do not have it: {', '.join(strays)}")
        partition: dict[str, list[str]] = {}
        for name in names:
            partition.setdefault(label_of[name], []).append(name)
        return partition

    def groups(self) -> dict[str, list[str]]:
        """Optimizer groups (those of parameters.GROUPS that are not empty) and the names of their parameters."""
        return {group: list(self._groups[group]) for group in parameters.GROUPS if group in self._groups}

    def parts(self) -> dict[str, list[str]]:
        """Named parts (layer00, layer01, ..., embedding, norm) and the names of their parameters."""
        return {part: list(names) for part, names in sorted(self._parts.items(), key=_layers_first)}

    # --- settings ------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Recompute all that is derived from weights: nothing is, in this precision, so there is nothing to do.

        Trainers call it whenever weights have changed outside the model (an optimizer step, a load, a swap).
        """

    def recompute(self, mode: str) -> None:
        """Which layers keep only their input for the backward and run again in it: none, dendritic or all.

        The gradients' bits do not depend on it. Raises ValueError for another mode.
        """
        if mode not in RECOMPUTE_MODES:
            raise ValueError(f"recompute mode {mode!r}: expected one of {', '.join(RECOMPUTE_MODES)}")
        self._recompute = mode

    # --- decoding ------------------------------------------------------------------------------------------

    def initial_state(self, rows: int) -> DecodingState:
        """The state before the first token of `rows` rows."""
        return decoding.initial_state(self, rows)

    def step(self, token: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read one more token [B] of every row: the next token's logits [B, V] and the state after it.

        Equal to the parallel form; see decoding.py.
        """
        return decoding.step(self, token, state)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, DecodingState]:
        """Read the first L tokens [B, L] of every row at once: the logits [B, V] after the last, and that state."""
        return decoding.prefill(self, tokens)

    # --- probes --------------------------------------------------------------------------------------------

    def probe(self, tokens: Tensor, eos_id: int, train_length: int, *, attention: bool = True) -> Readings:
        """What the layers do on rows [B, L + 1], by part and reading, [rows, members] each; see probe.py."""
        return probe.probe(self, tokens, eos_id, train_length, attention=attention)

    def probe_members(self) -> dict[str, dict[str, int]]:
        """What `probe` gives of this model: by part and reading, the number of members; see `probe.probe_members`."""
        return probe.probe_members(self.config)

    def absent_readings(self) -> dict[str, str]:
        """The readings that this model never has, and why; names as in `probe.reading_names`."""
        return probe.absent_readings(self.config)

    # --- computation ---------------------------------------------------------------------------------------

    def loss(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """scale * sum of the token losses of rows [B, L + 1] (inputs are [:, :-1], targets [:, 1:]), and its terms.

        `scale` is a one-element fp32 tensor on the model's device. The terms are unscaled sums over the real targets,
        without a gradient: `ce_sum`, the cross-entropies in nats, and, with a z-loss in the config, `z_sum`, the
        weighted squares of the log-sum-exp; scale * (ce_sum + z_sum) is the loss.
        """
        h_Td, targets_T = self._final_hidden(tokens)
        z_weight = self.config.z_loss_weight
        loss, ce_sum, z_sum = linear_cross_entropy(h_Td, self.embedding, targets_T, scale, z_weight)
        return loss, {"ce_sum": ce_sum, "z_sum": z_sum} if z_weight else {"ce_sum": ce_sum}

    @torch.no_grad()
    def token_losses(self, tokens: Tensor) -> Tensor:
        """The cross-entropy in nats of each target of rows [B, L + 1]: [B, L] in fp32, 0 where the target is -100."""
        h_Td, targets_T = self._final_hidden(tokens)
        return token_cross_entropy(h_Td, self.embedding, targets_T).view(tokens.shape[0], -1)

    def _final_hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised hidden states [T, d] of the inputs, and the targets [T]."""
        h_Td, row_tokens = self.embed(tokens), tokens.shape[1] - 1
        for index, kind in enumerate(self.config.layers):
            h_Td = self._run_layer(index, kind, h_Td, row_tokens)
        return rms_norm(h_Td, tapped(self.norm), self.config.norm_eps), tokens[:, 1:].reshape(-1)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream [T, d] before the first layer, of the inputs of rows [B, L + 1].

        Raises ValueError for rows of no input or of more than the longest.
        """
        row_tokens = tokens.shape[-1] - 1
        if tokens.dim() != 2 or not 1 <= row_tokens <= self.config.rope_max_seq_len:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}: expected [rows, L + 1] with L from 1 to "
                f"rope_max_seq_len ({self.config.rope_max_seq_len})"
            )
        inputs_T = tokens[:, :-1].reshape(-1)
        return lookup(self.embedding, torch.where(inputs_T == IGNORED, 0, inputs_T))

    def _run_layer(self, index: int, kind: str, h_Td: Tensor, row_tokens: int) -> Tensor:
        layer: Callable[..., Tensor] = self.get_submodule(layer_name(index))
        run = partial(layer, row_tokens=row_tokens)
        if kind != DENDRITIC:
            run = partial(run, rotary=self.rotary)
        if not torch.is_grad_enabled() or self._recompute == "none":
            return run(h_Td)
        if self._recompute == "dendritic" and kind != DENDRITIC:
            return run(h_Td)
        return checkpoint(run, h_Td, use_reentrant=False, preserve_rng_state=False)


def _layers_first(part: tuple[str, list[str]]) -> tuple[bool, str]:
    """Sort key: layer00, layer01, ... and then the parts that are not layers, by name."""
    return not part[0].startswith("layer"), part[0]
