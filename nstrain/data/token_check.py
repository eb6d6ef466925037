"""Whether an opened cycle's token files are those that its manifest pins: hashed in a thread, from start to end.

What is hashed are the open files that the rows are mapped from, so it is the tokens that are trained, even if the
directory is deleted or made again meanwhile. The thread leaves the interpreter to others: reading and hashing a block
take no part of it.
"""

from __future__ import annotations

import hashlib
import threading
from io import FileIO
from pathlib import Path

from nstrain.base.commands import typed
from nstrain.base.errors import NeedsOperator
from nstrain.data.rows import CycleRows

BLOCK_BYTES = 4 << 20


class TokenCheck:
    """The hashing of one cycle's token files. Begins when it is made."""

    def __init__(self, rows: CycleRows) -> None:
        self.bytes_read = 0
        """How far it is; a check that does not get on has a disk that hangs."""
        self._rows = rows
        self._problem: Exception | None = None
        self._closing, self._ended = threading.Event(), threading.Event()
        name = f"hashes of cycle {rows.cycle}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it is known what the files are."""
        return self._ended.is_set()

    @property
    def problem(self) -> Exception | None:
        """What is wrong with the files, and the remedy (`NeedsOperator`); None while nothing is known to be.

        Anything else that kept them from being hashed is here as well.
        """
        return self._problem

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, or does so within so many seconds."""
        return self._ended.wait(seconds)

    def close(self) -> None:
        """End the thread, soon; what it has not read stays unknown."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        problem: Exception | None
        try:
            problem = self._look()
        except Exception as error:
            problem = error
        if not self._closing.is_set():  # else it has not seen all
            self._problem = problem
            self._ended.set()

    def _look(self) -> NeedsOperator | None:
        manifest = self._rows.manifest
        for name, file in zip(manifest["order"], self._rows.files, strict=True):
            expected = manifest["sources"][name]["files"]["bin"]["sha256"]
            try:
                found = self._sha256(file)
            except OSError as error:
                found = f"that it cannot be read ({error.strerror})"
            if found != expected:
                path = Path(str(file.name))
                return NeedsOperator(
                    f"{path}: expected sha256 {expected}, by the manifest of cycle {self._rows.cycle}, found {found}. "
                    f"Remove the cycle with `{typed('rm', '-r', path.parent)}`: the preparer makes it again, to "
                    "the bytes of the manifest"
                )
        return None

    def _sha256(self, file: FileIO) -> str:
        digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
        file.seek(0)
        while (size := file.readinto(block)) and not self._closing.is_set():
            digest.update(memoryview(block)[:size])
            self.bytes_read += size
        return digest.hexdigest()
