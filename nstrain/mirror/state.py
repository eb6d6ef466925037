"""wandb_run.json: which run on the service is the copy of a line's journal, and how far it is.

The mirror alone writes it, holding locks/mirror.lock, and replaces it as a whole. A run's id stands here before the
service hears of it, so that a start that was cut off finds its run again; what a service has of a run is asked of the
service, and only told here. A file that is unknown or damaged is refused: taking it for none would begin a second run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.disk import atomic_write_json, read_json
from nstrain.base.errors import DiskFull, Refusal
from nstrain.line.paths import LinePaths

FORMAT = 1
"""Version of the file's form."""


@dataclasses.dataclass(frozen=True)
class ClientDirectory:
    """A directory in which a session of the service's client keeps its files."""

    path: str
    """Relative to the line's directory."""
    pid: int
    """The mirror whose session it is."""
    clean: bool
    """Whether the service has been found to hold all that was given to this session, which is over: it may go."""


@dataclasses.dataclass(frozen=True)
class SupersededRun:
    """A run that was the journal's copy before another took its place."""

    run_id: str
    generation: int
    """The journal's generation that it is the copy of."""
    why: str
    """Why it was replaced, for people."""
    at: float
    """When, in unix seconds."""
    marked: bool
    """Whether it is marked as superseded on the service."""


@dataclasses.dataclass(frozen=True)
class MirrorState:
    """The content of wandb_run.json."""

    service: str
    """The kind of service: wandb."""
    base_url: str | None
    """run.json's, when the run was begun: the service's address; None: the client's own default."""
    entity: str | None
    """Likewise: whose project it is; None: the account's default."""
    project: str
    """Likewise."""
    run_id: str
    """The run's id on the service."""
    generation: int
    """The journal's generation whose lineage the run is a copy of."""
    url: str | None = None
    """Where people see the run; None until the service has said so."""
    known: bool = False
    """Whether the service has taken the run."""
    pushed_through: int | None = None
    """The last update that was handed over; None: none."""
    verified_through: int | None = None
    """The updates up to this one were read back and compared with the journal; None: none."""
    differences: int = 0
    """Compared updates of which the service has another row than the journal."""
    failing_since: float | None = None
    """Unix time since which nothing was found to arrive; None: all is well."""
    error: str | None = None
    """What is wrong since then."""
    updated_at: float = 0.0
    """Unix time of the mirror's last sign of life."""
    pid: int | None = None
    """The mirror; None: it has ended in its own way."""
    directories: tuple[ClientDirectory, ...] = ()
    """Where sessions keep their files, in the order in which they began."""
    superseded: tuple[SupersededRun, ...] = ()
    """Earlier runs, in the order in which they were replaced."""


_REMEDY = "`{remove}` begins a new run on the service, filled from the journal; the present one stays there as it is"

_INT, _FLOAT, _TEXT, _BOOL = (int,), (int, float), (str,), (bool,)
_NONE = (type(None),)
_KINDS: dict[type, dict[str, tuple[type, ...]]] = {
    ClientDirectory: {"path": _TEXT, "pid": _INT, "clean": _BOOL},
    SupersededRun: {"run_id": _TEXT, "generation": _INT, "why": _TEXT, "at": _FLOAT, "marked": _BOOL},
    MirrorState: {
        "service": _TEXT,
        "base_url": _TEXT + _NONE,
        "entity": _TEXT + _NONE,
        "project": _TEXT,
        "run_id": _TEXT,
        "generation": _INT,
        "url": _TEXT + _NONE,
        "known": _BOOL,
        "pushed_through": _INT + _NONE,
        "verified_through": _INT + _NONE,
        "differences": _INT,
        "failing_since": _FLOAT + _NONE,
        "error": _TEXT + _NONE,
        "updated_at": _FLOAT,
        "pid": _INT + _NONE,
        "directories": (list,),
        "superseded": (list,),
    },
}


def read_state(paths: LinePaths) -> MirrorState | None:
    """A line's wandb_run.json; None if there is none. Raises `Refusal` with the remedy for one that is damaged."""
    if not paths.wandb_run.exists():
        return None
    try:
        value = read_json(paths.wandb_run)
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
        if value.get("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}, found {value.get('format')!r}")
        fields = {name: found for name, found in value.items() if name != "format"}
        _refuse_others(MirrorState, fields)
        for name, kind in (("directories", ClientDirectory), ("superseded", SupersededRun)):
            for entry in fields[name]:
                _refuse_others(kind, entry)
            fields[name] = tuple(kind(**entry) for entry in fields[name])
        return MirrorState(**fields)
    except Refusal as error:
        raise Refusal(f"{error}; {_remedy(paths)}") from None
    except ValueError as error:
        raise Refusal(f"{paths.wandb_run}: {error}; {_remedy(paths)}") from None


def _remedy(paths: LinePaths) -> str:
    return _REMEDY.format(remove=typed("rm", paths.wandb_run))


def _refuse_others(kind: type, value: Any) -> None:
    """Raise `ValueError` for anything but the fields of `kind` with values of their types."""
    kinds = _KINDS[kind]
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise ValueError(f"expected the fields {', '.join(kinds)}, found {value!r:.200}")
    for name, found in value.items():
        fits = isinstance(found, kinds[name]) and (bool in kinds[name] or not isinstance(found, bool))
        if not fits or (isinstance(found, float) and not math.isfinite(found)):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds[name])
            raise ValueError(f"field {name!r}: expected {expected}, found {found!r:.200}")


def write_state(paths: LinePaths, state: MirrorState) -> None:
    """Replace wandb_run.json, durably. Raises `DiskFull`."""
    atomic_write_json(paths.wandb_run, {"format": FORMAT, **dataclasses.asdict(state)})


class StateFile:
    """wandb_run.json as its one writer has it."""

    BEAT_S = 10.0
    """What is only noted is written no more often than this."""

    def __init__(self, paths: LinePaths, unix: Callable[[], float] = time.time) -> None:
        """`unix` tells the time. Raises `Refusal` for a file that is damaged."""
        self._paths, self._unix = paths, unix
        self._state = read_state(paths)
        self._written_at = float("-inf")

    @property
    def begun(self) -> bool:
        """Whether there is a run already."""
        return self._state is not None

    @property
    def state(self) -> MirrorState:
        """What the file says, or will say at the next beat."""
        assert self._state is not None, "a run must have begun"
        return self._state

    def begin(self, state: MirrorState) -> None:
        """Take another run for the copy, durably. Raises `DiskFull`."""
        self._write(state)

    def keep(self, **changes: Any) -> None:
        """Change fields, durably: what must be known after this instant. Raises `DiskFull`."""
        self._write(dataclasses.replace(self.state, **changes))

    def note(self, **changes: Any) -> None:
        """Change fields; they are written at the next beat."""
        self._state = dataclasses.replace(self.state, **changes)

    def beat(self, at_once: bool = False) -> None:
        """Give a sign of life, if it is time for one or what was noted is to be read now; a full disk may keep it."""
        if self.begun and (at_once or not 0 <= self._unix() - self._written_at < self.BEAT_S):
            with contextlib.suppress(DiskFull):  # what it does must not depend on telling it
                self._write(self.state)

    def _write(self, state: MirrorState) -> None:
        state = dataclasses.replace(state, updated_at=self._unix())
        write_state(self._paths, state)
        self._state, self._written_at = state, state.updated_at
