"""`nstrain data init`: a data line from a recipe, its inputs pinned; the directory appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from nstrain.base.disk import atomic_write_json, directory_by_rename, read_json, refuse_existing, refuse_unmakeable
from nstrain.base.errors import Refusal
from nstrain.data.budget import refuse_too_small
from nstrain.data.calibration import Calibration, calibrate, load_calibration
from nstrain.data.encode import ENCODING_VERSION, load_encoder
from nstrain.data.line import DataLine, LineSettings, PinnedSource, TokenizerPin
from nstrain.data.order import ORDER_VERSION
from nstrain.data.readers import refuse_missing_columns
from nstrain.data.recipes import packaged_recipes
from nstrain.data.schedule import Schedule, make_piece
from nstrain.data.sources import Listing, SourceSettings, list_local, resolve_inside
from nstrain.data.supply import DOWNLOADS, OnDownload, SuppliedSource, fetched_nothing, supplied
from nstrain.settings.model import Positive, Settings, WholeNumber, dump, validate

EMPTY_STATE = {"format": 1, "prepared_cycles": 0}
"""state.json of a line of which nothing is prepared, beside its calibration."""


LINE_DIRECTORIES = ("manifests", "cycles", "consumers", "open")
"""Directories that a line has from the start."""


NAMES_OF_ALL_SOURCES = frozenset({"mix", "mean"})
"""What a validation calls its losses over all sources: a source of such a name would lose its own."""


class RecipeSource(SourceSettings):
    """A source of a recipe: what it is, and its share."""

    share: Positive
    """Its share of the tokens, as a whole number; only the shares' proportions matter."""
    note: str | None = None
    """What whoever uses the recipe should know of this source; told beside an error about it."""

    @property
    def source(self) -> SourceSettings:
        """The source without its share and note, as line.json has it."""
        return SourceSettings.model_validate({name: getattr(self, name) for name in SourceSettings.model_fields})


class Recipe(Settings):
    """A recipe file: the sources of a line and their shares."""

    format: Annotated[Literal[1], WholeNumber]
    """Version of this file's format."""
    sources: tuple[RecipeSource, ...] = pydantic.Field(min_length=1)
    """In the order in which they are numbered."""

    @pydantic.model_validator(mode="after")
    def _names(self) -> Recipe:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {', '.join(twice)}")
        taken = sorted(NAMES_OF_ALL_SOURCES.intersection(names))
        if taken:
            raise ValueError(
                f"a source is called {taken[0]}: val_<L>/{taken[0]} is a reading of all sources; give it another name"
            )
        return self


def load_recipe(path: Path) -> Recipe:
    """A recipe file. A local source's relative path is taken from the file's directory. Raises `Refusal`."""
    return parse_recipe(read_json(path), path.parent, str(path))


def find_recipe(name: str) -> Recipe:
    """A recipe by its file, or by the name of one that comes with nstrain. Raises `Refusal`."""
    packaged = packaged_recipes()
    if not Path(name).is_file() and name not in packaged:
        found = "a directory, not a recipe" if Path(name).is_dir() else "no such recipe"
        raise Refusal(f"{name}: {found}; name a file, or one that comes with nstrain: {', '.join(packaged)}")
    return load_recipe(Path(name) if Path(name).is_file() else packaged[name])


def parse_recipe(value: Any, base: Path, where: str) -> Recipe:
    """A recipe from JSON values; relative paths start at `base`, and `where` names it in messages. Raises `Refusal`."""
    recipe = validate(Recipe, value, where)
    placed = [
        s if s.path is None else s.model_copy(update={"path": str((base / Path(s.path).expanduser()).resolve())})
        for s in recipe.sources
    ]
    return recipe.model_copy(update={"sources": tuple(placed)})


def init_line(
    work: Path,
    recipe: Recipe,
    tokenizer: Path,
    eos_id: int,
    cycle_tokens: int,
    cycles: int | None = None,
    unit_tokens: int = 32768,
    segment_units: int | None = None,
    seed: int = 0,
    open_files: int = 2,
    calibration_from: Path | None = None,
    on_file: Callable[[str, int], None] = lambda source, size: None,
    on_sample: Callable[[str, float], None] = lambda source, share: None,
    on_download: OnDownload = fetched_nothing,
    on_notice: Callable[[str], None] = lambda text: None,
) -> DataLine:
    """Make a data line; `on_file(source, bytes)` is called for each file hashed, `on_sample` while it is calibrated,
    `on_download` while files are fetched for that, `on_notice` with what has to be waited for.

    Everything is checked before the directory appears: the tokenizer (with the canary), every source's files and
    columns, the schedule, and whether each source's bytes can give the tokens that the schedule takes.
    Until then, what is fetched lies in .NAME.downloads beside it, for the next try should this one fail.
    `calibration_from` names the state.json of a line whose calibration is taken over for the sources that it has; that
    of the line which is being made has none to take over. Raises `Refusal`.
    """
    refuse_existing(work)
    refuse_unmakeable(work)
    for what, number in {"cycles": cycles, "unit_tokens": unit_tokens, "open_files": open_files}.items():
        if number is not None and number < 1:
            raise Refusal(f"{what}: expected a positive whole number, found {number}")
    encoder = load_encoder(tokenizer, eos_id)
    for entry in recipe.sources:
        encoder.marker_ids(entry.markers, entry.name)
    shares = {entry.name: entry.share for entry in recipe.sources}
    piece = make_piece(shares, cycle_tokens, unit_tokens, cycles, segment_units)
    sources = _pin_revisions(recipe, on_notice)
    listings = {entry.name: _list(entry, sources[entry.name], seed, on_file, on_notice) for entry in recipe.sources}
    downloads = work.with_name(f".{work.name}.{DOWNLOADS}")
    ready = {name: supplied(source, downloads, on_download) for name, source in sources.items()}
    for entry in recipe.sources:
        _refuse_missing_columns(entry, ready[entry.name], listings[entry.name])
    pinned = tuple(_pinned(source, listings[name]) for name, source in sources.items())
    refuse_too_small(Schedule((piece,), unit_tokens), pinned, encoder)
    known = _known_calibration(work, calibration_from)
    calibration = calibrate([(ready[name], listings[name]) for name in sources], encoder, known, on_sample)
    settings = LineSettings(
        id="",
        order_version=ORDER_VERSION,
        encoding_version=ENCODING_VERSION,
        seed=seed,
        eos_id=eos_id,
        tokenizer=TokenizerPin(
            sha256=encoder.sha256,
            vocabulary_size=encoder.vocabulary.size,
            canary_sha256=encoder.canary_sha256,
        ),
        unit_tokens=unit_tokens,
        open_files=open_files,
        calibration_sha256=calibration.digest(),
        schedule=(piece,),
        sources=pinned,
    )
    settings = settings.model_copy(update={"id": settings.fixed_id()})
    _write(work, settings, tokenizer, listings, calibration, downloads)
    return DataLine.open(work)


def _known_calibration(work: Path, calibration_from: Path | None) -> Calibration | None:
    """The calibration to take over; None without one, and for the line that host.json names for all that follow it."""
    if calibration_from is None or calibration_from.resolve() == (work / "state.json").resolve():
        return None
    return load_calibration(calibration_from)


def _pin_revisions(recipe: Recipe, on_notice: Callable[[str], None]) -> dict[str, SourceSettings]:
    """The sources by name; a branch of a hub's repository is resolved once, so that its sources have one commit."""
    commits: dict[tuple[str | None, str | None], str | None] = {}
    sources = {}
    for entry in recipe.sources:
        source = entry.source
        if source.kind == "hub":
            from nstrain.data.hub.pin import pin_revision

            key = (source.repo, source.revision)
            if key not in commits:
                with _note_is_told(entry):
                    commits[key] = pin_revision(source, on_notice).revision
            source = source.model_copy(update={"revision": commits[key]})
        sources[entry.name] = source
    return sources


def _list(
    entry: RecipeSource,
    source: SourceSettings,
    seed: int,
    on_file: Callable[[str, int], None],
    on_notice: Callable[[str], None],
) -> Listing:
    """A source's pinned list."""
    with _note_is_told(entry):
        if source.kind == "local":
            return list_local(source, seed, lambda size: on_file(entry.name, size), on_notice)
        from nstrain.data.hub.pin import list_hub

        return list_hub(source, seed, lambda size: on_file(entry.name, size), on_notice)


def _pinned(source: SourceSettings, listing: Listing) -> PinnedSource:
    """A source as line.json has it."""
    return PinnedSource(
        settings=source,
        listing_sha256=listing.digest,
        files=listing.count,
        bytes=sum(listing.bytes_by_stratum),
    )


def _refuse_missing_columns(entry: RecipeSource, source: SuppliedSource, listing: Listing) -> None:
    """Look for a hub source's columns in its first file (a local one's were looked for as it was listed)."""
    if source.settings.kind == "hub":
        first = listing.file(0, 0)
        with _note_is_told(entry):
            source.supply.fetch([first])
            path = resolve_inside(source.settings.root, first.path)
            refuse_missing_columns(source.settings.rows, path, f"source {entry.name}: {entry.repo}/{first.path}")


@contextlib.contextmanager
def _note_is_told(entry: RecipeSource) -> Iterator[None]:
    """Put a source's name and note beside a refusal of it."""
    try:
        yield
    except Refusal as error:
        named = str(error) if f"source {entry.name}" in str(error) else f"source {entry.name}: {error}"
        note = "" if entry.note is None else f". The recipe notes: {entry.note}"
        raise type(error)(named + note) from None


def _write(
    work: Path,
    settings: LineSettings,
    tokenizer: Path,
    listings: dict[str, Listing],
    calibration: Calibration,
    downloads: Path,
) -> None:
    """Make the line's directory; what was fetched for the calibration moves into it."""
    with directory_by_rename(work) as directory:
        for name, listing in listings.items():
            (directory / "sources" / name).mkdir(parents=True)
            listing.save(directory / "sources" / name / "files.parquet")
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        for name in LINE_DIRECTORIES:
            (directory / name).mkdir()
        atomic_write_json(directory / "state.json", {**EMPTY_STATE, "calibration": dump(calibration)})
        atomic_write_json(directory / "line.json", dump(settings))
        if downloads.exists():
            os.rename(downloads, directory / DOWNLOADS)
