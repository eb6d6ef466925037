"""The one door to the model package: building or loading a model, its presets, and holding a model to its contract.

Any package that satisfies `ModelPackage`, whose models satisfy `TrainableModel`, can be trained. host.json's
`neuronspark` may name another than the one that comes along; everything else in nstrain meets the model through this
file. What a package may offer beside that is asked for by name: `load_weights` and a `DecodableModel` to generate,
`probe` (`ProbedModel`) for readings, costs for `model show` and bench, `kernel_table`, `use_kernels` and
`KERNEL_OPERATORS` for kernels of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nstrain.base.errors import Refusal
from nstrain.settings.host import model_package
from nstrain.settings.run import ModelSettings, RunSettings

GROUPS = ("matrix", "embedding", "memory", "neuron", "norm")
"""The optimizer groups of the contract, in the order of the flat buffers."""

DECAYED_GROUPS = frozenset({"matrix", "embedding", "memory"})
"""Groups whose weights decay; neurons' thresholds, scalars and norm gains do not."""

IGNORED_TOKEN = -100
"""As a target it carries no loss, as an input it is read as token 0; a padding row is made of nothing else."""


class TrainableModel(Protocol):
    """The contract between the trainer and a model. B rows of L target tokens come as [B, L + 1] token ids."""

    def loss(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(scale * sum of the real targets' losses, its terms by name); gradients add to main_grad.

        A term is an unscaled sum over the real targets, a device scalar without a gradient, called NAME_sum.
        """

    def token_losses(self, tokens: Tensor) -> Tensor:
        """Each target's cross-entropy in nats, [B, L], without a gradient."""

    def groups(self) -> Mapping[str, Sequence[str]]:
        """Parameter names by optimizer group."""

    def parts(self) -> Mapping[str, Sequence[str]]:
        """Parameter names by named part: layer00 ..., embedding, norm."""

    def refresh(self) -> None:
        """Recompute whatever is derived from the weights."""

    def recompute(self, mode: Any) -> None:
        """Whose activations are computed again in the backward: none, dendritic or all."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, in the model's own order."""

    def absent_readings(self) -> Mapping[str, str]:
        """Readings of layers that the model does not have, by name (KIND/* for all of a kind), and why."""


class ModelConfiguration(Protocol):
    """The sizes of a model, as run.json's `model.config` has them; `rope_max_seq_len` is the longest row it reads."""

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary; token ids are below it."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfiguration:
        """From `to_dict`'s values. Raises `ValueError` naming the field for what makes no model."""

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as JSON-serialisable values."""

    def with_vocabulary(self, token_count: int) -> ModelConfiguration:
        """The same model for so many token ids; it may have more rows than that."""


class ModelPackage(Protocol):
    """What a model package has, by these very names; the attributes of the package itself."""

    @property
    def ModelConfig(self) -> type[ModelConfiguration]:  # noqa: N802 - a class
        """The class of its configurations."""

    def NeuronSpark(  # noqa: N802 - a class
        self, config: Any, device: torch.device, /, *, seed: int | None
    ) -> TrainableModel:
        """The model of a configuration on a device: a CPU, a GPU, or "meta", which holds shapes and no values.

        Starting values are a function of configuration and seed alone. With `seed=None` the parameters have whatever
        values are there: a checkpoint's replace them all, and drawing them would take longer than reading those. A
        checkpoint holds parameters only, so nothing else of the model may depend on the seed.
        """

    def preset_names(self) -> list[str]:
        """The names of its presets, sorted."""

    def load_preset(self, name: str, /) -> ModelConfiguration:
        """A preset by its name. Raises `ValueError` if there is none."""


@runtime_checkable
class ProbedModel(Protocol):
    """A model that can be asked what its layers do on some rows; see docs/reference/metrics.md."""

    def probe(
        self, tokens: Tensor, eos_id: int, train_length: int, *, attention: bool
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Readings of rows [B, L + 1] by part and name, [B, members] each, in float64."""

    def probe_members(self) -> Mapping[str, Mapping[str, int]]:
        """What a probe gives, by part and name, and the number of members; <k> for the number of a segment or bin."""


class DecodableModel(Protocol):
    """What generating text asks of a model; training does not. B rows, V rows of the vocabulary."""

    config: Any
    """Its configuration; has `vocab_size` and `rope_max_seq_len`, the longest row in tokens."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once."""

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Read rows [B, L]: the logits [B, V] of the next token, and the state there."""

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one more token [B]: the logits [B, V] of the next one, and the state after it."""


@dataclasses.dataclass(frozen=True)
class ParameterPlace:
    """A parameter with the group and the part it belongs to."""

    name: str
    parameter: nn.Parameter
    group: str
    part: str


def parameter_places(model: TrainableModel) -> tuple[ParameterPlace, ...]:
    """Every parameter of a model, ordered by group, then part, then the model's own order.

    In this order a part's share of a group is one stretch. Raises `Refusal` naming the first parameter that breaks
    the contract: in no group or part, in two, in an unknown one, or a name that no parameter has.
    """
    parameters = dict(model.named_parameters())
    group_of = _owners("group", model.groups(), parameters)
    part_of = _owners("part", model.parts(), parameters)
    unknown = sorted(set(group_of.values()) - set(GROUPS))
    if unknown:
        raise Refusal(f"the model's groups() names {unknown[0]!r}; the optimizer knows {', '.join(GROUPS)}")
    parts = list(dict.fromkeys(part_of[name] for name in parameters))
    places = [ParameterPlace(name, p, group_of[name], part_of[name]) for name, p in parameters.items()]
    # sorted() is stable: inside a group and part the model's own order stays.
    return tuple(sorted(places, key=lambda place: (GROUPS.index(place.group), parts.index(place.part))))


def _owners(kind: str, owners: Mapping[str, Sequence[str]], parameters: Mapping[str, Any]) -> dict[str, str]:
    """Each parameter's one owner, by the model's groups() or parts()."""
    owner_of: dict[str, str] = {}
    for owner, names in owners.items():
        for name in names:
            if name not in parameters:
                raise Refusal(f"the model's {kind} {owner!r} names {name!r}, but there is no such parameter")
            if name in owner_of:
                raise Refusal(
                    f"parameter {name!r} is in the {kind}s {owner_of[name]!r} and {owner!r}; a parameter has one {kind}"
                )
            owner_of[name] = owner
    for name in parameters:
        if name not in owner_of:
            raise Refusal(f"parameter {name!r} is in no {kind}; the model's {kind}s must list every parameter")
    return owner_of


def build(settings: ModelSettings, vocab_size: int, device: torch.device | str, seed: int | None) -> TrainableModel:
    """The model of run.json on a device, with its initial weights; without a seed with none, for a checkpoint's.

    Raises `Refusal` if the configuration is not one of the model package's, or has fewer vocabulary rows than the
    data line has token ids, and for a package that cannot do without a seed.
    """
    neuronspark: ModelPackage = _package()
    try:
        config = neuronspark.ModelConfig.from_dict(settings.config)
    except ValueError as error:
        raise Refusal(f"run.json: field 'model.config': {error}") from None
    if config.vocab_size < vocab_size:
        raise Refusal(
            f"run.json: field 'model.config.vocab_size' is {config.vocab_size:,}, but the data line has {vocab_size:,} "
            "token ids; make the line anew for this data"
        )
    try:  # always: what a line cannot go on without is told before it begins
        neuronspark.NeuronSpark(config, torch.device("meta"), seed=None)
    except Exception as error:
        raise Refusal(
            f"the model package in {package_directory()} makes no model without starting values, which going on from "
            f"a checkpoint asks for: NeuronSpark(config, device, seed=None) raises {error!r} on the device meta"
        ) from error
    return neuronspark.NeuronSpark(config, torch.device(device), seed=seed)


def package_directory() -> Path:
    """The directory of the model package; its name is the package's."""
    return Path(_package().__path__[0])


def kernel_table() -> dict[str, Any]:
    """The launch configurations of the model's kernels in use, for checkpoints; empty for a model without any."""
    table: Mapping[str, Any] = getattr(_package(), "kernel_table", dict)()
    return dict(table)


def use_kernels(
    table: Mapping[str, Any],
    where: str,
    remedy: str = "go on with the nstrain and the model package that wrote it",
) -> None:
    """Have the model's kernels run with the launch configurations of an earlier `kernel_table`.

    Raises `Refusal`, saying `where` the table is and the `remedy`, if it is not one of this package's kernels.
    """
    if not table:
        return
    package = _package("use_kernels")
    try:
        package.use_kernels(table)
    except ValueError as error:
        raise Refusal(
            f"{where}: its kernels' launch configurations do not fit the model package in {package.__path__[0]}: "
            f"{error}; {remedy}"
        ) from None


def kernel_choice() -> str | None:
    """Which of its implementations the model package was told to run; None for one that has no such choice."""
    choice: Callable[[], str | None] = getattr(_package(), "kernel_choice", lambda: None)
    return choice()


def kernel_operators() -> dict[str, str]:
    """The operator of each of the model's kernels, by the kernel's name; empty for a package that does not say."""
    operators: Mapping[str, str] = getattr(_package(), "KERNEL_OPERATORS", {})
    return dict(operators)


def longest_row(settings: RunSettings) -> int | None:
    """The longest row that the model reads, in tokens; None for a model that does not say."""
    longest = settings.model.config.get("rope_max_seq_len")
    return longest if isinstance(longest, int) else None


def refuse_long_rows(settings: RunSettings) -> None:
    """Raise `Refusal` if rows of run.json are longer than the model reads."""
    longest = longest_row(settings)
    for piece in settings.rows:
        if longest is not None and piece.row_tokens > longest:
            raise Refusal(
                f"run.json: field 'rows': rows of {piece.row_tokens:,} tokens from cycle {piece.from_cycle} on, but "
                f"the model reads {longest:,} at most (model.config.rope_max_seq_len)"
            )


def preset_config(preset: str, vocab_size: int) -> dict[str, Any]:
    """A preset's configuration for a vocabulary of `vocab_size` token ids (padded to a multiple of 128), for run.json.

    Raises `Refusal` naming the presets there are.
    """
    neuronspark: ModelPackage = _package()
    names = neuronspark.preset_names()
    if preset not in names:
        raise Refusal(f"no preset is called {preset!r}; there are: {', '.join(names)}")
    return dict(neuronspark.load_preset(preset).with_vocabulary(vocab_size).to_dict())


def refuse_no_cuda(device: str) -> None:
    """Raise `Refusal` for a GPU that is not there. Occupies none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("device 'cuda': torch finds no CUDA device here; use device 'cpu'")


def load_model(weights: Path, config: Mapping[str, Any] | None, device: str) -> DecodableModel:
    """The model of a file of weights, on a device, to generate with; `config` is for a file that holds none of its own.

    Raises `Refusal` for a device that is not there, weights that are not that model's, and a model package that cannot
    load or decode.
    """
    refuse_no_cuda(device)
    neuronspark = _package("load_weights")
    try:
        known = None if config is None else neuronspark.ModelConfig.from_dict(config)
        model: DecodableModel = neuronspark.load_weights(weights, device, config=known)
    except ValueError as error:
        raise Refusal(str(error) if str(weights) in str(error) else f"{weights}: {error}") from None
    return model


def preset_names() -> list[str]:
    """The presets of the model package, sorted."""
    return list(_package().preset_names())


@dataclasses.dataclass(frozen=True)
class PartCost:
    """What one part of a model holds and costs."""

    kind: str
    """Parts of one kind do the same: dendritic, hippocampal, embedding, norm."""
    parameters: int
    flops_per_token: float
    """FLOPs of one trained token."""


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """What a model of a configuration holds and costs; nothing of it is built."""

    config: dict[str, Any]
    row_tokens: int
    """The row length that `flops_per_token` is for: reading a pool costs more in a longer row."""
    parameters: int
    flops_per_token: float
    """Model FLOPs of one trained token, forward and backward; recomputed activations do not count."""
    parts: dict[str, PartCost]
    groups: dict[str, int]
    """Parameters by optimizer group."""


def model_cost(model: str | Mapping[str, Any], row_tokens: int) -> ModelCost:
    """What a preset, or a configuration, holds and costs in rows of `row_tokens` tokens (cut to the longest it reads).

    Raises `Refusal` for a preset that does not exist and a configuration that is not one.
    """
    neuronspark = _package()
    try:
        of = neuronspark.load_preset(model) if isinstance(model, str) else neuronspark.ModelConfig.from_dict(model)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if not hasattr(of, "flops_by_part"):
        raise Refusal(f"the model package in {neuronspark.__path__[0]} does not say what its models cost")
    row_tokens = min(row_tokens, of.rope_max_seq_len)
    parameters, flops = of.parameters_by_part(), of.flops_by_part(row_tokens)
    return ModelCost(
        config=of.to_dict(),
        row_tokens=row_tokens,
        parameters=of.parameter_count(),
        flops_per_token=of.flops_per_token(row_tokens),
        parts={part: PartCost(kind, parameters[part], flops[part]) for part, kind in of.kinds_by_part().items()},
        groups=of.parameters_by_group(),
    )


def _package(needed: str = "NeuronSpark") -> Any:
    """The model package. Raises `Refusal` if there is none, or none that has what is needed."""
    name = model_package()
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise Refusal(
            f"the model package {name!r} cannot be imported ({error}); install it, or name its directory in "
            "host.json's field 'neuronspark'"
        ) from error
    if not hasattr(package, needed):
        raise Refusal(f"the model package in {package.__path__[0]} has no {needed!r}, which this needs")
    return package
