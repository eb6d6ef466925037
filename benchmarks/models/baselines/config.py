"""A baseline's sizes: one frozen dataclass, refused when it makes no sense, that also says what the sizes cost."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from neuronspark.config import SCAN_CHUNK_TOKENS, ConfigError, padded_vocabulary

ATTENTION = "A"
STATE_SPACE = "S"
KINDS = {ATTENTION: "attention", STATE_SPACE: "state space"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a baseline. Widths are in channels, lengths in tokens."""

    vocab_size: int
    """Rows of the embedding table (tied to the head); token ids are below it."""
    width: int
    """Channels of the residual stream."""
    layers: str
    """One letter a layer, first layer first: A attention and a feed-forward (Llama), S a state space (Mamba-2)."""
    rope_max_seq_len: int
    """The longest row, in tokens; rotary tables are built this long."""
    ffn_width: int = 0
    """Channels of the feed-forward in an attention layer; above 0 if there is one."""
    head_width: int = 128
    """Channels of an attention head; even, since rotary embedding turns pairs."""
    attention_convolution_tokens: int = 0
    """Tokens that the convolution in front of an attention spans, the present one included; 0: there is none."""
    expansion: int = 2
    """Inner channels of a state-space layer are width times this."""
    state_head_width: int = 64
    """P: channels of a state-space head."""
    state_width: int = 128
    """N: states that a channel keeps, the length of B and C."""
    state_groups: int = 1
    """G: groups of heads that share one B and one C."""
    convolution_tokens: int = 4
    """k: tokens that the convolution in front of the state space spans, the present one included."""
    rope_base: float = 1e6
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-6
    """Added to a mean square before its root is taken."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_field(field.name, str(field.type))
        _require(
            bool(self.layers) and set(self.layers) <= set(KINDS),
            f"layers is {self.layers!r}: expected one or more letters, each A (attention) or S (state space)",
        )
        if ATTENTION in self.layers:
            _require(self.ffn_width > 0, "ffn_width is 0: an attention layer's feed-forward has at least one channel")
            self._check_multiple("width", self.width, "head_width", self.head_width)
            self._check_multiple("head_width", self.head_width, "2 (rotary pairs)", 2)
        if STATE_SPACE in self.layers:
            self._check_multiple("width * expansion", self.inner_width, "state_head_width", self.state_head_width)
            self._check_multiple("state-space heads", self.state_heads, "state_groups", self.state_groups)

    # --- derived sizes -------------------------------------------------------------------------------------

    @property
    def heads(self) -> int:
        """Heads of an attention layer."""
        return self.width // self.head_width

    @property
    def inner_width(self) -> int:
        """I: inner channels of a state-space layer."""
        return self.width * self.expansion

    @property
    def state_heads(self) -> int:
        """H: heads of a state-space layer."""
        return self.inner_width // self.state_head_width

    @property
    def convolved_width(self) -> int:
        """Channels that a state-space layer convolves: its inner ones, B and C."""
        return self.inner_width + 2 * self.state_groups * self.state_width

    # --- checks --------------------------------------------------------------------------------------------

    def _check_field(self, name: str, annotation: str) -> None:
        """Refuse a value of the wrong type (True is not a number here) and a number out of range."""
        value = getattr(self, name)
        if annotation == "str":
            _require(isinstance(value, str), f"{name} is {value!r}: expected a string")
            return
        kinds = (int,) if annotation == "int" else (int, float)
        whole = "a whole number" if annotation == "int" else "a number"
        _require(isinstance(value, kinds) and not isinstance(value, bool), f"{name} is {value!r}: expected {whole}")
        lowest_is_valid = name in ("ffn_width", "attention_convolution_tokens") and value == 0
        _require(math.isfinite(value) and (value > 0 or lowest_is_valid), f"{name} is {value!r}: expected more than 0")

    @staticmethod
    def _check_multiple(whole_name: str, whole: int, part_name: str, part: int) -> None:
        _require(
            whole >= part and whole % part == 0,
            f"{whole_name} is {whole}: expected a positive multiple of {part_name} ({part})",
        )

    # --- dictionaries --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as JSON-serialisable values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build from field values; ConfigError names an unknown field's nearest valid name, or the missing fields."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.0)[0]
                raise ConfigError(f"unknown model field {name!r}: did you mean {near!r}? Valid: {', '.join(fields)}")
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ConfigError(f"model fields without a value: {', '.join(missing)}")
        return cls(**values)

    def with_vocabulary(self, token_count: int) -> ModelConfig:
        """The same model for a tokenizer of `token_count` tokens; the table is padded as NeuronSpark's is."""
        _require(token_count >= 1, f"a vocabulary has at least one token, found {token_count}")
        return dataclasses.replace(self, vocab_size=padded_vocabulary(token_count))

    # --- what the sizes cost -------------------------------------------------------------------------------

    def parameter_count(self) -> int:
        """Number of parameters (the tied table counts once), from the shapes alone."""
        return sum(self.parameters_by_part().values())

    def kinds_by_part(self) -> dict[str, str]:
        """What each part is, in their order: embedding, norm, attention or state space."""
        from baselines.model import layer_name

        kinds = {layer_name(index): KINDS[letter] for index, letter in enumerate(self.layers)}
        return {part: kinds.get(part, part) for part in self.parameters_by_part()}

    def parameters_by_part(self) -> dict[str, int]:
        """Number of parameters of each part: embedding, norm, layer00, layer01, ..."""
        return self._counted_by(lambda name, _: name.partition(".")[0])

    def parameters_by_group(self) -> dict[str, int]:
        """Number of parameters of each optimizer group that the model has."""
        return self._counted_by(lambda _, group: group)

    def _counted_by(self, label: Callable[[str, str], str]) -> dict[str, int]:
        from baselines.model import parameter_specs

        counts: dict[str, int] = {}
        for name, spec in parameter_specs(self).items():
            key = label(name, spec.group)
            counts[key] = counts.get(key, 0) + math.prod(spec.shape)
        return counts

    def flops_per_token(self, row_tokens: int) -> float:
        """Model FLOPs of one trained token in rows of `row_tokens` tokens: the sum of `flops_by_part`."""
        return sum(self.flops_by_part(row_tokens).values())

    def flops_by_part(self, row_tokens: int) -> dict[str, float]:
        """Model FLOPs of one trained token by part, counted as NeuronSpark counts its own.

        Forward, two FLOPs a multiply-add, and a backward of twice that; element-wise work is left out:
            2 * (elements of every matrix, the tied head once; a convolution's weights are a matrix)
          + 2 * (L + 1) / 2 * 2 * d                  each attention layer; L row, d width
          + 2 * (C * G * N + C * I + 2 * I * N)      each state-space layer; C chunk, I inner width, G groups, N states
        """
        from baselines.model import layer_name, parameter_specs

        flops: dict[str, float] = {}
        for name, spec in parameter_specs(self).items():
            part = name.partition(".")[0]
            multiplied = math.prod(spec.shape) if spec.group in ("matrix", "embedding") else 0
            flops[part] = flops.get(part, 0.0) + 3 * 2 * multiplied
        chunk = min(SCAN_CHUNK_TOKENS, row_tokens)
        per_token = {
            ATTENTION: (row_tokens + 1) * self.width,
            STATE_SPACE: chunk * (self.state_groups * self.state_width + self.inner_width)
            + 2 * self.inner_width * self.state_width,
        }
        for index, letter in enumerate(self.layers):
            flops[layer_name(index)] += 3 * 2 * per_token[letter]
        return flops


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
