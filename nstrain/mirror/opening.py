"""What a line's mirror is made of: its settings, the service's client, and how its runs are called there."""

from __future__ import annotations

from collections.abc import Callable

from nstrain.base.disk import FileLock
from nstrain.base.errors import Refusal
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import load_settings
from nstrain.mirror.clock import MirrorClock, MirrorPace
from nstrain.mirror.contract import RunIdentity, Tracker
from nstrain.mirror.copying import Copier
from nstrain.settings.model import dump
from nstrain.settings.run import RunSettings, TrackerSettings

MakeTracker = Callable[[TrackerSettings], Tracker]
"""The client of the service that settings name."""


def mirror_lock(paths: LinePaths) -> FileLock:
    """The lock of a line's one mirror."""
    return FileLock(paths.mirror_lock)


def tracked_settings(paths: LinePaths) -> tuple[RunSettings, TrackerSettings]:
    """run.json, and the tracker that it names. Raises `Refusal` if it names none."""
    settings = load_settings(paths)
    if settings.tracker is None:
        raise Refusal(
            f"{paths.run_json}: names no tracker, so there is nowhere to copy the journal to; to begin, write "
            '"tracker": {"service": "wandb", "project": "..."} and list "tracker" in allow_changes'
        )
    return settings, settings.tracker


def make_tracker(settings: TrackerSettings) -> Tracker:
    """The client of the service that run.json names."""
    from nstrain.mirror.wandb_tracker import WandbTracker

    return WandbTracker(settings)


def make_copier(
    paths: LinePaths,
    tell: Callable[[str], None],
    clock: MirrorClock,
    pace: MirrorPace | None = None,
    tracker: MakeTracker | None = None,
) -> Copier:
    """What copies a line's journal, for who holds its mirror lock; to `tracker` instead of the service itself.

    Raises `Refusal` if run.json names no tracker, or wandb_run.json is damaged.
    """
    settings, tracked = tracked_settings(paths)
    return Copier(
        paths,
        tracked,
        (tracker or make_tracker)(tracked),
        lambda *run: identity(paths, settings, *run),
        tell,
        clock,
        pace,
    )


def identity(paths: LinePaths, settings: RunSettings, run_id: str, generation: int) -> RunIdentity:
    """How the run that copies a generation of a line is called, and what its config says."""
    branch = settings.branch
    parent = None
    if branch is not None:
        parent = {"line": branch.line, "run": branch.from_run, "update": branch.update, "tokens": branch.tokens}
    origin = {"line": settings.id, "run": str(paths.root), "generation": generation, "parent": parent}
    return RunIdentity(
        run_id=run_id,
        name=paths.root.name if generation == 1 else f"{paths.root.name} g{generation}",
        group=settings.id,
        config={**dump(settings), "nstrain": origin},
        directory=paths.wandb_directory,
    )
