"""A hub on 127.0.0.1 that speaks the real one's HTTP API, and fails as it is told to.

Listings come in pages with a Link to the next, files through a redirect to another host name (localhost), with Range.
A fault is decided for each request by `FakeHub.fault`, a function of what is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

PAGE = b"<html>please log in</html>"

SMALL_BYTES = 64
"""Files below this are not in large-file storage: the listing has git's hash alone."""


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a repository; one that is only listed has no content."""

    size: int
    sha256: str
    blob_id: str
    content: bytes | None
    large: bool

    @classmethod
    def of(cls, content: bytes, large: bool | None = None) -> HubFile:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        in_storage = len(content) >= SMALL_BYTES if large is None else large
        return cls(len(content), hashlib.sha256(content).hexdigest(), blob, content, in_storage)

    def entry(self, path: str) -> dict[str, Any]:
        """Its entry in a listing."""
        entry: dict[str, Any] = {"type": "file", "oid": self.blob_id, "size": self.size, "path": path}
        if self.large:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return entry


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for."""

    what: str
    """info | tree | resolve | bytes"""
    path: str
    host: str
    range_start: int
    authorization: str | None


@dataclasses.dataclass(frozen=True)
class Fault:
    """How an answer fails: cut, flip, stall, 503, 500, 429, 404, gone, 403, reset, hang, ignore_range, longer, shorter,
    other_range, drip, gzip, page, endless page, no page, flood, bomb; a redirect also: refused, no address, loop."""

    kind: str
    amount: float = 0.5
    """Where in the body (share), or seconds."""


Faults = Callable[[Request], Fault | None]


class FakeHub:
    """Repositories, and the server in front of them. Use it as a context."""

    def __init__(self, page_entries: int = 1000, stall_s: float = 30.0) -> None:
        self.repos: dict[str, dict[str, dict[str, HubFile]]] = {}
        """repo -> commit -> path -> file"""
        self.refs: dict[str, dict[str, str]] = {}
        self.tokens: dict[str, str] = {}
        """Repositories that need a token, and which."""
        self.page_entries, self.stall_s = page_entries, stall_s
        self.fault: Faults = lambda request: None
        self.requests: list[Request] = []
        self.extra_entries: dict[str, list[dict[str, Any]]] = {}
        """Entries put into a repository's listing as they are."""
        self.speed_bytes_per_s: float | None = None
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._trees: dict[tuple[str, str, str, bool], list[dict[str, Any]]] = {}

    def empty(self) -> None:
        """Forget what it holds, who may read it, what was asked of it, and how it was to fail."""
        for container in (self.repos, self.refs, self.tokens, self.requests, self.extra_entries, self._trees):
            container.clear()
        self.fault, self.speed_bytes_per_s = lambda request: None, None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, files: Mapping[str, bytes | HubFile], commit: str | None = None) -> str:
        """Commit files to a repository's main branch; returns the commit."""
        made = {path: f if isinstance(f, HubFile) else HubFile.of(f) for path, f in files.items()}
        if commit is None:
            content = "".join(f"{path} {made[path].sha256}\n" for path in sorted(made))
            commit = hashlib.sha1((repo + content).encode()).hexdigest()
        self.repos.setdefault(repo, {})[commit] = made
        self.refs.setdefault(repo, {})["main"] = commit
        return commit

    def sleep(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def tree(self, repo: str, commit: str, start: str, recursive: bool) -> list[dict[str, Any]]:
        """The entries below a directory, in the order of their paths."""
        key = (repo, commit, start, recursive)
        if key not in self._trees:
            prefix = start + "/" if start else ""
            entries: dict[str, dict[str, Any]] = {}
            for path, file in self.repos[repo][commit].items():
                if not path.startswith(prefix):
                    continue
                parts = path[len(prefix) :].split("/")
                for depth in range(1, len(parts)):
                    folder = prefix + "/".join(parts[:depth])
                    entries[folder] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
                    if not recursive:
                        break
                if recursive or len(parts) == 1:
                    entries[path] = file.entry(path)
            self._trees[key] = [entries[path] for path in sorted(entries)]
        extra = self.extra_entries.get(repo, [])
        return self._trees[key] + (extra if recursive else [])

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    hub: FakeHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        parts = unquote(url.path).strip("/").split("/")
        query = parse_qs(url.query)
        start = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0]
        host, token = self.headers.get("Host") or "", self.headers.get("Authorization")
        if parts[:2] == ["api", "datasets"] and parts[4] in ("revision", "tree"):
            repo, revision, rest = "/".join(parts[2:4]), parts[5], "/".join(parts[6:])
            request = Request("info" if parts[4] == "revision" else "tree", rest, host, 0, token)
        elif parts[0] == "datasets" and parts[3] == "resolve":
            repo, revision, rest = "/".join(parts[1:3]), parts[4], "/".join(parts[5:])
            request = Request("resolve", rest, host, int(start), token)
        elif parts[0] == "cdn":
            repo, revision, rest = "/".join(parts[1:3]), parts[3], "/".join(parts[4:])
            request = Request("bytes", rest, host, int(start), token)
        else:
            return self.refuse(404, "")
        hub.requests.append(request)
        fault = hub.fault(request)
        if fault is not None and self.fails_at_once(fault):
            return None
        if request.what != "bytes" and repo in hub.tokens and token != f"Bearer {hub.tokens[repo]}":
            return self.refuse(401 if token is None else 403, "GatedRepo")
        commit = hub.refs.get(repo, {}).get(revision, revision)
        if repo not in hub.repos:
            return self.refuse(404, "RepoNotFound")
        if commit not in hub.repos[repo]:
            return self.refuse(404, "RevisionNotFound")
        if request.what == "info":
            return self.send_json({"_id": "1", "id": repo, "sha": commit}, {}, fault)
        if request.what == "tree":
            return self.send_tree(repo, commit, rest, query, fault)
        file = hub.repos[repo][commit].get(rest)
        if file is None or file.content is None:
            return self.refuse(404, "EntryNotFound")
        if request.what == "resolve":
            return self.send_redirect(repo, commit, rest, file, fault)
        return self.send_file(file, request, fault)

    def fails_at_once(self, fault: Fault) -> bool:
        """Faults that take the place of the answer."""
        hub = self.server.hub
        if fault.kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif fault.kind == "hang":
            hub.sleep(hub.stall_s)
            self.close_connection = True
        elif fault.kind == "429":
            self.refuse(429, "", {"RateLimit": f'"resolvers";r=0;t={int(fault.amount)}'})
        elif fault.kind == "503":
            self.refuse(503, "", {"Retry-After": "0"})
        elif fault.kind in ("500", "403", "416"):
            self.refuse(int(fault.kind), "")
        elif fault.kind in ("flood", "bomb"):
            self.flood(packed=fault.kind == "bomb")
        elif fault.kind == "404":
            self.refuse(404, "EntryNotFound")
        elif fault.kind == "gone":
            self.refuse(404, "RevisionNotFound")
        else:
            return False
        return True

    def flood(self, packed: bool) -> None:
        """Blanks without end, as a beginning of JSON; or a GiB of them, packed into one MiB."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.close_connection = True
        blanks, packer = b" " * (1 << 20), zlib.compressobj(9, zlib.DEFLATED, 31)
        begin, again = (packer.compress(blanks) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
        with contextlib.suppress(OSError):
            if packed:
                self.wfile.write(begin + again * 1023)
            while not packed and not self.server.hub._closing.is_set():
                self.wfile.write(blanks)

    def refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        body = b"" if self.command == "HEAD" else b'{"error": "no"}'
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, value: Any, headers: Mapping[str, str], fault: Fault | None) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, header in headers.items():
            self.send_header(name, header)
        self.end_headers()
        self.send_body(body, fault)

    def send_tree(
        self, repo: str, commit: str, start: str, query: Mapping[str, list[str]], fault: Fault | None
    ) -> None:
        hub = self.server.hub
        entries = hub.tree(repo, commit, start, query.get("recursive", ["False"])[0].lower() in ("true", "1"))
        if start and not entries:
            return self.refuse(404, "EntryNotFound")
        first = int(query.get("cursor", ["0"])[0])
        last = first + hub.page_entries
        headers = {}
        if last < len(entries):
            again = "&".join(f"{name}={quote(v[0])}" for name, v in query.items() if name != "cursor")
            path = quote(urlsplit(self.path).path, safe="/%")
            headers["Link"] = f'<{hub.endpoint}{path}?{again}&cursor={last}>; rel="next"'
        return self.send_json(entries[first:last], headers, fault)

    def send_redirect(self, repo: str, commit: str, path: str, file: HubFile, fault: Fault | None) -> None:
        self.send_response(302)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(file.size))
        self.send_header("X-Linked-ETag", f'"{file.sha256 if file.large else file.blob_id}"')
        place = f"http://localhost:{self.server.hub.port}/cdn/{repo}/{commit}/{quote(path)}?Signature=x"
        elsewhere = {"refused": "http://localhost:9/cdn", "no address": "file:///etc/passwd", "loop": self.path}
        place = elsewhere.get(fault.kind if fault else "", place)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, file: HubFile, request: Request, fault: Fault | None) -> None:
        assert file.content is not None
        kind = fault.kind if fault else ""
        body, total = file.content, file.size
        if kind in ("page", "endless page", "no page"):  # of a proxy between us, which answers in the place of the host
            self.send_response(200)
            self.close_connection = kind != "page"
            if kind == "page":
                self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(b"" if kind == "no page" else PAGE)
            return
        start = 0 if kind == "ignore_range" else request.range_start
        if start > 0:
            self.send_response(206)
            shown = start + 7 if kind == "other_range" else start
            self.send_header("Content-Range", f"bytes {shown}-{total - 1}/{total}")
        else:
            self.send_response(200)
        if kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        body = body[start:]
        length = len(body) + {"longer": 1000, "shorter": -min(len(body), 10)}.get(kind, 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.send_body(body, fault)

    def send_body(self, body: bytes, fault: Fault | None) -> None:
        if self.command == "HEAD":
            return
        hub, kind, at = self.server.hub, fault.kind if fault else "", int(len(body) * (fault.amount if fault else 1))
        if kind == "flip" and body:
            at = min(at, len(body) - 1)
            body = body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]
        if kind in ("cut", "longer"):
            self.wfile.write(body[: at if kind == "cut" else len(body)])
            self.close_connection = True
            return
        if kind == "shorter":
            self.wfile.write(body[:-10])
            self.close_connection = True
            return
        if kind == "stall":
            self.wfile.write(body[:at])
            self.wfile.flush()
            hub.sleep(hub.stall_s)
            self.close_connection = True
            return
        step = 4096 if kind == "drip" else 1 << 18
        for first in range(0, len(body), step):
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[first : first + step] if kind != "drip" else body[first : first + 1])
                self.wfile.flush()
            if kind == "drip":
                time.sleep(0.1)
                if hub._closing.is_set():
                    self.close_connection = True
                    return
            elif hub.speed_bytes_per_s:
                time.sleep(min(step, len(body)) / hub.speed_bytes_per_s)


class Crowd:
    """No fault: holds answers with bytes back for a moment, to see how many files are asked for at once."""

    def __init__(self, hold_s: float = 0.2) -> None:
        self._hold_s, self._lock = hold_s, threading.Lock()
        self._paths: list[str] = []
        self.most = 0

    def __call__(self, request: Request) -> None:
        if request.what == "bytes":
            with self._lock:
                self._paths.append(request.path)
                self.most = max(self.most, len(set(self._paths)))
            time.sleep(self._hold_s)
            with self._lock:
                self._paths.remove(request.path)


FILE_FAULTS = ("cut", "flip", "stall", "503", "500", "429", "reset", "ignore_range", "longer", "shorter", "other_range",
               "403", "gzip", "hang")  # fmt: skip
RESOLVE_FAULTS = ("503", "500", "429", "reset", "hang", "refused", "404", "gone")


class SeededFaults:
    """So many faults of all kinds, spread over the requests for files by a seed; of a file no more of those that are
    given up on than it takes."""

    def __init__(self, seed: int, count: int, rate: float = 0.4) -> None:
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self.left, self._rate = count, rate
        self._suspects: dict[str, int] = {}
        self._missed: set[str] = set()
        self.made: dict[str, int] = {}

    def renew(self) -> None:
        """What was given up on so far is behind: files may be again as at the start."""
        with self._lock:
            self._suspects.clear()
            self._missed.clear()

    def __call__(self, request: Request) -> Fault | None:
        if request.what not in ("resolve", "bytes"):
            return None
        with self._lock:
            if self.left <= 0 or self._draw.random() > self._rate:
                return None
            kind = self._draw.choice(RESOLVE_FAULTS if request.what == "resolve" else FILE_FAULTS)
            if kind in ("404", "gone"):  # then it is fetched from the repository's main branch
                if request.path in self._missed:
                    return None
                self._missed.add(request.path)
            if kind in ("flip", "longer", "shorter", "other_range", "403", "gzip"):  # given up on after some in a row
                if self._suspects.get(request.path, 0) >= 2:
                    return None
                self._suspects[request.path] = self._suspects.get(request.path, 0) + 1
            self.left -= 1
            self.made[kind] = self.made.get(kind, 0) + 1
            return Fault(kind, 0 if kind == "429" else self._draw.random())
