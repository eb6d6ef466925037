"""Files opened by worker processes: any number of them gives the same entries, and a file that kills one is named.

A worker is a fresh Python (never a fork: the threads of the tokenizer and of pyarrow do not survive one) on one thread,
since processes use the cores better than the library's threads. It is replaced after RECYCLE_TASKS tasks, or when it
has grown beyond RECYCLE_BYTES, because the tokenizer's cache and the allocators give memory back late.

Native code may die on a malformed file, and the kernel may kill a worker for its memory. The files of the task it died
on are opened once more at the end, each in a fresh worker with no other running; a file that kills this one too is a
bad upload. Of several errors the one of the first task in their order is raised, whichever came first in time.

Files need not all be there when the work begins: those that are fetched are opened as they come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

import nstrain
from nstrain.base.errors import NstrainError, Refusal
from nstrain.data.encode import Encoder
from nstrain.data.entries import FileRequest, open_file
from nstrain.data.readers.errors import bad_upload, reader_died

TASK_BYTES = 1 << 20
"""Small files are handed out together, as many as come to no more than this."""
RECYCLE_TASKS = 512
RECYCLE_BYTES = 1 << 30
FAILED_STARTS = 3
"""As many workers that end before they are ready, one after another, and the pool gives up."""
TICK_S = 0.2
"""Progress is told at least so often."""
MOST_WORKERS = 8
"""One core encodes far faster than a GPU trains; more workers only help a line to its first cycle."""

OnBytes = Callable[[int, int], None]
"""Told (bytes done, bytes of all files known so far); may raise to stop the work."""
OnOpened = Callable[[Sequence[FileRequest]], None]


def default_workers() -> int:
    """Worker processes that open files, unless a number is asked for."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


class WorkerFailed(Exception):
    """An error of the program itself in a worker, with its traceback."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """Files that a worker opens at one go."""

    requests: list[FileRequest]

    @property
    def bytes(self) -> int:
        return sum(request.file.size for request in self.requests)


class _Worker:
    """A worker process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(nstrain.__file__).parents[1])  # it must be the same nstrain
        paths = os.pathsep.join(path for path in (package, os.environ.get("PYTHONPATH")) if path)
        # On a thread of its own, which shares no memory pool with Python's, the library is a tenth faster.
        threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nstrain.data.opener_worker", str(theirs.fileno())],
                env={**os.environ, **threads, "PYTHONPATH": paths},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.task: _Task | None = None
        self.place = -1
        """Of the task in the order of the tasks."""
        self.tasks_done = 0

    def used_up(self) -> bool:
        """Whether it should be replaced."""
        try:
            grown = psutil.Process(self.process.pid).memory_info().rss > RECYCLE_BYTES
        except psutil.Error:
            return True
        return grown or self.tasks_done >= RECYCLE_TASKS

    def end(self) -> int:
        """End it at once, whatever it does; its exit status, that of its own end if it was dead already."""
        self.process.kill()
        self.connection.close()
        return self.process.wait()


class OpenerPool:
    """Worker processes that open files. Use it as a context, or `close` it."""

    def __init__(self, encoder: Encoder, workers: int) -> None:
        """Workers start when they are needed. With 0 of them files are opened in this process."""
        if workers < 0:
            raise Refusal(f"{workers} worker processes: expected 0 (work in this process) or more")
        self.workers = workers
        self._encoder = encoder
        self._running: list[_Worker] = []
        self._waiting: deque[tuple[int, _Task]] = deque()
        """Tasks that no worker has yet, with their places."""
        self._failed_starts = 0
        self.encoded_tokens = 0
        """Tokens of the files that were opened or are being opened, since it was last set to 0: a sign of life."""

    @property
    def busy(self) -> bool:
        """Whether there is work for a worker."""
        return bool(self._waiting) or any(worker.task is not None or not worker.ready for worker in self._running)

    def open(self, requests: Sequence[FileRequest], progress: OnBytes = lambda done, total: None) -> None:
        """Make the entries of the requested files, anew where they exist.

        `progress(bytes done, bytes of all)` is called several times a second; it may raise, which ends the workers.
        Raises what `open_file` does, and `BadUpload` for a file that kills its worker.
        """
        self.open_as_they_come([requests], progress)

    def open_as_they_come(
        self,
        arrivals: Iterable[Sequence[FileRequest]],
        progress: OnBytes = lambda done, total: None,
        opened: OnOpened = lambda requests: None,
    ) -> None:
        """`open`, of files of which `arrivals` gives those that can be read by now: none, where it is worth asking
        again. While the pool is `busy` it should not keep its caller waiting. `opened(files)` is called for each once.
        """
        if self.workers == 0:
            self._open_here(arrivals, progress, opened)
            return
        try:
            died = self._work_off(iter(arrivals), self.workers, progress, opened)
            for request in (request for task, _ in died for request in task.requests):
                self.close()
                for _, status in self._work_off(iter([[request]]), 1, progress, opened):
                    may_pass = status > 0 or status == -signal.SIGKILL  # as if for its memory
                    deadly = (reader_died if may_pass else bad_upload)(
                        f"source {request.source.name}: {request.source.root / request.file.path}",
                        "opening it",
                        f"two worker processes died of it, the second with no other running: {_how(status)}",
                    )
                    deadly.found_in(request.source.name, request.file.path)
                    raise deadly
        except BaseException:
            self.close()
            raise

    def _open_here(self, arrivals: Iterable[Sequence[FileRequest]], progress: OnBytes, opened: OnOpened) -> None:
        """Without a worker: one file after another, in the order in which tasks of them would be handed out."""
        done = total = 0

        def tick(tokens: int) -> None:
            self.encoded_tokens += tokens
            progress(done, total)

        for requests in arrivals:
            tasks = _grouped(requests)
            total += sum(task.bytes for task in tasks)
            for request in (request for task in tasks for request in task.requests):
                progress(done, total)
                open_file(request, self._encoder, tick)
                done += request.file.size
                opened([request])

    def close(self) -> None:
        """End the workers at once."""
        self._waiting.clear()
        while self._running:
            self._running.pop().end()

    def __enter__(self) -> OpenerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work_off(
        self, arrivals: Iterator[Sequence[FileRequest]], workers: int, progress: OnBytes, opened: OnOpened
    ) -> list[tuple[_Task, int]]:
        """Have tasks done by so many workers; returns those whose worker died, with its exit status."""
        errors: dict[int, Exception] = {}
        died: dict[int, tuple[_Task, int]] = {}
        done = total = places = 0
        more = True
        while more or self._waiting or any(worker.task for worker in self._running):
            if more:
                came = next(arrivals, None)
                more = came is not None
                for task in _grouped(came or ()):
                    self._waiting.append((places, task))
                    places, total = places + 1, total + task.bytes
            self._hand_out(workers)
            listening = {w.connection: w for w in self._running if w.task is not None or not w.ready}
            for connection in wait(list(listening), TICK_S) if listening else ():
                worker = listening[connection]  # type: ignore[index]
                task_of, place = worker.task, worker.place
                alive, reply = self._hear(worker)
                if task_of is None:
                    continue
                if not alive:
                    died[place] = task_of, worker.process.wait()
                    continue
                if worker.task is not None:  # it only says how far it is
                    continue
                done += task_of.bytes
                if reply is None:
                    opened(task_of.requests)
                else:
                    errors[place] = reply
                    self._waiting.clear()  # those before it have been handed out; of their errors the first is raised
                    more = False
            progress(done, total)
        if errors:
            raise errors[min(errors)]
        return [died[place] for place in sorted(died)]

    def _hand_out(self, workers: int) -> None:
        """Give waiting tasks to idle workers, and start more workers up to a number while there are tasks for them."""
        for worker in [worker for worker in self._running if worker.ready and worker.task is None]:
            if self._waiting:
                place, task = self._waiting[0]
                try:
                    worker.connection.send(task.requests)
                except OSError:  # it died while it had nothing to do
                    self._drop(worker)
                    continue
                worker.task, worker.place = task, place
                self._waiting.popleft()
        starting = sum(not worker.ready for worker in self._running)
        while len(self._running) < workers and starting < len(self._waiting):
            self._running.append(_Worker())
            starting += 1

    def _hear(self, worker: _Worker) -> tuple[bool, Exception | None]:
        """Take what a worker says: whether it still lives, and the error that its task ended with."""
        try:
            reply = worker.connection.recv()
        except (EOFError, OSError):
            status = self._drop(worker)
            if not worker.ready:
                self._failed_starts += 1
                if self._failed_starts == FAILED_STARTS:
                    raise NstrainError(f"worker processes end as they start: {_how(status)}") from None
            return False, None
        if not worker.ready:
            self._greet(worker, reply)
            return True, None
        if isinstance(reply, int):
            self.encoded_tokens += reply
            return True, None
        worker.task, worker.tasks_done = None, worker.tasks_done + 1
        if worker.used_up():
            self._drop(worker)
        return True, reply

    def _greet(self, worker: _Worker, reply: Any) -> None:
        """Answer a worker that starts: it asks for the encoder, then says which ids its own gives."""
        if reply is None:
            with contextlib.suppress(OSError):  # it died: noticed when it is listened to again
                worker.connection.send(self._encoder)
        elif isinstance(reply, Exception):
            raise reply
        elif reply != self._encoder.canary_sha256:
            raise NstrainError("a worker process encodes otherwise than this one; install one version of tokenizers")
        else:
            worker.ready, self._failed_starts = True, 0

    def _drop(self, worker: _Worker) -> int:
        self._running.remove(worker)
        return worker.end()


def _grouped(requests: Sequence[FileRequest]) -> list[_Task]:
    """Requests as tasks, small files together; the largest first, so that no worker is left with one at the end."""
    tasks: list[_Task] = []
    small: list[FileRequest] = []
    for request in requests:
        if request.file.size >= TASK_BYTES:
            tasks.append(_Task([request]))
            continue
        if sum(r.file.size for r in small) + request.file.size > TASK_BYTES:
            tasks.append(_Task(small))
            small = []
        small.append(request)
    if small:
        tasks.append(_Task(small))
    return sorted(tasks, key=lambda task: -task.bytes)


def _how(status: int) -> str:
    """How a process ended, from its exit status."""
    if status == -signal.SIGKILL:
        return "SIGKILL, as the kernel sends it when memory runs out"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
