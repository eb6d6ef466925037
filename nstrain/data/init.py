"""`nstrain data init`: a data line from a recipe, its inputs pinned; the directory appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

from nstrain.base.disk import atomic_write_json, directory_by_rename, read_json
from nstrain.base.errors import Refusal
from nstrain.data.budget import refuse_too_small
from nstrain.data.encode import ENCODING_VERSION, load_encoder
from nstrain.data.line import DataLine, LineSettings, PinnedSource, TokenizerPin
from nstrain.data.order import ORDER_VERSION
from nstrain.data.schedule import Schedule, make_piece
from nstrain.data.sources import Listing, SourceSettings, list_local
from nstrain.settings.model import Settings, dump, validate


class RecipeSource(SourceSettings):
    """A source of a recipe: what it is, and its share."""

    share: int = pydantic.Field(gt=0)
    """Its share of the tokens, as a whole number; only the shares' proportions matter."""

    @property
    def source(self) -> SourceSettings:
        """The source without its share, as line.json has it."""
        return SourceSettings.model_validate(self.model_dump(exclude={"share"}))


class Recipe(Settings):
    """A recipe file: the sources of a line and their shares."""

    format: Literal[1]
    """Version of this file's format."""
    sources: tuple[RecipeSource, ...] = pydantic.Field(min_length=1)
    """In the order in which they are numbered."""

    @pydantic.model_validator(mode="after")
    def _names(self) -> Recipe:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {', '.join(twice)}")
        return self


def load_recipe(path: Path) -> Recipe:
    """A recipe file. A local source's relative path is taken from the file's directory. Raises `Refusal`."""
    return parse_recipe(read_json(path), path.parent, str(path))


def parse_recipe(value: Any, base: Path, where: str) -> Recipe:
    """A recipe from JSON values; relative paths start at `base`, and `where` names it in messages. Raises `Refusal`."""
    recipe = validate(Recipe, value, where)
    placed = [s.model_copy(update={"path": str((base / Path(s.path).expanduser()).resolve())}) for s in recipe.sources]
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
    on_file: Callable[[str, int], None] = lambda source, size: None,
) -> DataLine:
    """Make a data line; `on_file(source, bytes)` is called for each file hashed.

    Everything is checked before the directory appears: the tokenizer (with the canary), every source's files, the
    schedule, and whether each source's bytes can give the tokens that the schedule takes. Raises `Refusal`.
    """
    if work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise Refusal(f"{work}: exists already; name a new directory, or remove this one first")
    for what, number in {"cycles": cycles, "unit_tokens": unit_tokens, "open_files": open_files}.items():
        if number is not None and number < 1:
            raise Refusal(f"{what}: expected a positive whole number, found {number}")
    encoder = load_encoder(tokenizer, eos_id)
    for entry in recipe.sources:
        encoder.marker_ids(entry.source.markers, entry.source.name)
    shares = {entry.source.name: entry.share for entry in recipe.sources}
    piece = make_piece(shares, cycle_tokens, unit_tokens, cycles, segment_units)
    schedule = Schedule((piece,), unit_tokens)
    listings: dict[str, Listing] = {}
    for entry in recipe.sources:
        name = entry.source.name
        listings[name] = list_local(entry.source, seed, lambda size, name=name: on_file(name, size))  # type: ignore[misc]
    # A text tree's file is one document.
    refuse_too_small(schedule, {n: (sum(x.bytes_by_stratum), x.count) for n, x in listings.items()}, encoder)
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
        schedule=(piece,),
        sources=tuple(
            PinnedSource(
                settings=entry.source,
                listing_sha256=listings[entry.source.name].digest,
                files=listings[entry.source.name].count,
                bytes=sum(listings[entry.source.name].bytes_by_stratum),
            )
            for entry in recipe.sources
        ),
    )
    settings = settings.model_copy(update={"id": settings.fixed_id()})
    with directory_by_rename(work) as directory:
        for name, listing in listings.items():
            (directory / "sources" / name).mkdir(parents=True)
            listing.save(directory / "sources" / name / "files.parquet")
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        for name in ("manifests", "cycles", "consumers", "open"):
            (directory / name).mkdir()
        atomic_write_json(directory / "state.json", {"format": 1, "prepared_cycles": 0})
        atomic_write_json(directory / "line.json", dump(settings))
    return DataLine.open(work)
