"""GET with redirects, where no step may take for ever: not the look-up of a name, not the first line of an answer.

The standard library's client: what huggingface_hub brings has changed three times. Proxies and certificates are those
of the environment (HTTPS_PROXY, ALL_PROXY, NO_PROXY; SSL_CERT_FILE, REQUESTS_CA_BUNDLE). A token goes to the hub's host
alone.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import os
import queue
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from nstrain.data.hub.errors import HubRefusal, Suspect, Transient
from nstrain.data.hub.patience import Patience

MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
T = TypeVar("T")


class Cancelled(Exception):
    """The download was called off."""


class Cancel:
    """Calls off whatever waits or reads under it, from another thread and at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def cancel(self) -> None:
        """Call off: sleepers wake, readers are cut."""
        with self._lock:
            self._event.set()
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_set(self) -> bool:
        """Whether it was called off."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise `Cancelled` if it was called off."""
        if self._event.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """Sleep; raises `Cancelled` as soon as it is called off."""
        if self._event.wait(seconds):
            raise Cancelled

    def _watch(self, connection: http.client.HTTPConnection, on: bool) -> None:
        with self._lock:
            (self._open.add if on else self._open.discard)(connection)


@dataclasses.dataclass
class Answer:
    """An answer whose body has yet to be read."""

    url: str
    """The address that gave it, after redirects."""
    status: int
    headers: Mapping[str, str]
    first_headers: Mapping[str, str]
    """Of the hub's own answer, before the redirect to where the file is stored; the same without one."""
    _response: http.client.HTTPResponse
    _connection: http.client.HTTPConnection
    _cancel: Cancel

    @property
    def host(self) -> str:
        """Host and port that gave the answer."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def read_some(self, most: int) -> bytes:
        """The next bytes as they arrive, nothing at the end. Raises `Transient` for a broken or silent connection."""
        try:
            data = self._response.read1(most)
        except TimeoutError:
            raise Transient(f"{self.host}: no byte within the read timeout") from None
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:  # also: cut by `Cancel`
            self._cancel.check()
            raise Transient(f"{self.host}: {_words(error)}") from None
        self._cancel.check()
        return data

    def close(self) -> None:
        """End the connection."""
        self._cancel._watch(self._connection, False)
        with contextlib.suppress(OSError):
            self._response.close()
            self._connection.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def get(url: str, headers: Mapping[str, str], patience: Patience, cancel: Cancel) -> Answer:
    """GET, following redirects; `Authorization` stays with the first host.

    Raises `Transient`, `Suspect` for redirects that lead nowhere, `HubRefusal` for a proxy that is none of http, or
    `Cancelled`.

    Whatever the status, the answer is the caller's to judge (and to close).
    """
    sent = dict(headers)
    first: Mapping[str, str] | None = None
    for _ in range(MOST_REDIRECTS + 1):
        cancel.check()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Suspect(f"redirected to {_shown(url)}, which is no web address")
        response, connection = _within(
            patience.connect_s,
            f"{parts.netloc}: no answer within {patience.connect_s:.0f} s",
            lambda parts=parts, sent=dict(sent): _ask(parts, sent, patience, cancel),  # type: ignore[misc]
            lambda late: late[1].close(),
            cancel,
        )
        answer_headers = {name.lower(): value for name, value in response.headers.items()}
        lookup = _CaseFree(answer_headers)
        if first is None or lookup.get("X-Linked-ETag") is not None:  # a renamed repository is redirected first
            first = lookup
        location = lookup.get("Location")
        if response.status not in REDIRECTS or location is None:
            return Answer(url, response.status, lookup, first, response, connection, cancel)
        cancel._watch(connection, False)
        connection.close()
        following = urljoin(url, location)
        if urlsplit(following).scheme == "http" and parts.scheme == "https":
            raise Suspect(f"{parts.netloc}: redirected from https to {_shown(following)}")
        if urlsplit(following).netloc != parts.netloc:
            sent = {name: value for name, value in sent.items() if name.lower() not in ("authorization", "cookie")}
        url = following
    raise Suspect(f"{urlsplit(url).netloc}: more than {MOST_REDIRECTS} redirects")


class _CaseFree(dict[str, str]):
    """Headers, whatever the case of their names."""

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        return super().get(name.lower(), default)


def _ask(
    parts: SplitResult, headers: Mapping[str, str], patience: Patience, cancel: Cancel
) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    """Connect, send a request, and read the answer's head."""
    connection, target, more = _connection(parts, patience)
    try:
        connection.connect()
        cancel._watch(connection, True)
        connection.request("GET", target, headers={**headers, **more, "Accept-Encoding": "identity"})
        response = connection.getresponse()
        if connection.sock is not None:
            connection.sock.settimeout(patience.read_s)
        return response, connection
    except (OSError, http.client.HTTPException, ValueError) as error:
        cancel._watch(connection, False)
        connection.close()
        cancel.check()
        raise Transient(f"{parts.netloc.rpartition('@')[2]}: {_words(error)}") from None


def _connection(parts: SplitResult, patience: Patience) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """A connection not yet open, what to ask it for, and headers that a proxy wants."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host, more = str(parts.hostname), {}
    port = parts.port or (443 if parts.scheme == "https" else 80)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    via = urlsplit(proxy if "//" in proxy else f"http://{proxy}") if proxy else None
    if via is not None and via.hostname and not urllib.request.proxy_bypass(f"{host}:{port}"):
        if via.scheme != "http":
            raise HubRefusal(
                f"the proxy for {parts.scheme} is of kind {via.scheme}, expected http://HOST:PORT; set "
                f"{parts.scheme.upper()}_PROXY to one, or NO_PROXY to {host}"
            )
        if via.username is not None:
            login = f"{unquote(via.username)}:{unquote(via.password or '')}".encode()
            more = {"Proxy-Authorization": "Basic " + base64.b64encode(login).decode()}
        if parts.scheme == "http":
            through = http.client.HTTPConnection(via.hostname, via.port or 80, timeout=patience.connect_s)
            return through, f"http://{parts.netloc}{target}", more
        tunnel = http.client.HTTPSConnection(
            via.hostname, via.port or 80, timeout=patience.connect_s, context=_certificates()
        )
        tunnel.set_tunnel(host, port, more)
        return tunnel, target, {}
    if parts.scheme == "https":
        return (
            http.client.HTTPSConnection(host, port, timeout=patience.connect_s, context=_certificates()),
            target,
            more,
        )
    return http.client.HTTPConnection(host, port, timeout=patience.connect_s), target, more


def _certificates() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if os.environ.get(name):
            context.load_verify_locations(os.environ[name])
            break
    return context


def _within(seconds: float, late: str, call: Callable[[], T], discard: Callable[[T], None], cancel: Cancel) -> T:
    """What a call returns, unless it takes longer or is called off: its result is then discarded when it comes."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    lock, abandoned = threading.Lock(), [False]

    def run() -> None:
        try:
            result: tuple[T | None, BaseException | None] = (call(), None)
        except BaseException as error:
            result = (None, error)
        with lock:
            if abandoned[0] and result[0] is not None:
                discard(result[0])
            else:
                done.put(result)

    threading.Thread(target=run, daemon=True).start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not cancel.is_set:
        with contextlib.suppress(queue.Empty):
            value, error = done.get(timeout=0.1)
            if error is not None:
                raise error
            assert value is not None
            return value
    with lock:
        abandoned[0] = True
        if not done.empty():
            value, _ = done.get()
            if value is not None:
                discard(value)
    cancel.check()
    raise Transient(late)


def _shown(url: str) -> str:
    """An address for messages: without what may be a signature in its query."""
    return repr(url.partition("?")[0][:200])


def _words(error: BaseException) -> str:
    """An error in words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was closed in the middle of the file"
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return f"{type(error).__name__}: {error}"
