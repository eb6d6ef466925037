"""Every reading of a line: the pattern of its name, its unit, and when a row has it.

`READINGS` is the whole set of metrics version `METRICS_VERSION`; docs/reference/metrics.md says what each means, and a
test holds the two to each other. `validation_names` are the names that a validation must have, no more and no fewer:
a set of readings is decided before a line starts and not patched along the way, so a trainer that computes another one
refuses to start.

In patterns: <L> the training row length, <P> the long rows', <k> a segment or bin, <h> a head, <group> an optimizer
group, layer<NN> a layer, <part> a part of the model that is no layer, <source> a source, <term> a term of the loss.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from nstrain.base.errors import Refusal
from nstrain.train.held_out import Asked
from nstrain.train.model import ProbedModel
from nstrain.train.probe_readings import ROWS_PART, RULES

Condition = Literal[
    "always", "trained", "loss window", "validated", "long rows", "average", "layers", "boundary", "attention", "filled"
]
CONDITIONS: Mapping[Condition, str] = {
    "always": "every row",
    "trained": "every row but that of update 0",
    "loss window": "of the 100 updates before, at least 25 were applied",
    "validated": "the update validated",
    "long rows": "it validated, and the model reads longer rows than those of training",
    "average": "it validated, and run.json's `ema` is set and has begun",
    "layers": "the model has layers of the kind (a memory for pkm_...)",
    "boundary": "a probed row of a source of the recipe has a boundary",
    "attention": "a row that is asked for it is of a source of the recipe",
    "filled": "a target falls into it",
}
"""What the conditions mean; a reading is there when all of its own hold."""


Section = Literal["Training", "Losses", "Probes", "Optimizer", "Time"]
"""The sections of docs/reference/metrics.md that define readings."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One kind of reading."""

    pattern: str
    unit: str
    present: tuple[Condition, ...]
    formula: Section
    """Where docs/reference/metrics.md has its formula."""
    probe: str | None = None
    """The probe's reading that it is a statistic of, a name in RULES."""


# --- the table -----------------------------------------------------------------------------------------------------


def _of_training() -> Iterator[Reading]:
    for name in ("tokens", "cycle", "row_tokens", "rows", "skipped", "smaller"):
        yield Reading(name, "count", ("always",), "Training")
    for name, unit in {
        "loss": "nats a token",
        "loss/<term>": "nats a token",
        "grad_norm": "norm",
        "grad_norm/layer<NN>": "norm",
        "grad_norm/<part>": "norm",
        "grad_norm/group/<group>": "norm",
        "learning_rate": "1",
        "weight_decay": "1",
        "rows/<source>": "rows",
    }.items():
        yield Reading(f"train/{name}", unit, ("trained",), "Training")
    yield Reading("train/loss_jump", "deviations", ("trained", "loss window"), "Training")


def _of_losses() -> Iterator[Reading]:
    kinds: list[tuple[str, str, tuple[Condition, ...]]] = [
        *((f"val_<L>/{what}", "nats a token", ("validated",)) for what in ("<source>", "mix", "mean")),
        ("val_<L>/docpos/bin<k>", "nats a token", ("validated", "filled")),
        ("val_<L>/docpos/tokens_frac", "share", ("validated",)),
        *((f"val_<P>/{what}", "nats a token", ("long rows",)) for what in ("<source>", "mix", "mean", "pos/seg<k>")),
        ("val_<P>/pos/last_over_first", "ratio", ("long rows",)),
        *((f"ema/val_<L>/{what}", "nats a token", ("average",)) for what in ("<source>", "mix", "mean")),
        *((f"ema/val_<P>/{what}", "nats a token", ("long rows", "average")) for what in ("<source>", "mix", "mean")),
    ]
    return (Reading(pattern, unit, present, "Losses") for pattern, unit, present in kinds)


def _of_probes() -> Iterator[Reading]:
    lengths: list[tuple[str, Condition]] = [("<L>", "validated"), ("<P>", "long rows")]
    for (length, when), (name, rule) in itertools.product(lengths, RULES.items()):
        if "_seg<k>" in name and length == "<L>":
            continue
        present: tuple[Condition, ...] = (when, "layers")
        if rule.may_lack:
            present = (*present, "boundary")
        if "/attn_" in name:
            present = (*present, "attention")
        kind, _, reading = name.partition("/")
        scopes = [f"val_{length}/{kind}/"] + ([] if rule.of_rows else [f"val_{length}/{kind}/layer<NN>/"])
        for scope, suffix in itertools.product(scopes, rule.statistics):
            unit = "share" if suffix.startswith("_frac") else rule.unit
            yield Reading(f"{scope}{reading}{suffix}", unit, present, "Probes", name)
        if rule.of_head is not None:
            yield Reading(f"{scopes[-1]}{reading}_head<h>", rule.unit, present, "Probes", name)


def _of_the_optimizer() -> Iterator[Reading]:
    of_part = {"param_norm": "norm", "update_norm": "norm", "update_ratio": "ratio"}
    of_group = {**of_part, "m_norm": "norm", "grad_rms": "gradient"}
    for owner, units in (("<group>", of_group), ("layer<NN>", of_part), ("part/<part>", of_part)):
        for name, unit in units.items():
            yield Reading(f"opt/{owner}/{name}", unit, ("validated",), "Optimizer")


def _of_time() -> Iterator[Reading]:
    conditions: dict[str, Condition] = {
        "time/wall": "always",
        "time/update_s": "trained",
        "time/validation_s": "validated",
        "time/validation_probe_s": "validated",
        "time/validation_long_s": "long rows",
        "time/validation_ema_s": "average",
        "perf/tokens_per_s": "trained",
    }
    for name, condition in conditions.items():
        yield Reading(name, "tokens/s" if name.startswith("perf/") else "s", (condition,), "Time")


READINGS: tuple[Reading, ...] = (
    *_of_training(),
    *_of_losses(),
    *_of_probes(),
    *_of_the_optimizer(),
    *_of_time(),
)
"""Every reading of the present metrics version."""


# --- what a validation must have -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Declared:
    """What a model says of its probe."""

    members: Mapping[str, Mapping[str, int]]
    """By part and reading: how many heads, channels, ... it has there."""
    absent: Mapping[str, str]
    """Readings that it does not have, and why; KIND/* stands for all of a kind."""

    @classmethod
    def by(cls, model: Any) -> Declared:
        """What this model says. Raises `Refusal` for a reading that it neither has nor says to be absent."""
        members = model.probe_members() if isinstance(model, ProbedModel) else {}
        absent: Mapping[str, str] = getattr(model, "absent_readings", dict)()
        has = {name for of_part in members.values() for name in of_part}
        for name in RULES:
            if name not in has and name not in absent and f"{name.partition('/')[0]}/*" not in absent:
                raise Refusal(
                    f"the model's probe does not give {name!r}, and its absent_readings() does not name it: a line's "
                    "set of readings is fixed before it starts; have the model give it, or say why it cannot"
                )
        unknown = sorted(has - RULES.keys())
        if unknown:
            raise Refusal(f"the model's probe gives {unknown[0]!r}, which is in no table of readings (RULES)")
        return cls(members, absent)


@dataclasses.dataclass(frozen=True)
class RowsRead:
    """What can be read from the rows of one length."""

    row_tokens: int
    asked: Asked
    docpos_bins: tuple[int, ...] = ()
    """The bins that a target falls into."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that decides which readings a validation has."""

    sources: tuple[str, ...]
    groups: tuple[str, ...]
    parts: tuple[str, ...]
    declared: Declared
    train: RowsRead
    long: RowsRead | None
    average: bool
    """Whether the weights' moving average has begun."""


def validation_names(facts: Facts) -> set[str]:
    """The names that a validation's readings have, time aside."""
    names: set[str] = set()
    for reading in READINGS:
        if "trained" in reading.present or "always" in reading.present or reading.pattern.startswith("time/"):
            continue
        long = "<P>" in reading.pattern
        rows = facts.long if long else facts.train
        if rows is None or ("average" in reading.present and not facts.average):
            continue
        asked = rows.asked.step_ratio if "step_ratio" in reading.pattern else rows.asked.boundary
        if ("boundary" in reading.present and not asked) or (
            "attention" in reading.present and not rows.asked.attention
        ):
            continue
        pattern = re.sub("<L>|<P>", str(rows.row_tokens), reading.pattern)
        names |= set(_filled(pattern, reading, facts, rows))
    return names


def _filled(pattern: str, reading: Reading, facts: Facts, rows: RowsRead) -> Iterator[str]:
    """A pattern's names, its length already filled in."""
    members = facts.declared.members
    if reading.probe is not None:
        having = {part: of[reading.probe] for part, of in members.items() if reading.probe in of}
        if not having:
            return
        layers = [(part, count) for part, count in having.items() if part != ROWS_PART]
    else:
        layers = [(part, 0) for part in facts.parts if is_layer(part)]
    for text in _each(pattern, "<k>", [str(k) for k in _numbers(reading, facts, rows)]):
        if "layer<NN>" in text:
            for layer, count in layers:
                yield from _each(text.replace("layer<NN>", layer), "<h>", [str(h) for h in range(count)])
            continue
        for placeholder, values in (
            ("<source>", facts.sources),
            ("<group>", facts.groups),
            ("<part>", [part for part in facts.parts if not is_layer(part)]),
        ):
            if placeholder in text:
                yield from _each(text, placeholder, values)
                break
        else:
            yield text


def _each(text: str, placeholder: str, values: Any) -> list[str]:
    return [text.replace(placeholder, value) for value in values] if placeholder in text else [text]


def _numbers(reading: Reading, facts: Facts, rows: RowsRead) -> range | tuple[int, ...]:
    """The numbers of a reading's segments or bins."""
    if "docpos/" in reading.pattern:
        return rows.docpos_bins
    if "_bin<k>" in reading.pattern:
        return range(1 + (rows.row_tokens - 1).bit_length())
    return range(-(-rows.row_tokens // facts.train.row_tokens))


def is_layer(part: str) -> bool:
    """Whether a part of a model is a layer by its name: layer00, layer01, ..."""
    return re.fullmatch(r"layer\d+", part) is not None


def other_names(found: Iterable[str], expected: set[str]) -> str | None:
    """What is wrong with the names of a validation's readings, time aside; None if they are the expected ones."""
    names = {name for name in found if not name.startswith("time/")}
    problems = [
        f"{len(some)} {what} ({', '.join(sorted(some)[:5])}{', ...' if len(some) > 5 else ''})"
        for what, some in (("are missing", expected - names), ("have no place in the table", names - expected))
        if some
    ]
    if not problems:
        return None
    return (
        f"of a validation's readings {' and '.join(problems)}: a line's set of readings is fixed before it starts "
        "(docs/reference/metrics.md); this nstrain and its model package do not belong together"
    )
