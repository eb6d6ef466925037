"""A W&B server for tests: as much of the service's protocol as its real client speaks, on 127.0.0.1, with faults.

It runs in threads of the test's process; the client under test is the real one, in whatever process. It keeps a
run's history by the offset that the client gives its lines, answers as the real service was seen to, and fails as it
is told: once, n times or for ever, at any GraphQL operation (by its name) or at `file_stream`, where rows arrive.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

API_KEY = "k" * 40
ENTITY = "somebody"
"""The account's own entity, which runs go to if none is named."""

FILE_STREAM = "file_stream"
HISTORY = "wandb-history.jsonl"
_FILE_STREAM_PATH = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream")


class Line(NamedTuple):
    """A row as it came."""

    step: int
    text: str


@dataclasses.dataclass
class StoredRun:
    """What the service has of a run."""

    entity: str
    project: str
    name: str
    """Its id, as the client calls it."""
    display_name: str = ""
    group: str = ""
    config: str = "{}"
    tags: list[str] = dataclasses.field(default_factory=list)
    notes: str = ""
    state: str = "running"
    history: dict[int, Line] = dataclasses.field(default_factory=dict)
    """By offset."""
    sessions: int = 0
    """How often the client has opened it."""

    @property
    def line_count(self) -> int:
        return max(self.history, default=-1) + 1

    def lines(self) -> list[Line]:
        """What it has, in the order of the steps."""
        return sorted(self.history.values(), key=lambda line: line.step)

    def rows(self) -> list[dict[str, Any]]:
        """The same, read."""
        return [json.loads(line.text) for line in self.lines()]

    def steps(self) -> list[int]:
        """The steps that it has."""
        return [line.step for line in self.lines()]

    def settings(self) -> dict[str, Any]:
        """The config without the client's wrapping."""
        return {key: item["value"] for key, item in json.loads(self.config).items() if key != "_wandb"}

    def x_axes(self) -> dict[str, str]:
        """By name of a metric (or the client's pattern of names) the metric that is its x axis."""
        metrics = json.loads(self.config)["_wandb"]["value"].get("m", [])
        axes = {}
        for metric in metrics:  # protobuf fields by number: 1 name, 2 pattern, 4 x axis, 5 index of the x axis
            name = metric.get("1") or metric.get("2")
            axis = metric.get("4") or (metrics[metric["5"] - 1].get("1") if "5" in metric else None)
            if axis is not None:
                axes[name] = axis
        return axes


@dataclasses.dataclass
class _Fault:
    endpoint: str
    status: int | None
    """None: the connection is dropped."""
    times: int
    delay_s: float = 0.0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: str = '{"errors": [{"message": "as the test asked"}]}'


class WandbStub:
    """The server; a context manager."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        """By id."""
        self.deleted: set[str] = set()
        """Ids of runs that a person has deleted: they cannot be made again."""
        self.requests: Counter[str] = Counter()
        """How often each endpoint was asked, failures included."""
        self.last_step_lag = 0
        """By how many rows the last step, as the service tells it, stands behind."""
        self.stop_asked = False
        """Whether somebody has pressed Stop on the run's page."""
        self.key: str | None = API_KEY
        self._faults: list[_Fault] = []
        self._lock = threading.RLock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    def __enter__(self) -> WandbStub:
        self.up()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.down()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def listening(self) -> bool:
        """Whether it can be reached."""
        return self._server is not None

    def environment(self, home: Path) -> dict[str, str]:
        """What a client's process needs in its environment to come here, and to find no other account."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": API_KEY,
            "HOME": str(home),
            "NETRC": str(home / "netrc"),
            "NO_PROXY": "127.0.0.1",
            "WANDB_ERROR_REPORTING": "false",
            # The client's own pace is 15 s between two requests, and up to a minute between two tries; it takes whole
            # seconds only.
            "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1",
            "WANDB__FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
            "WANDB__FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "1",
            "WANDB__GRAPHQL_RETRY_MAX": "1",
            "WANDB__GRAPHQL_RETRY_WAIT_MIN_SECONDS": "1",
            "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "1",
        }

    # ---- faults ------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Listen, at the same port as before if there was one."""
        stub = self

        class Handler(_Handler):
            server_stub = stub

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Stop listening and answering: connections are refused, those that are open are dropped."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()

    def fail(
        self, endpoint: str, status: int, times: int | None = None, body: str | None = None, **headers: str
    ) -> None:
        """Answer an endpoint with a status, `times` times or for ever."""
        fault = _Fault(endpoint, status, times or 1 << 60, headers={k.replace("_", "-"): v for k, v in headers.items()})
        if body is not None:
            fault.body = body
        with self._lock:
            self._faults.append(fault)

    def drop(self, endpoint: str, times: int | None = None) -> None:
        """Close the connection without an answer."""
        with self._lock:
            self._faults.append(_Fault(endpoint, None, times or 1 << 60))

    def hang(self, endpoint: str, seconds: float, times: int | None = None) -> None:
        """Close the connection without an answer, after so long."""
        with self._lock:
            self._faults.append(_Fault(endpoint, None, times or 1 << 60, seconds))

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()
            self.last_step_lag, self.stop_asked = 0, False

    def lose_newest(self, run_id: str, count: int) -> None:
        """Forget the newest lines of a run, which were accepted."""
        with self._lock:
            history = self.runs[run_id].history
            for offset in sorted(history)[-count:]:
                del history[offset]

    def lose_step(self, run_id: str, step: int) -> None:
        """Forget one line, wherever it stands."""
        with self._lock:
            history = self.runs[run_id].history
            for offset in [offset for offset, line in history.items() if line.step == step]:
                del history[offset]

    def alter(self, run_id: str, step: int, name: str, value: float) -> None:
        """Change one value of a stored row."""
        with self._lock:
            history = self.runs[run_id].history
            for offset, line in history.items():
                if line.step == step:
                    history[offset] = Line(step, json.dumps({**json.loads(line.text), name: value}))

    def delete(self, run_id: str) -> None:
        """Delete a run, as a person can."""
        with self._lock:
            del self.runs[run_id]
            self.deleted.add(run_id)

    def wait_for(self, run_id: str, rows: int, limit_s: float = 20.0) -> None:
        """Wait until the run has so many rows."""
        end = time.monotonic() + limit_s
        while run_id not in self.runs or len(self.runs[run_id].history) < rows:
            assert time.monotonic() < end, f"{len(self.runs[run_id].history) if run_id in self.runs else 'no'} rows"
            time.sleep(0.02)

    def _fault_at(self, endpoint: str) -> _Fault | None:
        with self._lock:
            self.requests[endpoint] += 1
            for fault in self._faults:
                if fault.endpoint == endpoint and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    # ---- what the service does ---------------------------------------------------------------------------------------

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        answer = getattr(self, f"_on_{operation}", None)
        with self._lock:
            return answer(variables) if answer is not None else {}

    def _on_Viewer(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        user = {"id": "u1", "entity": ENTITY, "username": ENTITY, "email": "a@b.c", "flags": "{}", "teams": teams}
        return {"viewer": {**user, "name": ENTITY, "admin": False}}

    _on_GetDefaultEntity = _on_Viewer  # noqa: N815

    def _on_RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        entity, project = variables.get("entity") or ENTITY, variables["project"]
        run = self.runs.get(variables["name"])
        bucket = None
        if run is not None:
            tail = [run.history[max(run.history)].text] if run.history else []
            bucket = {
                **_bucket(run),
                "summaryMetrics": tail[0] if tail else "{}",
                "eventsLineCount": 0,
                "logLineCount": 0,
                "historyTail": json.dumps(tail),
                "eventsTail": "[]",
                "tags": run.tags,
                "notes": run.notes,
                "wandbConfig": '{"t": 1}',
            }
        return {"model": {"id": project, "name": project, "entity": {"id": entity, "name": entity}, "bucket": bucket}}

    def _on_UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = variables.get("name") or variables["id"].removeprefix("stored-")
        inserted = name not in self.runs
        if inserted:
            project = variables.get("project") or variables.get("modelName")
            self.runs[name] = StoredRun(variables.get("entity") or ENTITY, project, name)
        run = self.runs[name]
        run.sessions += variables.get("name") is not None
        run.config = variables.get("config") or run.config
        run.tags = variables.get("tags") if variables.get("tags") is not None else run.tags
        run.display_name = variables.get("displayName") or variables.get("display_name") or run.display_name
        run.group = variables.get("groupName") or run.group
        return {"upsertBucket": {"bucket": _bucket(run), "inserted": inserted}}

    def _on_Run(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        run = self.runs.get(variables["name"])
        if run is None:
            return {"project": {"run": None}}
        more = {
            "projectId": "1",
            "internalId": "1",
            "tags": run.tags,
            "state": run.state,
            "group": run.group,
            "jobType": None,
            "commit": None,
            "readOnly": False,
            "createdAt": "2026-01-01T00:00:00Z",
            "heartbeatAt": "2026-01-01T00:00:00Z",
            "notes": run.notes,
            "systemMetrics": "{}",
            "summaryMetrics": "{}",
            "user": {"name": ENTITY, "username": ENTITY},
            "historyKeys": None,
        }
        return {"project": {"internalId": "1", "run": {**_bucket(run), **more}}}

    def _on_RunHistoryKeys(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        steps = self.runs[variables["name"]].steps()
        last = steps[-1] - self.last_step_lag if steps else -1
        return {"project": {"run": {"historyKeys": {"lastStep": last, "keys": {}}}}}

    def _on_RunParquetHistory(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": [{"_step": 0}]}}}}

    def _on_HistoryPage(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        first, end = variables["minStep"], variables["maxStep"]
        found = [line.text for line in self.runs[variables["run"]].lines() if first <= line.step < end]
        return {"project": {"run": {"history": found[: variables["pageSize"]]}}}

    def _on_CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}

    def _on_ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"serverInfo": {"features": []}}

    def _take(self, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            run = self.runs[run_id]
            part = body.get("files", {}).get(HISTORY)
            if part is not None:
                for offset, line in enumerate(part["content"], start=part["offset"]):
                    run.history[offset] = Line(json.loads(line)["_step"], line)
            if body.get("complete"):
                run.state = "finished" if body.get("exitcode") == 0 else "failed"
            elif part is not None:
                run.state = "running"
            return {"exitcode": None, "limits": {}, **({"stopped": True} if self.stop_asked else {})}


def _bucket(run: StoredRun) -> dict[str, Any]:
    entity = {"id": run.entity, "name": run.entity}
    return {
        "id": f"stored-{run.name}",
        "name": run.name,
        "displayName": run.display_name or run.name,
        "description": None,
        "config": run.config,
        "sweepName": None,
        "historyLineCount": run.line_count,
        "project": {"id": run.project, "name": run.project, "entity": entity},
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing of clients that were killed."""


class _Handler(BaseHTTPRequestHandler):
    server_stub: WandbStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """GraphQL operations and rows."""
        stub = self.server_stub
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        stream = _FILE_STREAM_PATH.fullmatch(self.path)
        endpoint = FILE_STREAM if stream else _operation(body)
        fault = stub._fault_at(endpoint)
        if stub._server is None:
            self._dropped()
        elif fault is not None:
            time.sleep(fault.delay_s)
            if fault.status is None:
                self._dropped()
            else:
                self._answer(fault.body, fault.status, fault.headers)
        elif not self._authorized():
            self._answer('{"errors": [{"message": "invalid API key"}]}', 401)
        elif stream is not None:
            if stream.group(3) in stub.runs:
                self._answer(json.dumps(stub._take(stream.group(3), body)))
            else:
                self._answer('{"error": "run not found"}', 404)
        elif endpoint == "UpsertBucket" and body.get("variables", {}).get("name") in stub.deleted:
            self._answer('{"errors": [{"message": "run was previously created and deleted"}]}', 409)
        else:
            # The service writes NaN and the infinities as bare tokens only within a row's text, never in an answer.
            self._answer(json.dumps({"data": stub._graphql(endpoint, body.get("variables") or {})}, allow_nan=False))

    def do_PUT(self) -> None:
        """A file of the run: taken and forgotten."""
        self.server_stub._fault_at("put")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer("")

    def _authorized(self) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Basic ")
        key = self.server_stub.key
        return key is None or base64.b64decode(token).decode() == f"api:{key}"

    def _dropped(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _answer(self, text: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _operation(body: dict[str, Any]) -> str:
    if body.get("operationName"):
        return str(body["operationName"])
    found = re.search(r"\b(?:query|mutation)\s+(\w+)", body.get("query", ""))
    return found.group(1) if found else "Viewer"  # which wandb 0.28 asks without a name
