"""The models that the study compares: each arm is the default with one thing changed, or a baseline of its size.

Where a change is a field of the configuration, the arm is a configuration. Where it is not, the arm swaps functions of
`neuronspark` for as long as its model lives, inside `Arm.in_force()`: building, training and reading all happen there,
and afterwards everything is as before. The swapped functions are in swaps.py and everywhere.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import neuronspark
from nstrain.train.model import TrainableModel

_MODELS = str(Path(__file__).parents[1] / "models")
if _MODELS not in sys.path:  # the baselines are no installed package
    sys.path.append(_MODELS)

import baselines  # noqa: E402

from benchmarks.study import everywhere, swaps  # noqa: E402

NeuronSparkConfig = neuronspark.ModelConfig
Config = Any
"""A configuration of NeuronSpark or of the baselines: they share what is asked of them here."""
Swaps = Callable[[], contextlib.AbstractContextManager[None]]


def memory_layer(layers: str) -> tuple[int, ...]:
    """Where the default has its product-key memory: in the middle hippocampal layer, or the one just before."""
    places = [index for index, letter in enumerate(layers) if letter == "H"]
    return (places[(len(places) - 1) // 2],) if places else ()


@dataclasses.dataclass(frozen=True)
class Size:
    """The default and the baselines at one size; all have about as many parameters as the default."""

    default: NeuronSparkConfig
    llama_layers: int
    hybrid_layers: str
    """S state space, A attention: as many of these as the default has hippocampal layers."""
    micro_rows: int
    """Rows of a micro-batch on a GPU."""
    arena_bytes: int
    """Memory that a run holds on a GPU."""


def _default(width: int, layers: str, memories: int = 1, **fields: Any) -> NeuronSparkConfig:
    places = [index for index, letter in enumerate(layers) if letter == "H"]
    at = memory_layer(layers) if memories == 1 else tuple(places[1::2][:memories])
    sizes: dict[str, Any] = {
        "vocab_size": 16_384,
        "rope_max_seq_len": 32_768,
        "ffn_width": width * 11 // 4,
        "trace_width": width // 4,
        "memory_layers": at,
    }
    return NeuronSparkConfig(width=width, layers=layers, **{**sizes, **fields})


GIB = 1 << 30
SIZES: dict[str, Size] = {
    "50M": Size(_default(512, "DDDH" * 4), 12, "SSSSA" * 4, 32, 72 * GIB),
    "150M": Size(_default(768, "DDDH" * 6, memories=2), 17, "SSSSA" * 6, 16, 72 * GIB),
    "toy": Size(
        _default(
            32,
            "DH",
            vocab_size=128,
            rope_max_seq_len=256,
            dendritic_head_width=8,
            state_width=8,
            pool_head_width=16,
            match_width=8,
            memory_keys=8,
            memory_top_k=4,
            memory_query_width=16,
            memory_value_width=16,
        ),
        2,
        "SA",
        4,
        0,
    ),
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One model of the study."""

    name: str
    about: str
    """What it is, in a table's cell."""
    configure: Callable[[Size], Config]
    """Its configuration at a size."""
    swaps: Swaps = contextlib.nullcontext
    """What is swapped while it lives."""
    package: Any = neuronspark
    """Where its model and configuration come from."""
    is_probed: bool = True
    """Whether NeuronSpark's probe says something true about it: its neurons are where the probe looks for them."""

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Where the arm's model is built, trained and read."""
        return self.swaps()

    def build(self, config: Config, device: torch.device | str, seed: int) -> TrainableModel:
        """The model; only inside `in_force`."""
        model: TrainableModel = self.package.NeuronSpark(config, device, seed=seed)
        return model


def shallow(config: Config, letter: str) -> Config:
    """The configuration with one layer of one kind: its kernels, and little work."""
    changed: dict[str, Any] = {"layers": letter}
    if isinstance(config, NeuronSparkConfig):
        changed["memory_layers"] = (0,) if letter == "H" and config.memory_layers else ()
    return dataclasses.replace(config, **changed)


# --- the arms ----------------------------------------------------------------------------------------------------


def _changed(**fields: Any) -> Callable[[Size], Config]:
    """The default with other fields; a function gives a field from the default."""

    def configure(size: Size) -> Config:
        found = {name: value(size.default) if callable(value) else value for name, value in fields.items()}
        return dataclasses.replace(size.default, **found)

    return configure


def _pattern(of_50m: str, toy: str) -> Callable[[Size], Config]:
    """Other layers, of as many parameters in all; the memory stays in the middle."""

    def configure(size: Size) -> Config:
        if size.default.width not in (32, 512):
            raise ValueError("the patterns are chosen for the 50M size")
        layers = of_50m if size.default.width == 512 else toy
        return dataclasses.replace(size.default, layers=layers, memory_layers=memory_layer(layers))

    return configure


def _baseline(layers: Callable[[Size], str], **fields: Any) -> Callable[[Size], Config]:
    def configure(size: Size) -> Config:
        default, letters = size.default, layers(size)
        return baselines.ModelConfig(
            vocab_size=default.vocab_size,
            width=default.width,
            layers=letters,
            rope_max_seq_len=default.rope_max_seq_len,
            ffn_width=default.ffn_width,
            head_width=default.pool_head_width,
            state_head_width=default.dendritic_head_width,
            state_width=2 * default.state_width,
            **fields,
        )

    return configure


def _llama(size: Size) -> str:
    return "A" * size.llama_layers


def _arm(name: str, about: str, *swapped: swaps.Swap, is_probed: bool = True, **fields: Any) -> Arm:
    def in_force() -> contextlib.AbstractContextManager[None]:
        return swaps.swapped(*swapped)

    return Arm(name, about, _changed(**fields), in_force, is_probed=is_probed)


def _everywhere(name: str, about: str, options: everywhere.Options) -> Arm:
    return Arm(name, about, _changed(), lambda: everywhere.in_force(options))


DEFAULT = _arm("default", "NeuronSpark as designed: DDDH, D = 4, signed dendritic neurons, one memory")
BASELINES = (
    Arm("llama", "Llama-like: RoPE, QK norm, SwiGLU", _baseline(_llama), package=baselines, is_probed=False),
    Arm(
        "llama-conv",
        "Llama-like, a convolution over 4 tokens before each attention",
        _baseline(_llama, attention_convolution_tokens=4),
        package=baselines,
        is_probed=False,
    ),
    Arm(
        "mamba-attention",
        "Mamba-2-like, four layers to one of attention",
        _baseline(lambda size: size.hybrid_layers),
        package=baselines,
        is_probed=False,
    ),
)
MECHANISMS = (
    _arm("no-spikes", "SiLU and identity instead of neurons", *swaps.NO_SPIKES, is_probed=False),
    _arm("excitatory", "dendritic neurons excitatory only", *swaps.EXCITATORY_DENDRITIC),
    _everywhere("everywhere", "a signed neuron before every projection", everywhere.Options()),
    _arm("no-match", "without the induction match", *swaps.NO_MATCH),
    _arm("plain-heads", "dendritic heads start plainly: no slow-leak heads", *swaps.PLAIN_HEADS),
    _arm("d8", "D = 8", spike_levels=8),
    _arm("d2", "D = 2", spike_levels=2),
    _arm("d1", "D = 1", spike_levels=1),
    _arm("no-memory", "without the product-key memory", memory_layers=()),
    _arm("no-clock", "without the clock", *swaps.NO_CLOCK),
    _arm("no-tag", "without write tags", *swaps.NO_TAG),
    _arm("no-arbitration", "without the comparator: reads as they are", *swaps.NO_ARBITRATION),
    _arm("no-trace", "without the trace", *swaps.NO_TRACE),
    _everywhere(
        "everywhere-d16", "... with D = 16 where quanta enter a product alone", everywhere.Options(spike_levels=16)
    ),
    _everywhere(
        "everywhere-controls", "... but dt, decay and controls see the input itself", everywhere.Options(controls=False)
    ),
    _everywhere("everywhere-fixed", "... whose thresholds are not trained", everywhere.Options(trained=False)),
)
SHAPES = (
    Arm("pattern-1-1", "DH, 7 to 6", _pattern("DH" * 6 + "D", "DHD")),
    Arm("pattern-5-1", "about 5 D to an H", _pattern("DDDDDH" * 2 + "DDDDH", "DDH")),
    Arm("pattern-7-1", "about 7 D to an H", _pattern("DDDDDDDH" * 2 + "DD", "DDDH")),
    _arm("states-32", "N = half", state_width=lambda default: default.state_width // 2),
    _arm("states-128", "N = twice", state_width=lambda default: default.state_width * 2),
    _arm("heads-32", "dendritic heads half as wide", dendritic_head_width=lambda d: d.dendritic_head_width // 2),
    _arm("heads-128", "dendritic heads twice as wide", dendritic_head_width=lambda d: d.dendritic_head_width * 2),
    _arm("match-16", "match half as wide", match_width=lambda default: default.match_width // 2),
    _arm("match-64", "match twice as wide", match_width=lambda default: default.match_width * 2),
    _arm("trace-half", "trace half as wide", trace_width=lambda default: default.trace_width // 2),
    _arm("trace-twice", "trace twice as wide", trace_width=lambda default: default.trace_width * 2),
    _arm("ffn-2", "feed-forward 2 d", ffn_width=lambda default: default.width * 2),
    _arm("ffn-4", "feed-forward 4 d", ffn_width=lambda default: default.width * 4),
    _arm("memory-64", "memory of a quarter of the slots", memory_keys=lambda default: default.memory_keys // 2),
    _arm("memory-256", "memory of four times the slots", memory_keys=lambda default: default.memory_keys * 2),
)
TOGETHER = (
    _arm(
        "reads-twice",
        "trace and match twice as wide",
        trace_width=lambda default: default.trace_width * 2,
        match_width=lambda default: default.match_width * 2,
    ),
    _arm(
        "reads-and-heads-twice",
        "trace, match and dendritic heads twice as wide",
        trace_width=lambda default: default.trace_width * 2,
        match_width=lambda default: default.match_width * 2,
        dendritic_head_width=lambda default: default.dendritic_head_width * 2,
    ),
)
"""Shapes that helped one at a time in part 3's first runs, together. A narrower feed-forward is left out: what it gains
on half a token a parameter says nothing of a long run."""
ARMS: Mapping[str, Arm] = {arm.name: arm for arm in (DEFAULT, *BASELINES, *MECHANISMS, *SHAPES, *TOGETHER)}
