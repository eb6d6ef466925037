"""What a person sees while a line runs in the foreground.

On a terminal: the status page, kept up to date, with what happens above it. Elsewhere (a pipe, a file): the lines that
run.log gets, as they come. Both are drawn by a thread of their own that only reads files, so that a terminal that is
stopped, slow or gone can hold up nothing: what goes wrong in drawing is noted once and passed over.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live

from nstrain.base.logs import old_log
from nstrain.line.paths import LinePaths
from nstrain.ops.status import status
from nstrain.ops.status_page import render
from nstrain.supervise.children import SUPERVISOR_PREFIX

REFRESH_S = 1.0
LAST_REFRESH_S = 5.0
"""How long the end waits for the last page to be drawn."""

BLOCK_BYTES = 1 << 20


class Display:
    """Shows one line from `with` to its end; `event` may be called from any thread and never blocks or raises."""

    def __init__(self, run: Path, console: Console) -> None:
        self.paths = LinePaths(run.resolve())
        self.console = console
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._begun, self._ending = threading.Event(), threading.Event()
        self._notes: set[str] = set()
        self._log = LogFollower(self.paths.run_log)
        self._thread = threading.Thread(target=self._draw_until_the_end, name="display", daemon=True)

    def event(self, text: str) -> None:
        """Show a line of text above the page. Before the first one nothing is shown: the line may yet be refused."""
        self._events.put(text)
        self._begun.set()

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._ending.set()
        self._begun.set()
        self._thread.join(LAST_REFRESH_S)

    def _draw_until_the_end(self) -> None:
        self._begun.wait()
        if self._events.empty():
            return
        try:
            if self.console.is_terminal:
                self._draw_pages()
            else:
                self._print_lines()
        except Exception as error:
            self._note(error)

    def _draw_pages(self) -> None:
        with Live(
            console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=False
        ) as live:
            while True:
                last = self._ending.wait(REFRESH_S)
                try:
                    self._print_events()
                    live.update(render(status(self.paths.root)), refresh=True)
                except Exception as error:
                    self._note(error)
                if last:
                    return

    def _print_lines(self) -> None:
        while True:
            last = self._ending.wait(REFRESH_S)
            try:
                for line in self._log.new_lines():
                    if not line.startswith(SUPERVISOR_PREFIX):  # those come as events, also when the log is full
                        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
                self._print_events()
            except Exception as error:
                self._note(error)
            if last:
                return

    def _print_events(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                text = self._events.get_nowait()
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _note(self, error: Exception) -> None:
        """Say once that something cannot be shown."""
        text = f"display: {type(error).__name__}: {error} (the line is not affected)"
        if text not in self._notes:
            self._notes.add(text)
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)


class LogFollower:
    """The whole lines that a log gains from now on, also over a rotation (nstrain/base/logs.py).

    For some seconds after one the children still write to the old file's end, so both files are followed, each by its
    inode: the log of today is the old one of tomorrow.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._followed: dict[int, _Followed] = {}
        for _, inode, size in self._found():
            self._followed[inode] = _Followed(size)

    def new_lines(self) -> list[str]:
        """The lines that were completed since the last call, the old log's first."""
        found = self._found()
        self._followed = {inode: self._followed.get(inode, _Followed(0)) for _, inode, _ in found}
        return [line for place, inode, _ in found for line in self._followed[inode].new_lines(place, inode)]

    def _found(self) -> list[tuple[Path, int, int]]:
        """The files that are there, with their inodes and sizes, the old log first."""
        found = []
        for place in (self._path, old_log(self._path)):  # rotated meanwhile, it is seen twice rather than not at all
            with contextlib.suppress(FileNotFoundError):
                status = place.stat()
                found.append((place, status.st_ino, status.st_size))
        return found[::-1]


class _Followed:
    """How far a file has been read."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._rest = b""

    def new_lines(self, place: Path, inode: int) -> list[str]:
        """The lines that a file has gained, if it still lies there."""
        with contextlib.suppress(FileNotFoundError), place.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode:
                return []
            if status.st_size < self._position:  # another file, which was given the inode of one that was removed
                self._position, self._rest = 0, b""
            file.seek(self._position)
            block = file.read(BLOCK_BYTES)
            self._position += len(block)
            *lines, self._rest = (self._rest + block).split(b"\n")
            return [line.decode(errors="replace") for line in lines]
        return []
