"""`nstrain data exclude`: a file that cannot be used is left out, and the line goes on without it.

A file is pinned when the line is made and read when a cycle opens it, weeks later perhaps; if it was uploaded damaged,
trying again comes to the same end, and if it is gone from everywhere by then too. Leaving it out is a person's
decision, which line.json records: from the first cycle that has no manifest yet on, the file is passed over. Cycles
that were made stay the bytes that they are, also when they are made again, since each leaves out what it left out then;
their manifests say so too. What is to come follows from line.json alone. The file keeps its place in its stratum's
order, and the line its id: those who train on it go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator

from nstrain.base.commands import typed
from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine, Exclusion
from nstrain.data.manifest import last_prepared, refuse_edited_pasts, states_before
from nstrain.data.readers import UnusableFile
from nstrain.data.readers.errors import FileRefusal
from nstrain.data.sources import PinnedFile
from nstrain.data.state import SourceState


@contextlib.contextmanager
def leaving_out_is_offered(line: DataLine) -> Iterator[None]:
    """Where a line reads files that no cycle has opened before: say of one that cannot be used how to leave it out."""
    try:
        yield
    except FileRefusal as error:
        if not error.path:
            raise
        end_of_options = ["--"] if error.path.startswith("-") else []
        options = ("--work", line.work, "--source", error.source, *end_of_options)
        command = typed("nstrain", "data", "exclude", *options, error.path)
        if not isinstance(error, UnusableFile):
            told_of_gone = type(error)(
                f"{error}. If it cannot be had any more: `{command}` leaves the file out of all that is still to be "
                "prepared, and what was prepared and trained stays as it is"
            )
            told_of_gone.found_in(error.source, error.path)
            raise told_of_gone from None
        again = "If it stays so when it is tried again," if error.may_pass else "Trying again does not mend it;"
        told = type(error)(
            error.fault,
            f". {again} `{command}` leaves the file out of all that is still to be prepared, and what was prepared and "
            "trained stays as it is",
        )
        told.found_in(error.source, error.path)
        told.may_pass = error.may_pass
        raise told from None


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """What `exclude_file` has done."""

    file: Exclusion
    before: bool
    """Whether it was left out already, so that nothing was written."""
    size: int
    """The file's bytes."""
    ended_strata: tuple[str, ...]
    """Strata of it that have no other file left to open: they end with what of them is open."""


def exclude_file(line: DataLine, source: str, path: str) -> LeftOut:
    """Leave a file of a source out of the cycles that are not prepared yet; `path` is as pinned.

    The caller holds the preparer's lock and has opened the line under it. Raises `Refusal`, before anything is written,
    for a file that the line does not have or that a prepared cycle has opened, if the next cycle certainly cannot be
    filled without it, or if the line is not what its manifests say.
    """
    refuse_edited_pasts(line)
    files = _pinned(line, source, path)
    cycle = last_prepared(line) + 1
    known = next((file for file in line.settings.excluded if (file.source, file.path) == (source, path)), None)
    added = known or Exclusion(source=source, path=path, sha256=files[0].sha256, from_cycle=cycle)
    state = states_before(line, cycle)[source]
    settings = line.settings
    if known is None:
        _refuse_opened(source, files, state, cycle)
        settings = settings.model_copy(update={"excluded": (*settings.excluded, added)})
    without = dataclasses.replace(line, settings=settings)
    listing = without.listing_for(source, cycle)
    ended = {file.stratum for file in files if _used_up(without, source, file.stratum, state, cycle)}
    if known is None:
        _refuse_unfillable(without, source, path, state, cycle)
        line.grow(settings)
    return LeftOut(added, known is not None, files[0].size, tuple(listing.strata[i] for i in sorted(ended)))


def _pinned(line: DataLine, source: str, path: str) -> list[PinnedFile]:
    """A file's entries in the pinned list: one, or where strata are by column one for each of its strata."""
    line.recipe({source: 1})  # a source that is unknown
    listing = line.listing(source)
    found = [file for files in listing.files for file in files if file.path == path]
    if not found:
        paths = sorted({file.path for files in listing.files for file in files})
        near = difflib.get_close_matches(path, paths[:10_000], n=1) or [paths[0]]
        raise Refusal(
            f"source {source}: {path!r} is none of its {len(paths):,} pinned files, which are named like {near[0]!r}; "
            "give the path as it is pinned, relative to the source's directory"
        )
    return found


def _refuse_opened(source: str, files: list[PinnedFile], state: SourceState, cycle: int) -> None:
    """Refuse a file that a prepared cycle, or a branch's trunk before the fork, has opened."""
    if any(file.order < state.strata[file.stratum].next_file for file in files):
        raise Refusal(
            f"source {source}: {files[0].path} was opened before cycle {cycle}, so it can be read, and text of it may "
            "have been trained; what a line has opened it uses up. Only a file that no cycle has opened can be left out"
        )


def _used_up(line: DataLine, source: str, stratum: int, state: SourceState, cycle: int) -> bool:
    """Whether a stratum has no file left to open."""
    listing = line.listing_for(source, cycle)
    return next(listing.unopened(stratum, state.strata[stratum].next_file), None) is None


def _refuse_unfillable(line: DataLine, source: str, path: str, state: SourceState, cycle: int) -> None:
    """Refuse to leave out the last file of a source whose open ones do not fill the next cycle."""
    if line.cycle_count is not None and cycle > line.cycle_count:
        return
    plan = line.cycle_plan(cycle)
    targets = dict(zip(plan.sources, plan.source_tokens, strict=True)).get(source, 0)
    if not targets or not all(_used_up(line, source, i, state, cycle) for i in range(len(state.strata))):
        return
    left = sum(file.left for stratum in state.strata for file in stratum.open)
    left += state.tail.tokens if state.tail is not None else 0
    if left < targets + 1:
        raise Refusal(
            f"source {source}: {path} is the last file that it has to open; without it {left:,} tokens are left, and "
            f"cycle {cycle} takes {targets + 1:,}: the line ends with cycle {cycle - 1}, or goes on as a branch whose "
            f"recipe leaves {source} out (`nstrain data branch --share`)"
        )
