"""The model's sizes and constants: one frozen dataclass, read from JSON, refused when it makes no sense."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

DENDRITIC = "D"
HIPPOCAMPAL = "H"
VOCABULARY_MULTIPLE = 128
"""Embedding tables are padded to a multiple of this many rows, so that matrix tiles divide them."""

MOST_MEMORY_KEYS = 46_340
"""The largest whole number whose square is below 2^31."""

SCAN_CHUNK_TOKENS = 64
"""Tokens in a chunk of the dendritic scan: matrix products inside, a short recurrence over chunks."""


class ConfigError(ValueError):
    """A model configuration that cannot be built; the message names the field, what was found and what is valid."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a NeuronSpark model. Widths are in channels, lengths in tokens."""

    vocab_size: int
    """Rows of the embedding table (tied to the head); token ids are below it. A multiple of 128 is fastest."""
    width: int
    """Channels of the residual stream."""
    layers: str
    """One letter a layer, first layer first: D a dendritic layer, H a hippocampal layer, e.g. DDDHDDDH."""
    rope_max_seq_len: int
    """The longest row, in tokens; rotary tables are built this long."""
    ffn_width: int
    """Channels of the feed-forward inside a hippocampal layer."""
    spike_levels: int = 4
    """D: the largest number of quanta a neuron releases."""
    surrogate_margin: float = 1.0
    """w: how far outside the spike levels, in quanta, the straight-through gradient still passes."""
    threshold_init: float = 0.6
    """Every neuron's threshold at the start, in units of its input."""
    dendritic_expansion: int = 2
    """Inner channels of a dendritic layer are width times this."""
    dendritic_head_width: int = 64
    """P: compartments in a dendritic head."""
    state_width: int = 64
    """N: states that a compartment keeps, the length of B and C."""
    state_groups: int = 1
    """G: groups of heads that share one B and one C."""
    pool_head_width: int = 64
    """Channels of a hippocampal head; even, since rotary embedding turns pairs."""
    trace_width: int = 64
    """Channels of the hippocampal trace."""
    match_width: int = 32
    """r: width of the projection that the induction match compares."""
    rope_base: float = 1e6
    """Base of the rotary wavelengths."""
    memory_layers: tuple[int, ...] = ()
    """The layers that have a product-key memory, by index from 0, ascending; each is an H of `layers`."""
    memory_keys: int = 128
    """K: keys in each of the two lists of a memory's head; the memory has K * K slots."""
    memory_top_k: int = 32
    """k: slots that a head reads for a token; at most memory_keys."""
    memory_heads: int = 1
    """Heads of a memory: each has queries and keys of its own, and all read the same slots."""
    memory_query_width: int = 256
    """Channels of a head's memory query, both halves together; even."""
    memory_value_width: int = 256
    """V: channels of a slot's value."""
    norm_eps: float = 1e-6
    """Added to a mean square before its root is taken."""
    z_loss_weight: float = 0.0
    """Weight of the squared log-sum-exp of the logits in the loss; 0 leaves the term out."""

    def __post_init__(self) -> None:
        self.validate()

    # --- derived sizes -------------------------------------------------------------------------------------

    @property
    def inner_width(self) -> int:
        """Inner channels of a dendritic layer."""
        return self.width * self.dendritic_expansion

    @property
    def dendritic_heads(self) -> int:
        """H: heads of a dendritic layer."""
        return self.inner_width // self.dendritic_head_width

    @property
    def pool_heads(self) -> int:
        """Heads of a hippocampal layer."""
        return self.width // self.pool_head_width

    @property
    def memory_slots(self) -> int:
        """S: slots of a product-key memory."""
        return self.memory_keys**2

    # --- checks --------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ConfigError for the first field that is mistyped, out of range or does not fit the others."""
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        _require(
            bool(self.layers) and set(self.layers) <= {DENDRITIC, HIPPOCAMPAL},
            f"layers is {self.layers!r}: expected one or more letters, each D (dendritic) or H (hippocampal)",
        )
        divisors = [
            (
                "width * dendritic_expansion",
                self.inner_width,
                "dendritic_head_width",
                self.dendritic_head_width,
            ),
            ("dendritic heads", self.dendritic_heads, "state_groups", self.state_groups),
            ("width", self.width, "pool_head_width", self.pool_head_width),
            ("pool_head_width", self.pool_head_width, "2 (rotary pairs)", 2),
            ("memory_query_width", self.memory_query_width, "2 (half queries)", 2),
        ]
        for whole_name, whole, part_name, part in divisors:
            _require(
                whole >= part and whole % part == 0,
                f"{whole_name} is {whole}: expected a positive multiple of {part_name} ({part})",
            )
        self._validate_memory()

    def _validate_memory(self) -> None:
        """Raise ConfigError for a memory in a layer that cannot have one, or that reads more slots than it has keys."""
        hippocampal = tuple(index for index, kind in enumerate(self.layers) if kind == HIPPOCAMPAL)
        _require(
            sorted(set(self.memory_layers)) == list(self.memory_layers) and set(self.memory_layers) <= set(hippocampal),
            f"memory_layers is {list(self.memory_layers)}: expected ascending indices of hippocampal layers, without "
            f"repetition; those of layers {self.layers!r} are {list(hippocampal)}",
        )
        _require(
            self.memory_top_k <= self.memory_keys,
            f"memory_top_k is {self.memory_top_k}: expected at most memory_keys ({self.memory_keys})",
        )
        _require(
            self.memory_keys <= MOST_MEMORY_KEYS,
            f"memory_keys is {self.memory_keys}: expected at most {MOST_MEMORY_KEYS} (slot numbers have 31 bits)",
        )

    # --- dictionaries --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as JSON-serialisable values, the same that come back from JSON."""
        return {**dataclasses.asdict(self), "memory_layers": list(self.memory_layers)}

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
        tuples_for_lists: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**tuples_for_lists)

    def with_vocabulary(self, token_count: int) -> ModelConfig:
        """The same model for a tokenizer of `token_count` tokens; the table is padded to a multiple of 128 rows."""
        _require(token_count >= 1, f"a vocabulary has at least one token, found {token_count}")
        return dataclasses.replace(self, vocab_size=padded_vocabulary(token_count))

    # --- what the sizes cost -------------------------------------------------------------------------------

    def parameter_count(self) -> int:
        """Number of parameters (the tied table counts once), from the shapes alone: nothing is allocated."""
        return sum(self.parameters_by_part().values())

    def kinds_by_part(self) -> dict[str, str]:
        """What each part is, in their order: embedding, norm, dendritic, hippocampal, or hippocampal with memory."""
        from neuronspark.model import layer_name

        kinds = {part: part for part in self.parameters_by_part()}
        for index, kind in enumerate(self.layers):
            with_memory = " with memory" if index in self.memory_layers else ""
            kinds[layer_name(index)] = "dendritic" if kind == DENDRITIC else f"hippocampal{with_memory}"
        return kinds

    def parameters_by_part(self) -> dict[str, int]:
        """Number of parameters of each part: embedding, norm, layer00, layer01, ..."""
        return self._counted_by(lambda name, _: name.partition(".")[0])

    def parameters_by_group(self) -> dict[str, int]:
        """Number of parameters of each optimizer group that the model has."""
        return self._counted_by(lambda _, group: group)

    def _counted_by(self, label: Callable[[str, str], str]) -> dict[str, int]:
        """Number of parameters by a label of (name, group)."""
        from neuronspark.model import parameter_specs

        counts: dict[str, int] = {}
        for name, spec in parameter_specs(self).items():
            key = label(name, spec.group)
            counts[key] = counts.get(key, 0) + math.prod(spec.shape)
        return counts

    def flops_per_token(self, row_tokens: int) -> float:
        """Model FLOPs of one trained token in rows of `row_tokens` tokens: the sum of `flops_by_part`."""
        return sum(self.flops_by_part(row_tokens).values())

    def flops_by_part(self, row_tokens: int) -> dict[str, float]:
        """Model FLOPs of one trained token by part, the head under embedding: forward plus a backward of twice that.

        Forward, two FLOPs a multiply-add, element-wise work and any recomputation left out:
            2 * (elements of every matrix, the tied head once)
          + 2 * (C * G * N + C * I + 2 * I * N)    each dendritic layer; C chunk, I inner width, G groups, N states
          + 2 * (L + 1) / 2 * h * (2 * d_h + r)    each hippocampal layer; L row, h heads of width d_h, r match width
          + 2 * m * k * V                          each memory; m heads read k slots of V channels each (its projections
                                                   and keys are matrices; the table is read, not multiplied)
        """
        from neuronspark.model import layer_name, parameter_specs

        flops: dict[str, float] = {}
        for name, spec in parameter_specs(self).items():
            part = name.partition(".")[0]
            multiplied = math.prod(spec.shape) if spec.group in ("matrix", "embedding") else 0
            flops[part] = flops.get(part, 0.0) + 3 * 2 * multiplied
        chunk = min(SCAN_CHUNK_TOKENS, row_tokens)
        scan = (
            chunk * self.state_groups * self.state_width
            + chunk * self.inner_width
            + 2 * self.inner_width * self.state_width
        )
        pool = (row_tokens + 1) / 2 * self.pool_heads * (2 * self.pool_head_width + self.match_width)
        for index, kind in enumerate(self.layers):
            flops[layer_name(index)] += 3 * 2 * (scan if kind == DENDRITIC else pool)
        for index in self.memory_layers:
            flops[layer_name(index)] += 3 * 2 * self.memory_heads * self.memory_top_k * self.memory_value_width
        return flops


def padded_vocabulary(token_count: int) -> int:
    """The smallest multiple of 128 that holds `token_count` tokens."""
    return -(-token_count // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _check_type(name: str, annotation: str, value: object) -> None:
    """Refuse a value of the wrong type (True is not a number here) and a number out of range."""
    if annotation == "str":
        _require(isinstance(value, str), f"{name} is {value!r}: expected a string")
        return
    if annotation.startswith("tuple"):
        whole = isinstance(value, tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        _require(whole, f"{name} is {value!r}: expected a tuple of whole numbers (a list in JSON)")
        return
    kinds: tuple[type, ...] = (int,) if annotation == "int" else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: expected {'a whole' if annotation == 'int' else 'a'} number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    low_is_valid = name in ("z_loss_weight", "surrogate_margin")
    if not math.isfinite(number) or number < 0 or (number == 0 and not low_is_valid):
        raise ConfigError(f"{name} is {value!r}: expected a finite number {'>= 0' if low_is_valid else '> 0'}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
