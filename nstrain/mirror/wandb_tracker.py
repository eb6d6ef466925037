"""W&B as a tracking service (contract.py): a row of update u stands at step u of a run.

What the client does with a run, as measured with wandb 0.28.1 to 0.31.0, and what is made of it here:

- A run takes steps in growing order only, for ever: a session begins where the service says that the run stands
  (`starting_step`), which is a run's floor.
- A row without `commit` stays in the client until the next one comes. A row's `_timestamp` may be given: it is the time
  of the journal's row, so a run that is filled from the journal years later tells the same time.
- A fatal answer (401, 404, 413, ...) ends uploading for the rest of the session, and nothing says so; so does a person
  who presses Stop on the run's page. Both are told to a callback, 15 s later, and the next `send` fails.
- `finish()` may return without an error when nothing was uploaded. Whoever closes a run must read it back.
- What x axis the charts have is forgotten when a run is resumed, and is told again.
- A scan of all rows may take them from the client's cache, where an earlier state of the run may lie: never used.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nstrain.mirror.contract import RunIdentity, ServiceAway
from nstrain.mirror.wandb_client import INIT_LIMIT_S, WandbClient
from nstrain.record.journal_reader import Row
from nstrain.settings.run import TrackerSettings

X_AXIS = "tokens"
WALL_TIME = "time/wall"
"""The reading that is the time of its row, unix seconds."""

SUPERSEDED_TAG = "superseded"

SEND_LIMIT_S = 120.0
"""The client takes a row within milliseconds; when it cannot store it, it waits for ever."""
PAGE_LIMIT_S = 120.0
EDIT_LIMIT_S = 120.0
PAGE_ROWS = 200
"""Rows that are read at a time: those of updates that validated have thousands of readings."""

_INFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class WandbTracker:
    """W&B, or a server that speaks its protocol, for one line."""

    def __init__(self, settings: TrackerSettings) -> None:
        self._settings = settings
        self._run: WandbRun | None = None

    def open(self, identity: RunIdentity, known: bool) -> WandbRun:
        """Open a run (`Tracker.open`). One that is open already is dropped."""
        if self._run is not None:
            self._run.drop()
        client = WandbClient(self._settings, identity.directory)
        stopped = threading.Event()
        try:
            with client.calling("opening the run", INIT_LIMIT_S + 15.0, may_refuse=True):
                found = client.wandb.init(
                    project=self._settings.project,
                    entity=self._settings.entity,
                    id=identity.run_id,
                    resume="must" if known else "allow",
                    name=identity.name,
                    group=identity.group,
                    config=dict(identity.config),
                    settings=_session_settings(client, stopped),
                )
                found.define_metric(X_AXIS)
                found.define_metric("*", step_metric=X_AXIS)
                client.kill_at_exit()
                self._run = WandbRun(client, found, stopped)
        except BaseException:
            client.end()
            client.remove_session_directories()
            raise
        return self._run

    def supersede(self, run_id: str, by: str, why: str) -> None:
        """Mark a run as replaced (`Tracker.supersede`)."""
        if self._run is not None and not self._run.closed:
            self._mark(self._run.client, run_id, by, why)
            return
        with tempfile.TemporaryDirectory(prefix="nstrain-wandb-") as directory:
            client = WandbClient(self._settings, Path(directory))
            try:
                self._mark(client, run_id, by, why)
            finally:
                client.end()

    def _mark(self, client: WandbClient, run_id: str, by: str, why: str) -> None:
        with client.calling(f"marking run {run_id} as superseded", EDIT_LIMIT_S, may_refuse=True):
            client.wandb.setup(_session_settings(client, threading.Event()))
            api = client.wandb.Api()
            path = f"{self._settings.entity or api.default_entity}/{self._settings.project}/{run_id}"
            try:
                run = api.run(path)
            except (ValueError, client.wandb.errors.CommError) as error:
                if "Could not find run" not in str(error):
                    raise
                return
            run.tags = sorted({*run.tags, SUPERSEDED_TAG})
            run.config["nstrain"] = {**run.config.get("nstrain", {}), "superseded_by": by, "why": why}
            run.update()


class WandbRun:
    """An open run (`RemoteRun`)."""

    def __init__(self, client: WandbClient, run: Any, stopped: threading.Event) -> None:
        self.client = client
        self.url: str | None = run.url
        self.entity = str(run.entity)
        """Whose project the run is in, as the service says."""
        self.floor = int(run.starting_step)
        self.client_directory: Path | None = client.session_directory(Path(run.dir).parent)
        self.closed = False
        self._run, self._stopped = run, stopped
        self._path = f"{run.entity}/{run.project}/{run.id}"
        self._next = self.floor
        self._api: Any = None

    def send(self, row: Row) -> None:
        """Hand over a row (`RemoteRun.send`)."""
        update = int(row["update"])
        if update < self._next:
            raise ValueError(f"update {update} after {self._next - 1}: the service would drop it")
        readings: dict[str, float] = {name: value for name, value in row.items() if name != "update"}
        if WALL_TIME in row:
            readings["_timestamp"] = row[WALL_TIME]
        with self._calling(f"sending update {update}", SEND_LIMIT_S):
            self._run.log(readings, step=update, commit=True)
        self._next = update + 1

    def read(self, first: int, last: int) -> Iterator[Row]:
        """What the service has (`RemoteRun.read`)."""
        with self._calling("reading back", PAGE_LIMIT_S):
            if self._api is None:
                self._api = self.client.wandb.Api()
            scan = self._api.run(self._path).scan_history(
                page_size=PAGE_ROWS, min_step=first, max_step=last + 1, use_cache=False
            )
            rows = (row for row in scan)  # a scan begins anew whenever an iterator is made of it
        while True:
            with self._calling("reading back", PAGE_LIMIT_S):
                page = list(itertools.islice(rows, PAGE_ROWS))
            if not page:
                return
            yield from map(_as_row, page)

    def close(self, limit_s: float) -> None:
        """Have everything taken and end the session (`RemoteRun.close`)."""
        if self.closed:
            return
        try:
            with self.client.calling("closing the run", limit_s):
                self._run.finish(exit_code=0)
            self._refuse_stopped("closing the run")
        finally:
            self.drop()

    def drop(self) -> None:
        """End the session as it is."""
        self.closed = True
        self.client.end()

    def _calling(self, what: str, limit_s: float) -> contextlib.AbstractContextManager[None]:
        if self.closed:
            raise ServiceAway(f"{self.client.service}: {what}: the session is over")
        self._refuse_stopped(what)
        return self.client.calling(what, limit_s)

    def _refuse_stopped(self, what: str) -> None:
        if self._stopped.is_set():
            raise ServiceAway(
                f"{self.client.service}: {what}: the service has ended the session: somebody pressed Stop on the run's "
                "page, or an upload was refused"
            )


def _session_settings(client: WandbClient, stopped: threading.Event) -> Any:
    return client.wandb.Settings(
        mode="online",
        console="off",
        silent=True,
        symlink=False,
        sagemaker_disable=True,
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
        save_code=False,
        init_timeout=INIT_LIMIT_S,
        stop_fn=stopped.set,
        stop_on_fatal_error=True,
    )


def _as_row(found: dict[str, Any]) -> Row:
    """A row of the service as one of the journal: without what the client added, or the service does not have."""
    readings = {name: value for name, value in found.items() if not name.startswith("_") and value is not None}
    for name, value in readings.items():
        if isinstance(value, str):  # what some servers make of what JSON has no number for
            readings[name] = _INFINITE.get(value, value)
    return {"update": int(found["_step"]), **readings}
