"""Checkpoints written while a line trains on: one at a time, in a thread, from tensors in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nstrain.line.checkpoint import Checkpoint, write_checkpoint
from nstrain.line.paths import LinePaths


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time.

    The arrays of a submitted checkpoint belong to the writer until it is idle again: `wait` before changing them. An
    error of the writer is raised as it is, once, by the next `poll`, `wait` or `submit`. The thread is not a daemon:
    a program that ends in the ordinary way finishes the write.
    """

    def __init__(self, paths: LinePaths, on_committed: Callable[[Path, dict[str, Any]], None]) -> None:
        """`on_committed(path, state)` runs in the thread after each write and before it counts as done."""
        self._paths = paths
        self._on_committed = on_committed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, checkpoint: Checkpoint, ready: Callable[[], None] = lambda: None) -> None:
        """Begin to write a checkpoint, after waiting for the one before. Raises that one's error.

        `ready()` is called in the thread, and returns once the tensors are in host memory.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(checkpoint, ready), name="checkpoint writer")
        self._thread.start()

    def poll(self) -> None:
        """Raise the error of a write that failed, if there is one; never waits."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the writer's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, checkpoint: Checkpoint, ready: Callable[[], None]) -> None:
        try:
            ready()
            path = write_checkpoint(self._paths, checkpoint)
            self._on_committed(path, checkpoint.state)
        except BaseException as error:
            self._error = error
