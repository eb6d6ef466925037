"""A data line's directory: line.json, the pinned lists, the tokenizer's copy; opened once, then only read.

line.json      what the line is; written by `data init`; its schedule and what it leaves out grow at their end
tokenizer.json the tokenizer's own copy, pinned by its hash
sources/NAME/files.parquet   the pinned list of a source's files
state.json     the calibration, and what is prepared      preparer.json  what the preparer does now
val/           held-out text             cycles/000001/ a prepared cycle       manifests/000001.json  for ever
open/NAME/     tokens of opened files: a cache        consumers/ID.json  where each training line is
downloads/     files of hub sources, fetched and not opened yet
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from nstrain.base.commands import typed
from nstrain.base.disk import atomic_write_json, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.calibration import Calibration, load_calibration
from nstrain.data.encode import ENCODING_VERSION, Encoder, token_dtype
from nstrain.data.opened import OpenedFiles, OpenerPool
from nstrain.data.order import ORDER_VERSION, derive_key
from nstrain.data.schedule import CyclePlan, Piece, Schedule
from nstrain.data.sources import Listing, SourceSettings
from nstrain.data.supply import DOWNLOADS, OnDownload, SuppliedSource, fetched_nothing, placed, supplied
from nstrain.settings.model import Natural, Positive, Settings, Whole, WholeNumber, dump, load

LINE_FORMAT: Literal[1] = 1

OF_A_LINE = ("state.json", "manifests", "sources", "cycles", "consumers")
"""What lies in no directory but a data line's."""

RESTORE_LINE = (
    "put a copy of it back. Without one: `nstrain data init` into another directory, with the recipe, tokenizer and "
    "options of then, makes the same file (the same `id`, which manifests/ have as `line`); copy that here, and extend "
    "its schedule and its list `excluded` as they were"
)
"""What mends a line.json."""

RESTORE_STATE = (
    "put a copy of it back. The state.json of a branch or the trunk of this data line has the same calibration, and so "
    "has that of `nstrain data init` into another directory with the recipe, tokenizer and options of then: copy one "
    "here"
)
"""What mends a state.json: all else in it is found again."""


class TokenizerPin(Settings):
    """The tokenizer a line was made with."""

    sha256: str
    """Of tokenizer.json's bytes."""
    vocabulary_size: Whole
    """Token ids are below this."""
    canary_sha256: str
    """Of the ids it gave a fixed text in `data init`: another library that encodes otherwise is refused."""


class PinnedSource(Settings):
    """A source and the hash of its pinned file list."""

    settings: SourceSettings
    listing_sha256: str
    """Of the list's content (`Listing.digest`)."""
    files: Whole
    """Files in the list."""
    bytes: Whole
    """Their bytes."""


class Fork(Settings):
    """Where a branch line comes from."""

    line: str
    """Id of the trunk."""
    cycle: Positive
    """The trunk's cycle after which it forked."""
    manifest_sha256: str
    """Of that cycle's manifest, of which parent.json is a copy."""
    tokens: Natural
    """The position at the fork, from which the branch counts on."""


class Exclusion(Settings):
    """A file that is left out of all cycles from one on (`nstrain data exclude`)."""

    source: str
    """Its source's name."""
    path: str
    """Its path in the pinned list."""
    sha256: str
    """As pinned."""
    from_cycle: Positive
    """The first cycle that could not open it any more; a branch leaves out from its first what its trunk left out."""


class LineSettings(Settings):
    """line.json."""

    format: Annotated[Literal[1], WholeNumber] = LINE_FORMAT
    """Version of this file's format."""
    id: str
    """The line's own name: a hash of everything here but what grows and the places of local sources."""
    order_version: Whole
    """ORDER_VERSION the line was made with; gates."""
    encoding_version: Whole
    """ENCODING_VERSION the line was made with; gates."""
    seed: Whole
    """Keys the order of files and windows."""
    eos_id: Whole
    """The token after every document."""
    tokenizer: TokenizerPin
    unit_tokens: Positive
    """The longest row of the line; every row length divides it."""
    open_files: Positive
    """Files of a stratum that stay open together."""
    calibration_sha256: str
    """Of the calibration in state.json (`Calibration.digest`)."""
    schedule: tuple[Piece, ...]
    """Pieces of cycles; what they say of a prepared cycle never changes."""
    sources: tuple[PinnedSource, ...]
    """In the recipe's order."""
    fork: Fork | None = None
    """Of a branch: where it began."""
    excluded: tuple[Exclusion, ...] = ()
    """Files that are left out; only grows at its end, and no cycle that was made changes by it."""

    @pydantic.model_serializer(mode="wrap")
    def _without_an_empty_list(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A line that leaves nothing out is written as it was before lines could."""
        fields: dict[str, Any] = handler(self)
        if not self.excluded:
            fields.pop("excluded", None)
        return fields

    def fixed_id(self) -> str:
        """What `id` must be. A field at its default does not count, so that a later field with one changes no id."""
        fixed = self.model_dump(mode="json", exclude={"id", "schedule", "excluded"}, exclude_defaults=True)
        for source in fixed["sources"]:
            for place in ("path", "mirrors"):
                source["settings"].pop(place, None)
        return derive_key("line", fixed).hex()[:16]


@dataclasses.dataclass(frozen=True)
class DataLine:
    """An opened data line."""

    work: Path
    settings: LineSettings
    schedule: Schedule
    _listings: dict[str, Listing] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, work: Path) -> DataLine:
        """Open a line. Raises `Refusal` if it is not one, or was made by code whose order or encoding differs."""
        path = work / "line.json"
        if not path.exists():
            if any((work / name).exists() for name in OF_A_LINE):
                raise Refusal(f"{path}: missing, though this is a data line; {RESTORE_LINE}")
            make = typed("nstrain", "data", "init", "--work", work)
            raise Refusal(
                f"{work} is not a data line (no line.json). One that was moved is named to its training lines by "
                f"`data.work` in their run.json; else make one with `{make}`"
            )
        try:
            settings = load(LineSettings, path)
        except Refusal as error:
            raise Refusal(f"{error}. If nobody edited it: {RESTORE_LINE}") from None
        for name, theirs, ours in (
            ("ORDER_VERSION", settings.order_version, ORDER_VERSION),
            ("ENCODING_VERSION", settings.encoding_version, ENCODING_VERSION),
        ):
            if theirs != ours:
                raise Refusal(
                    f"{path}: made with {name} {theirs}, this nstrain has {ours}; continue it with the nstrain that "
                    "made it, or make a new line"
                )
        if settings.id != settings.fixed_id():
            raise Refusal(
                f"{path}: was edited: its id is {settings.id}, its fields hash to {settings.fixed_id()}. All but the "
                "schedule, `excluded` and the sources' paths keep their value for the line's life; put back the "
                "original. "
                f"If nobody edited it: {RESTORE_LINE}"
            )
        names = [source.settings.name for source in settings.sources]
        for piece in settings.schedule:
            if list(piece.recipe) != [name for name in names if name in piece.recipe]:
                raise Refusal(
                    f"{path}: a recipe of the schedule has {', '.join(piece.recipe)}; expected some of the line's "
                    f"sources in their order: {', '.join(names)}. If nobody edited it: {RESTORE_LINE}"
                )
        for file in settings.excluded:
            if file.source not in names:
                raise Refusal(f"{path}: leaves out a file of {file.source}, which is no source of it; {RESTORE_LINE}")
        fork_tokens = settings.fork.tokens if settings.fork else 0
        return cls(work, settings, Schedule(settings.schedule, settings.unit_tokens, fork_tokens))

    def grow(self, settings: LineSettings) -> None:
        """Replace line.json by settings that add to this line's. Raises `Refusal` if it changed since it was opened."""
        path = self.work / "line.json"
        if load(LineSettings, path) != self.settings:
            raise Refusal(f"{path}: another command has changed it meanwhile; type this one again")
        atomic_write_json(path, dump(settings))

    @property
    def id(self) -> str:
        """The line's own name."""
        return self.settings.id

    @property
    def eos_id(self) -> int:
        """The token after every document."""
        return self.settings.eos_id

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.settings.tokenizer.vocabulary_size

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """How tokens are stored in token files."""
        return token_dtype(self.vocab_size)

    @property
    def unit_tokens(self) -> int:
        """The longest row."""
        return self.settings.unit_tokens

    @property
    def source_names(self) -> tuple[str, ...]:
        """All sources, in the line's order."""
        return tuple(source.settings.name for source in self.settings.sources)

    @property
    def cycle_count(self) -> int | None:
        """Cycles of the schedule; None if it is open-ended."""
        return self.schedule.cycle_count

    @property
    def total_tokens(self) -> int | None:
        """The position at the schedule's end; None if it is open-ended."""
        return self.schedule.total_tokens

    def cycle_plan(self, cycle: int) -> CyclePlan:
        """What the schedule says of a cycle, from 1."""
        return self.schedule.cycle(cycle)

    def cycle_bytes(self, cycle: int) -> int:
        """Bytes of a cycle's tokens on disk (what its tables of documents take: `cycle_tables_bytes`)."""
        plan = self.cycle_plan(cycle)
        return (plan.tokens + len(plan.sources)) * self.token_dtype.itemsize

    def source(self, name: str) -> SourceSettings:
        """A source's settings by name, with the place of its files on this disk."""
        return placed(self._pinned(name), self.work / DOWNLOADS)

    def supplied(self, name: str, on_download: OnDownload = fetched_nothing) -> SuppliedSource:
        """A source ready to be read; `on_download` is told of what is fetched for it, and may raise to stop that."""
        return supplied(self._pinned(name), self.work / DOWNLOADS, on_download)

    def _pinned(self, name: str) -> SourceSettings:
        return next(s.settings for s in self.settings.sources if s.settings.name == name)

    def recipe(self, shares: dict[str, int]) -> dict[str, int]:
        """Shares by source, in the line's order of sources. Raises `Refusal` for a source that it does not have."""
        unknown = sorted(set(shares) - set(self.source_names))
        if unknown:
            raise Refusal(f"no source is called {', '.join(unknown)}; {self.work} has {', '.join(self.source_names)}")
        return {name: shares[name] for name in self.source_names if name in shares}

    def listing(self, name: str) -> Listing:
        """A source's pinned files."""
        if name not in self._listings:
            pinned = next(s for s in self.settings.sources if s.settings.name == name)
            path = self.work / "sources" / name / "files.parquet"
            self._listings[name] = Listing.load(path, pinned.listing_sha256)
        return self._listings[name]

    def excluded(self, cycle: int) -> dict[str, list[str]]:
        """The paths of the files that a cycle leaves out, sorted, by source; sources without one are not there."""
        found: dict[str, list[str]] = {}
        for file in self.settings.excluded:
            if file.from_cycle <= cycle:
                found.setdefault(file.source, []).append(file.path)
        return {name: sorted(paths) for name, paths in sorted(found.items())}

    def listing_for(self, name: str, cycle: int) -> Listing:
        """A source's pinned files as a cycle may open them: without those left out.

        Raises `Refusal` if line.json leaves out a file that is not pinned.
        """
        listing = self.listing(name)
        paths = {f.path: f.sha256 for f in self.settings.excluded if f.source == name and f.from_cycle <= cycle}
        if not paths:
            return listing
        places = [file for files in listing.files for file in files if paths.get(file.path) == file.sha256]
        if unknown := sorted(set(paths) - {file.path for file in places}):
            raise Refusal(
                f"{self.work / 'line.json'}: leaves out {unknown[0]!r} of source {name} with sha256 "
                f"{paths[unknown[0]]}, which is not among its pinned files; {RESTORE_LINE}"
            )
        return dataclasses.replace(listing, left_out=frozenset((file.stratum, file.order) for file in places))

    def encoder(self) -> Encoder:
        """The line's encoder, proven to give the ids it gave when the line was made. Raises `Refusal`."""
        path = self.work / "tokenizer.json"
        if not path.exists():
            raise Refusal(f"{path}: missing; put back the tokenizer with sha256 {self.settings.tokenizer.sha256}")
        data = path.read_bytes()
        if sha256_bytes(data) != self.settings.tokenizer.sha256:
            raise Refusal(
                f"{path}: has sha256 {sha256_bytes(data)}, the line was made with {self.settings.tokenizer.sha256}; "
                "put the original back"
            )
        encoder = Encoder(data, self.eos_id, str(path))
        if encoder.canary_sha256 != self.settings.tokenizer.canary_sha256:
            raise Refusal(
                f"{path}: the installed tokenizers library gives other ids than the one that made the line; "
                "install the version that made it"
            )
        return encoder

    def opened_files(
        self,
        name: str,
        encoder: Encoder,
        pool: OpenerPool | None = None,
        on_open: Callable[[], None] = lambda: None,
        on_download: OnDownload = fetched_nothing,
    ) -> OpenedFiles:
        """The opened files of a source, cached under open/; `on_open` is called before each that is not there yet."""
        directory, source = self.work / "open" / name, self.supplied(name, on_download)
        return OpenedFiles(directory, source.settings, self.listing(name), encoder, on_open, pool, source.supply)

    def calibration(self) -> Calibration:
        """The line's calibration. Raises `Refusal` if it is not the one that line.json pins."""
        path = self.work / "state.json"
        try:
            calibration = load_calibration(path)
        except Refusal as error:
            raise Refusal(f"{error}; {RESTORE_STATE}") from None
        if calibration.digest() != self.settings.calibration_sha256:
            raise Refusal(
                f"{path}: its calibration has digest {calibration.digest()}, line.json pins "
                f"{self.settings.calibration_sha256}, and shares follow from it; {RESTORE_STATE}"
            )
        return calibration

    def cycle_directory(self, cycle: int) -> Path:
        """Where a prepared cycle lies."""
        return self.work / "cycles" / f"{cycle:06d}"

    def manifest_path(self, cycle: int) -> Path:
        """Where a cycle's permanent manifest lies."""
        return self.work / "manifests" / f"{cycle:06d}.json"

    @property
    def parent_manifest_path(self) -> Path:
        """A branch's copy of the manifest it forked after."""
        return self.work / "parent.json"

    def is_ready(self, cycle: int) -> bool:
        """Whether a cycle is on disk, complete."""
        return (self.cycle_directory(cycle) / "READY").exists()
