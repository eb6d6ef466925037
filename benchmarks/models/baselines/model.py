"""A baseline: the embedding, a pattern of layers of two kinds, and a tied head.

    h_0 = E[x];  h <- layer(h);  logits = RMSNorm(h) E^T

It keeps the promises to a trainer that `neuronspark.model` lists. There is no one-token decoding: baselines are trained
and measured. Shapes: B rows, L tokens, T = B L, w width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from baselines.attention import AttentionLayer, attention_specs
from baselines.config import ATTENTION, STATE_SPACE, ModelConfig
from baselines.state_space import StateSpaceLayer, state_space_specs
from neuronspark import parameters
from neuronspark.kernels.cross_entropy import IGNORED, linear_cross_entropy, token_cross_entropy
from neuronspark.kernels.embedding import lookup
from neuronspark.kernels.gradient import tapped
from neuronspark.kernels.rmsnorm import rms_norm
from neuronspark.kernels.rotary import rotary_table
from neuronspark.parameters import ParameterModule, ParameterSpec

EMBEDDING_STD = 0.02
RECOMPUTED = {"none": "", "dendritic": STATE_SPACE, "all": ATTENTION + STATE_SPACE}
"""The kinds of layer that a mode of recomputation runs again; state spaces are what dendritic layers are."""


def layer_name(index: int) -> str:
    """The name of a layer's part and the prefix of its parameters: layer00, layer01, ..."""
    return f"layer{index:02d}"


def parameter_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every parameter of the model by its full name, in the order of `named_parameters()`."""
    specs = {
        "embedding": ParameterSpec((config.vocab_size, config.width), "embedding", parameters.normal(EMBEDDING_STD)),
        "norm": ParameterSpec((config.width,), "norm", parameters.constant(1.0)),
    }
    for index, kind in enumerate(config.layers):
        layer = attention_specs(config) if kind == ATTENTION else state_space_specs(config)
        specs.update({f"{layer_name(index)}.{name}": spec for name, spec in layer.items()})
    return specs


class Baseline(ParameterModule):
    """The model of a config on a device; `compute_dtype` holds matrices and activations (fp32 on a CPU, bf16 on a GPU).

    Starting values are a function of (seed, parameter name, config) alone; without a seed, and on the meta device,
    there are none.
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
        self._recomputed = ""
        self._specs = parameter_specs(config)
        self._add("", self, seed, device)
        for index, kind in enumerate(config.layers):
            layer = AttentionLayer(config) if kind == ATTENTION else StateSpaceLayer(config)
            self._add(f"{layer_name(index)}.", layer, seed, device)
            self.add_module(layer_name(index), layer)
        self.rotary: Tensor | None
        table = None
        if ATTENTION in config.layers:
            table_dtype = torch.promote_types(self.compute_dtype, torch.float32)
            table = rotary_table(config.rope_max_seq_len, config.head_width, config.rope_base, device, table_dtype)
        self.register_buffer("rotary", table, persistent=False)

    def _add(self, prefix: str, module: ParameterModule, seed: int | None, device: torch.device) -> None:
        """Register the parameters whose names are `prefix` and a last part."""
        names = [name for name in self._specs if name[: name.rfind(".") + 1] == prefix]
        table = {name.removeprefix(prefix): self._specs[name] for name in names}
        parameters.add_parameters(
            module, table, prefix=prefix, seed=seed, device=device, compute_dtype=self.compute_dtype
        )

    # --- what the parameters are ---------------------------------------------------------------------------

    def groups(self) -> dict[str, list[str]]:
        """Optimizer groups (those of parameters.GROUPS that are not empty) and the names of their parameters."""
        named = {group: [n for n, spec in self._specs.items() if spec.group == group] for group in parameters.GROUPS}
        return {group: names for group, names in named.items() if names}

    def parts(self) -> dict[str, list[str]]:
        """Named parts (embedding, norm, layer00, layer01, ...) and the names of their parameters."""
        parts: dict[str, list[str]] = {}
        for name in self._specs:
            parts.setdefault(name.partition(".")[0], []).append(name)
        return parts

    # --- settings ------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Recompute what is derived from the weights: nothing is."""

    def recompute(self, mode: str) -> None:
        """Which layers keep only their input for the backward and run again in it: none, dendritic or all.

        The gradients' bits do not depend on it. Raises ValueError for another mode.
        """
        if mode not in RECOMPUTED:
            raise ValueError(f"recompute mode {mode!r}: expected one of {', '.join(RECOMPUTED)}")
        self._recomputed = RECOMPUTED[mode]

    # --- probes --------------------------------------------------------------------------------------------

    def absent_readings(self) -> dict[str, str]:
        """The kinds of readings that this model does not have, and why."""
        return dict.fromkeys(("dendritic/*", "hippocampal/*"), "a baseline has no layers of NeuronSpark's")

    # --- computation ---------------------------------------------------------------------------------------

    def loss(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """scale * sum of the token losses of rows [B, L + 1] (inputs are [:, :-1], targets [:, 1:]), and its terms.

        `scale` is a one-element fp32 tensor on the model's device. The term `ce_sum` is the unscaled sum in nats.
        """
        h_Tw, targets_T = self._final_hidden(tokens)
        loss, ce_sum, _ = linear_cross_entropy(h_Tw, self.embedding, targets_T, scale, 0.0)
        return loss, {"ce_sum": ce_sum}

    @torch.no_grad()
    def token_losses(self, tokens: Tensor) -> Tensor:
        """The cross-entropy in nats of each target of rows [B, L + 1]: [B, L] in fp32, 0 where the target is -100."""
        h_Tw, targets_T = self._final_hidden(tokens)
        return token_cross_entropy(h_Tw, self.embedding, targets_T).view(tokens.shape[0], -1)

    def _final_hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised hidden states [T, w] of the inputs, and the targets [T]."""
        row_tokens = tokens.shape[-1] - 1
        if tokens.dim() != 2 or not 1 <= row_tokens <= self.config.rope_max_seq_len:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}: expected [rows, L + 1] with L from 1 to "
                f"rope_max_seq_len ({self.config.rope_max_seq_len})"
            )
        inputs_T = tokens[:, :-1].reshape(-1)
        h_Tw = lookup(self.embedding, torch.where(inputs_T == IGNORED, 0, inputs_T))
        for index, kind in enumerate(self.config.layers):
            h_Tw = self._run_layer(index, kind, h_Tw, row_tokens)
        return rms_norm(h_Tw, tapped(self.norm), self.config.norm_eps), tokens[:, 1:].reshape(-1)

    def _run_layer(self, index: int, kind: str, h_Tw: Tensor, row_tokens: int) -> Tensor:
        layer: Callable[..., Tensor] = self.get_submodule(layer_name(index))
        run = partial(layer, row_tokens=row_tokens)
        if kind == ATTENTION:
            run = partial(run, rotary=self.rotary)
        if not torch.is_grad_enabled() or kind not in self._recomputed:
            return run(h_Tw)
        return checkpoint(run, h_Tw, use_reentrant=False, preserve_rng_state=False)
