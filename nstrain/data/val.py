"""Held-out text: collected once by `nstrain data val`, cut into validation rows of any length.

A source's held-out documents are gathered stratum by stratum, reading files in their pinned order until there is
enough; which files a cycle opens does not depend on it. Rows are cut inside one stratum's tokens. Strata whose held-out
text cannot fill a row of the line's unit are pooled, named as such, and their documents mixed. A source's loss is the
sum over its groups of weight times the mean loss of the group's rows; the weights - each stratum's share of the pinned
bytes - are stored here and stay for the line's life. index.json pins each NAME.bin and carries a hash of itself: what
was edited is refused.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.commands import typed
from nstrain.base.disk import canonical_json, directory_by_rename, read_json, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.encode import Encoder
from nstrain.data.exclude import leaving_out_is_offered
from nstrain.data.line import DataLine
from nstrain.data.order import refuse_row_length
from nstrain.data.readers import read_pinned
from nstrain.data.readers.errors import FileRefusal
from nstrain.data.sources import PinnedFile, SourceSettings
from nstrain.data.supply import OnDownload, Supply, fetched_nothing

VALIDATION_FORMAT = 2
DEFAULT_UNITS = 16
"""Units of held-out tokens that `data val` gathers for a source, unless told otherwise."""

_ASKED = re.compile(rb'"asked_tokens":([1-9][0-9]*)')
"""Where val/index.json says how many tokens of a source were asked for; found in a damaged one too."""

BATCH_CHARACTERS = 4 << 20
"""Held-out text that is encoded at once."""


@dataclasses.dataclass
class _Gathered:
    """The held-out text of one stratum."""

    tokens: list[npt.NDArray[np.int64]] = dataclasses.field(default_factory=list)
    count: int = 0
    documents: int = 0


def collect_held_out(
    line: DataLine,
    tokens_per_source: int | None = None,
    progress: Callable[[str, float], None] = lambda source, share: None,
    on_download: OnDownload = fetched_nothing,
) -> dict[str, Any]:
    """Build val/ and return its index; the directory appears whole or not at all.

    `tokens_per_source` is how many held-out tokens to gather of a source (default 16 units), each stratum's part by its
    bytes but at least one row of the unit where it has them. Raises `Refusal` if val/ exists (its rows are fixed for
    life), or if a source's held-out text cannot fill one row.
    """
    target = tokens_per_source or DEFAULT_UNITS * line.unit_tokens
    encoder = line.encoder()
    with directory_by_rename(line.work / "val") as directory:
        sources = {}
        for name in line.source_names:
            with leaving_out_is_offered(line):
                gathered, leak = _gather(line, name, encoder, target, progress, on_download)
            groups, stream = _groups(line, name, gathered)
            data = stream.astype(line.token_dtype).tobytes()
            (directory / f"{name}.bin").write_bytes(data)
            sources[name] = {
                "identity": line.source(name).identity.hex(),
                "held_out": line.source(name).held_out,
                "tokens": len(stream),
                "documents": sum(g.documents for g in gathered),
                "sha256": sha256_bytes(data),
                "control_tokens_per_million": leak,
                "groups": groups,
            }
        index = {
            "format": VALIDATION_FORMAT,
            "line": line.id,
            "unit_tokens": line.unit_tokens,
            "asked_tokens": target,
            "sources": sources,
        }
        (directory / "index.json").write_bytes(sealed_index(index))
    return index


def sealed_index(index: dict[str, Any]) -> bytes:
    """val/index.json's bytes: its fields, and in `sha256` the hash of all others in their canonical form.

    How much was asked for is not hashed: it says how to gather the text, which is the same for many a number.
    """
    fields = {name: value for name, value in index.items() if name not in ("sha256", "asked_tokens")}
    asked = {name: index[name] for name in ("asked_tokens",) if name in index}
    return canonical_json({**fields, **asked, "sha256": sha256_bytes(canonical_json(fields))})


def _gather(
    line: DataLine,
    name: str,
    encoder: Encoder,
    target: int,
    progress: Callable[[str, float], None],
    on_download: OnDownload,
) -> tuple[list[_Gathered], dict[str, float]]:
    """Held-out documents by stratum, and the control tokens a million: by the library's default, and by ours.

    Of the files that the line leaves out only those that cannot be used are passed over, so that the same is gathered
    before and after one is left out.
    """
    left_out = {file.path for file in line.settings.excluded if file.source == name}
    supplied, listing = line.supplied(name, on_download), line.listing(name)
    source, supply = supplied.settings, supplied.supply
    first = [files[0] for files in listing.files if files[0].path not in left_out]
    supply.fetch(first)  # most strata need no other; they stay until they are opened
    markers = encoder.marker_ids(source.markers, name)
    sizes = listing.bytes_by_stratum
    gathered = [_Gathered() for _ in listing.strata]
    default_control = default_total = plain_control = plain_total = 0
    marker_ids = np.array(sorted(markers.values()), np.int64)
    added = np.setdiff1d(np.array(sorted(encoder.vocabulary.added.values()), np.int64), marker_ids)
    for stratum, into in enumerate(gathered):
        want = max(line.unit_tokens + 1, -(-target * sizes[stratum] // max(1, sum(sizes))))
        for file in listing.files[stratum]:
            if into.count >= want:
                break
            if file.path in left_out and not _is_usable(supply, source, file, listing.strata[stratum]):
                continue
            supply.fetch([file])
            rows = read_pinned(source, file, listing.strata[stratum])
            held_out = (row.text for row in rows if row.text is not None and source.is_held_out(row.text))
            while texts := _some(held_out):
                for ids in encoder.encode(texts, markers):
                    plain_control += int(np.isin(ids, added).sum())
                    plain_total += len(ids)
                    into.tokens.append(np.append(ids, encoder.eos_id))
                    into.count += len(ids) + 1
                    into.documents += 1
                control, total = encoder.control_tokens_by_default(texts)
                default_control, default_total = default_control + control, default_total + total
            if file.order >= line.settings.open_files:  # it will not be opened soon
                supply.release(file)
        progress(name, (stratum + 1) / len(gathered))
    return gathered, {
        "library_default": 1e6 * default_control / max(1, default_total),
        "plain_text": 1e6 * plain_control / max(1, plain_total),
    }


def _is_usable(supply: Supply, source: SourceSettings, file: PinnedFile, stratum: str) -> bool:
    """Whether a file can be had, and read to its end."""
    try:
        supply.fetch([file])
        for _ in read_pinned(source, file, stratum):
            pass
    except FileRefusal:
        return False
    return True


def _some(texts: Iterator[str]) -> list[str]:
    """The next texts, about BATCH_CHARACTERS of them; none at the end."""
    taken: list[str] = []
    characters = 0
    for text in texts:
        taken.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            break
    return taken


def _groups(line: DataLine, name: str, gathered: list[_Gathered]) -> tuple[list[dict[str, Any]], npt.NDArray[np.int64]]:
    """Strata as groups that can each fill a row of the unit, and their tokens one after another.

    Strata that cannot are pooled; if the pool cannot either, the smallest of the others join it. Their documents are
    mixed, since rows are cut from a group's beginning: they are to be of all of them.
    """
    listing, row = line.listing(name), line.unit_tokens + 1
    by_size = sorted(range(len(gathered)), key=lambda i: (gathered[i].count, i))
    pooled = [i for i in by_size if gathered[i].count < row]
    others = by_size[len(pooled) :]
    while pooled and sum(gathered[i].count for i in pooled) < row:
        if not others:
            found = sum(g.count for g in gathered)
            raise Refusal(
                f"source {name}: its held-out documents have {found:,} tokens, a validation row takes {row:,}; hold "
                f"out more than {line.source(name).held_out:.2%} of it, use a smaller unit, or add text, in a new line"
            )
        pooled.append(others.pop(0))
    members = [sorted(pooled)] if pooled else []
    members += [[i] for i in sorted(others)]
    sizes = listing.bytes_by_stratum
    groups, parts, start = [], [], 0
    for strata in members:
        tokens = _mixed([gathered[i].tokens for i in strata], [sizes[i] for i in strata])
        count = sum(len(part) for part in tokens)
        groups.append(
            {
                "strata": [listing.strata[i] for i in strata],
                "pooled": strata == sorted(pooled),
                "start": start,
                "tokens": count,
                "weight_bytes": sum(sizes[i] for i in strata),
            }
        )
        parts += tokens
        start += count
    return groups, np.concatenate(parts)


def _mixed(documents: list[list[npt.NDArray[np.int64]]], weights: list[int]) -> list[npt.NDArray[np.int64]]:
    """The documents of several strata, the next one always of that which is furthest behind its weight in tokens.

    So each stratum gives one before any gives a second, the heaviest first. Each one's own order stays.
    """
    mixed: list[npt.NDArray[np.int64]] = []
    # (tokens taken over the weight, the weight's rank, stratum, documents given)
    behind = [(Fraction(0), -weight, i, 0) for i, weight in enumerate(weights) if documents[i]]
    heapq.heapify(behind)
    while behind:
        taken, rank, stratum, given = heapq.heappop(behind)
        mixed.append(documents[stratum][given])
        if given + 1 < len(documents[stratum]):
            after = taken + Fraction(len(mixed[-1]), max(1, -rank))
            heapq.heappush(behind, (after, rank, stratum, given + 1))
    return mixed


@dataclasses.dataclass(frozen=True)
class ValidationRow:
    """A held-out row and its part in its source's loss."""

    source: str
    stratum: str
    """The stratum it is cut from; pooled ones joined by '+'."""
    weight: float
    """Its source's loss is the sum of weight * mean loss over the source's rows; the weights sum to 1."""
    tokens: npt.NDArray[np.int64]
    """[row_tokens + 1]"""


@dataclasses.dataclass(frozen=True)
class ValidationRows:
    """The validation rows of one length."""

    row_tokens: int
    rows: tuple[ValidationRow, ...]

    @classmethod
    def open(cls, line: DataLine, row_tokens: int, rows_per_source: int) -> ValidationRows:
        """Cut the rows: of each source `rows_per_source`, each group at least one, the rest by weight.

        A source with more groups than that has a row of each; one with too little text has all it gives. Raises
        `Refusal` if `data val` has not run or its files are damaged.
        """
        refuse_row_length(row_tokens, line.unit_tokens)
        index = load_index(line)
        rows: list[ValidationRow] = []
        for name in line.source_names:
            entry = index["sources"][name]
            path = line.work / "val" / f"{name}.bin"
            data = path.read_bytes() if path.exists() else b""
            if sha256_bytes(data) != entry["sha256"]:
                found = "no file" if not path.exists() else f"sha256 {sha256_bytes(data)}"
                raise Refusal(
                    f"{path}: damaged: expected sha256 {entry['sha256']}, found {found}; {gather_again(line)}"
                )
            stream = np.frombuffer(data, line.token_dtype).astype(np.int64)
            rows += _cut(name, entry["groups"], stream, row_tokens, rows_per_source)
        return cls(row_tokens, tuple(rows))


def load_index(line: DataLine) -> dict[str, Any]:
    """val/index.json. Raises `Refusal` if `data val` has not run, or if it was edited or is of another line."""
    path = line.work / "val" / "index.json"
    if not path.exists():
        if path.parent.exists():
            raise Refusal(f"{path}: missing; {gather_again(line)}")
        gather = typed("nstrain", "data", "val", "--work", line.work)
        raise Refusal(f"{line.work}: has no held-out rows yet; run `{gather}`")
    again = gather_again(line)
    try:
        index: Any = read_json(path)
    except Refusal as error:
        raise Refusal(f"{error}; {again}") from None
    if not isinstance(index, dict) or (index.get("format"), index.get("line")) != (VALIDATION_FORMAT, line.id):
        raise Refusal(f"{path}: not the held-out index of this line in format {VALIDATION_FORMAT}; {again}")
    if path.read_bytes() != sealed_index(index):
        raise Refusal(
            f"{path}: its content does not have the sha256 that stands in it ({index.get('sha256')}): it was edited or "
            f"damaged, and validation rows and weights are fixed for the line's life; {again}"
        )
    return index


def gather_again(line: DataLine) -> str:
    """How to have damaged held-out text back: it follows from the pinned inputs and how much of it was asked for."""
    path = line.work / "val"
    index = path / "index.json"
    found = _ASKED.search(index.read_bytes()) if index.exists() else None
    command = ["nstrain", "data", "val", "--work", str(line.work)]
    if found is not None:
        command += ["--tokens-per-source", found[1].decode()]
    note = "" if found is not None else ", and the --tokens-per-source of then if it was given one"
    if line.settings.fork is not None:
        note += ". A branch with rows as long as its trunk's: the files NAME.bin are those of its trunk"
    return f"put a copy back, or have the same gathered again by `{typed('rm', '-r', path)} && {typed(*command)}`{note}"


def held_out_digest(line: DataLine) -> str:
    """The hash of the line's held-out index, and so of its text: a training line's readings are of one for life.

    Raises `Refusal` like `load_index`.
    """
    return str(load_index(line)["sha256"])


def _cut(
    name: str, groups: list[dict[str, Any]], stream: npt.NDArray[np.int64], row_tokens: int, rows: int
) -> list[ValidationRow]:
    available = [(group["tokens"] - 1) // row_tokens for group in groups]
    weights = [group["weight_bytes"] for group in groups]
    counts = _apportion(rows, weights, available)
    cut = []
    for group, count, weight in zip(groups, counts, weights, strict=True):
        stratum = "+".join(group["strata"])
        part = float(Fraction(weight, sum(weights) * count))
        for row in range(count):
            start = group["start"] + row * row_tokens
            cut.append(ValidationRow(name, stratum, part, stream[start : start + row_tokens + 1]))
    return cut


def _apportion(rows: int, weights: list[int], available: list[int]) -> list[int]:
    """At least one row a group, then each further row to the group with the most weight a row (ties: the first)."""
    counts = [1] * len(weights)
    while sum(counts) < rows:
        open_groups = [i for i in range(len(counts)) if counts[i] < available[i]]
        if not open_groups:
            break
        counts[max(open_groups, key=lambda i: (Fraction(weights[i], counts[i]), -i))] += 1
    return counts
