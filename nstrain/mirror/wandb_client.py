"""The W&B client in this process, held on a short lead.

The client is two things: a library in our process, and wandb-core, a process of its own that talks to the service. It
was made for a script that trains and ends, not for one that goes on for weeks: a call of it may wait for ever when the
service is away, its end waits until all is uploaded, and a session that failed leaves things behind in the process.
Therefore a session here is one client, from the first call to the killing of its wandb-core, and every call has a
limit, at which wandb-core is killed: the call then fails, and a later session begins afresh. Nothing is lost by that:
what the service has is read back, and the journal has the rest.

What the client keeps between sessions in the environment, and in `sys`, is put back when a session ends; a week in
which the service is away is a thousand sessions.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from nstrain.base.disk import disk_full_is_named
from nstrain.mirror.contract import ServiceAway, ServiceRefuses
from nstrain.mirror.credentials import INSTALL, address_for_people, refuse_unusable
from nstrain.settings.run import TrackerSettings

SERVICE_PROCESS = "wandb-core"

KILL_LIMIT_S = 10.0
"""How long a killed process may take to be gone."""

END_LIMIT_S = 5.0
"""How long a client without an open run may take to end before it is killed."""

INIT_LIMIT_S = 45.0
"""How long the client itself tries to open a run."""

_KEPT = (
    "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_APP_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CREDENTIALS_FILE",
    "WANDB_CONFIG_DIR", "WANDB_INSECURE_DISABLE_SSL", "WANDB_HTTP_TIMEOUT", "WANDB_HTTP_PROXY", "WANDB_HTTPS_PROXY",
)  # fmt: skip
"""Variables of the client that say who the user is and how the service is reached. All others are set aside: they are
about a person's own scripts (a mode, a project, a run, a sweep, the wandb-core of another process)."""

_HIDDEN_SETTINGS = "WANDB__"
"""What the names of the client's settings that are not public begin with in the environment. It leaves out those that
its version does not know."""

_PACE = {
    "WANDB__GRAPHQL_RETRY_MAX": "4",
    "WANDB__GRAPHQL_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "8",
    "WANDB__GRAPHQL_TIMEOUT_SECONDS": "30",
}
"""The mirror tries again by itself, and can say so; the client would do it for half an hour without a word."""

_NOT_OURS_TO_TELL = {
    "WANDB__DISABLE_META": "true",
    "WANDB__DISABLE_MACHINE_INFO": "true",
    "WANDB__DISABLE_STATS": "true",
    "WANDB__SAVE_REQUIREMENTS": "false",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
"""The machine, its packages and its load: the journal is copied, nothing else of this machine. And no chatter."""


class WandbClient:
    """One session of the client."""

    def __init__(self, settings: TrackerSettings, directory: Path) -> None:
        """Start it; its files go below `directory`, which no other process's client uses.

        Raises `ServiceRefuses` if it cannot be used on this machine, and `DiskFull`.
        """
        refuse_unusable(settings)
        self.directory = directory = Path(os.path.abspath(directory))
        self.service = address_for_people(settings)
        """Where it goes, for people."""
        self._ended = False
        kill_service_processes(directory)
        for cache in ("cache", "data"):  # nothing in them outlives a session; its log files would add up
            shutil.rmtree(directory / cache, ignore_errors=True)
        with disk_full_is_named(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._found = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
        self._sys = sys.exit, sys.excepthook
        self._sessions_found = self._session_directories()
        _set_environment(settings, directory)
        try:
            import wandb
        except ImportError as error:
            self._put_back()
            raise ServiceRefuses(f"the package wandb is there, but cannot be imported: {error}; {INSTALL}") from error
        self.wandb: Any = wandb
        threading.excepthook = _without_library_threads

    @contextlib.contextmanager
    def calling(self, what: str, limit_s: float, may_refuse: bool = False) -> Iterator[None]:
        """Call the client within the block, for at most `limit_s`.

        Raises `ServiceAway` for whatever goes wrong, or `ServiceRefuses` where that `may_refuse`.
        """
        late = threading.Event()

        def end_it() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(limit_s, end_it)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (ServiceAway, ServiceRefuses):
            raise
        except Exception as error:
            if may_refuse and not late.is_set() and self._is_refusal(error):
                raise ServiceRefuses(f"{self.service}: {what}: {_text(error)}") from error
            why = f"no end after {limit_s:g} s" if late.is_set() else _text(error)
            raise ServiceAway(f"{self.service}: {what}: {why}") from error
        finally:
            timer.cancel()
        if late.is_set():
            raise ServiceAway(f"{self.service}: {what}: no end after {limit_s:g} s")

    def session_directory(self, found: Path) -> Path:
        """A directory of the client, by the name that `directory` has: the client follows links."""
        return self.directory / os.path.relpath(os.path.realpath(found), os.path.realpath(self.directory))

    def kill_at_exit(self) -> None:
        """Have a process that ends in another way than by `end` not wait for uploads, as the library would have it.

        To be called once the library has registered what it does then: the last comes first.
        """
        atexit.register(self._kill)

    def remove_session_directories(self) -> None:
        """Remove what this session has left in `directory`: for one in which nothing was handed over."""
        for path in sorted(self._session_directories() - self._sessions_found):
            shutil.rmtree(path, ignore_errors=True)

    def end(self) -> None:
        """End the session, whatever state it is in; what is not uploaded by now is dropped."""
        if self._ended:
            return
        self._ended = True
        asyncer = self.wandb.sdk.wandb_setup.singleton().asyncer

        def take_down() -> None:
            # If wandb-core has been killed the library fails at this, or asks its process to exit. Its session is ended
            # all the same, but for its thread, its log, and the key, which it forgets when it is asked again.
            for end in (self.wandb.teardown, self.wandb.teardown, asyncer.join):
                with contextlib.suppress(Exception, SystemExit):
                    end()

        ending = threading.Thread(target=take_down, daemon=True)
        ending.start()
        ending.join(END_LIMIT_S)
        self._kill()
        ending.join(END_LIMIT_S)  # one that hangs all the same is left behind
        log = logging.getLogger("wandb")
        for handler in [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]:
            log.removeHandler(handler)
            handler.close()
        atexit.unregister(self._kill)
        self._put_back()

    def _put_back(self) -> None:
        sys.exit, sys.excepthook = self._sys  # the library wraps them once a session, and would until they overflow
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            del os.environ[name]
        os.environ.update(self._found)

    def _kill(self) -> None:
        kill_service_processes(self.directory)

    def _session_directories(self) -> set[Path]:
        return set((self.directory / "wandb").glob("run-*"))

    def _is_refusal(self, error: Exception) -> bool:
        """Whether the service, or the client itself, has said no: as opposed to not having been able to say anything.

        The client names no status where it opens a run. What it does not try again it hands on as a CommError with the
        service's own words; what it has tried again, or could not understand, it says with words of its own.
        """
        text, errors = str(error), self.wandb.errors
        if "previously created and deleted" in text:
            return True
        if (status := _status(error)) is not None:
            return status in (401, 403, 404)
        if isinstance(error, errors.AuthenticationError):
            return not text.startswith(("Failed to verify credentials", "An error occurred while verifying"))
        if isinstance(error, errors.UsageError | ImportError):
            return True
        own_words = ("Failed to get resume status", "while retrying", "giving up", "Timed out", 'Post "')
        return isinstance(error, errors.CommError) and bool(text) and not any(words in text for words in own_words)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error is about, if it says so."""
    if found := re.search(r"returned error (\d+)", str(error)):
        return int(found.group(1))
    for cause in (error, error.__cause__, getattr(error, "exc", None)):
        if status := getattr(getattr(cause, "response", None), "http_status", None):
            return int(status)
    return None


_print_exception_of_thread = threading.excepthook


def _without_library_threads(arguments: threading.ExceptHookArgs) -> None:
    """Keep quiet about the library's own threads, which fail one after the other once wandb-core has been killed."""
    trace = arguments.exc_traceback
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith("wandb."):
            return
        trace = trace.tb_next
    _print_exception_of_thread(arguments)


def kill_service_processes(directory: Path) -> None:
    """Kill each wandb-core that keeps its files below `directory`, and wait until it is gone; so for ours, if dead.

    A session that is begun while an earlier one still sends could be told of fewer rows than the service will have.
    """
    found = []
    for process in psutil.process_iter(["name", "ppid"]):
        if process.info["name"] != SERVICE_PROCESS:
            continue
        with contextlib.suppress(psutil.Error):
            if process.info["ppid"] == os.getpid() or process.environ().get("WANDB_DIR") == str(directory):
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=KILL_LIMIT_S)


def _set_environment(settings: TrackerSettings, directory: Path) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_") and name not in _KEPT and not name.startswith(_HIDDEN_SETTINGS):
            del os.environ[name]
    if settings.base_url is not None:
        os.environ["WANDB_BASE_URL"] = settings.base_url
        os.environ.pop("WANDB_APP_URL", None)
    os.environ.update({"WANDB_DIR": str(directory)})
    os.environ.update({"WANDB_CACHE_DIR": str(directory / "cache"), "WANDB_DATA_DIR": str(directory / "data")})
    os.environ.update(_NOT_OURS_TO_TELL)
    for name, value in _PACE.items():
        os.environ.setdefault(name, value)


def _text(error: Exception) -> str:
    """An error in one line, and not a long one: a service that fails may answer with a whole page."""
    return (" ".join(str(error).split()) or type(error).__name__)[:500]
