"""A worker of the opener pool: a process that opens the files it is told of, one task after another.

It is started with the number of a socket, and sends None to ask for the encoder. It gets the encoder, and sends the
hash of its canary, or the error. Then come tasks - lists of file requests - until the socket closes; for each it sends
numbers of tokens that it has encoded, and at last None or the error that ended it. A thread listens, so the worker is
gone the moment its parent is, whatever it does. It ignores the signals that a terminal or a service manager sends to a
whole group: its parent decides.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from nstrain.base.errors import NstrainError
from nstrain.data.encode import Encoder
from nstrain.data.entries import TICK_TOKENS, FileRequest, open_file
from nstrain.data.opener_pool import WorkerFailed


def main() -> None:
    """`python -m nstrain.data.opener_worker FD`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        connection.send(None)
        encoder: Encoder = connection.recv()
    except NstrainError as error:  # this process's canary
        connection.send(error)
        return
    except (EOFError, OSError):
        return
    tasks: queue.SimpleQueue[list[FileRequest]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    connection.send(encoder.canary_sha256)
    told = _Told(connection)
    while True:
        ended = _run(tasks.get(), encoder, told.encoded)
        told.tell()
        connection.send(ended)


class _Told:
    """Tells the parent how many tokens were encoded; of small files together."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._tokens = connection, 0

    def encoded(self, tokens: int) -> None:
        """So many more."""
        self._tokens += tokens
        if self._tokens > TICK_TOKENS:
            self.tell()

    def tell(self) -> None:
        """Say it now."""
        with contextlib.suppress(OSError):  # the parent is gone: the thread ends this process
            self._connection.send(self._tokens)
        self._tokens = 0


def _listen(connection: Connection, tasks: queue.SimpleQueue[list[FileRequest]]) -> None:
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _run(task: list[FileRequest], encoder: Encoder, tick: Callable[[int], None]) -> Exception | None:
    try:
        for request in task:
            open_file(request, encoder, tick)
    except MemoryError:
        os._exit(1)  # as good as killed for its memory: the parent tries each file alone
    except (NstrainError, OSError) as error:
        return error
    except Exception:
        return WorkerFailed(traceback.format_exc())
    return None


if __name__ == "__main__":
    main()
