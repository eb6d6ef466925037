"""Files that survive `kill -9` and a power cut.

A file that another process or a later launch reads is written whole or not at all: write to a temporary name beside
it, fsync, rename, fsync the directory. Ownership is a `flock`, which the kernel drops when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.errors import DiskFull, NstrainError, Refusal

PARTIAL_SUFFIX = ".partial"
"""Ends the name of whatever is being written; anything that carries it is garbage once its writer is gone."""


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
"""Made once: `json.dumps` would make one for each of a list's 64,000 files."""


def canonical_json(value: Any) -> bytes:
    """One byte string for one value: sorted keys, no spaces, UTF-8. What is hashed is written in this form."""
    return _CANONICAL.encode(value).encode()


def pretty_json(value: Any) -> bytes:
    """JSON for files that people read: two spaces, in the order of the fields."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def sha256_bytes(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal, with bounded memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync_dir(path: Path) -> None:
    """Make renames and creations inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_OTHER_KIND = (errno.EISDIR, errno.ENOTDIR)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def disk_full_is_named(path: Path) -> Iterator[None]:
    """Turn the operating system's no-space errors into a `DiskFull` that says where, and what is free there."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise _disk_full(path, error.errno) from error


def _disk_full(path: Path, code: int) -> DiskFull:
    parent = next(p for p in (path, *path.parents) if p.exists())
    return DiskFull(
        f"{path}: cannot be written ({os.strerror(code)}); {shutil.disk_usage(parent).free:,} bytes are free there. "
        "Free space on that file system (or raise the file size limit) and run the same command again."
    )


def refused_file(error: OSError) -> NstrainError | None:
    """What a person is told of a file that the operating system does not let us have; None for any other error.

    Of what is not allowed only errors that name a file are meant: the others are of no file (a signal to another user's
    process), or tell a person nothing.
    """
    if error.errno in _NO_DESCRIPTOR:
        return NstrainError(
            f"{error.strerror}: no further one can be opened (by this process, or on this machine); raise the limit "
            "(`ulimit -n`, LimitNOFILE of a service) or find who holds so many, and run the same command again"
        )
    if not isinstance(error.filename, str | bytes) or error.errno is None:
        if error.errno not in _NO_SPACE:
            return None
        return DiskFull(
            f"what was to be written found no room ({error.strerror}); free space where the output goes, and run the "
            "same command again"
        )
    named = error.filename2 if isinstance(error.filename2, str | bytes) else error.filename  # where a rename leads
    path = Path(os.fsdecode(named)).absolute()
    if error.errno in _OTHER_KIND:
        return Refusal(
            f"{path}: {error.strerror}, where nstrain has the other of file and directory; move it elsewhere and run "
            "the same command again"
        )
    if error.errno in _NO_SPACE:
        return _disk_full(path, error.errno)
    return Refusal(not_allowed(path, error.errno)) if error.errno in _NOT_ALLOWED else None


def not_allowed(path: Path, code: int) -> str:
    """The message about a file or directory that this user may not write (or read), by the error's number."""
    directory = path if path.is_dir() else path.parent
    if code == errno.EROFS:
        remedy = "mount it writable"
    else:
        remedy = f"give this user (`id -un`) the right to read and write {directory} and what is in it"
    return f"{path}: may not be written ({os.strerror(code)}); {remedy}, or work on a copy in a place that may"


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file and fsync it (not its directory). Raises `DiskFull`."""
    with disk_full_is_named(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def atomic_write(path: Path, data: bytes | str, durable: bool = True) -> None:
    """Replace a file as a whole: after a crash at any instant it holds the old bytes or the new ones.

    One writer a file is assumed (the rule of this project), so the temporary name is fixed and a leftover of a killed
    writer is simply overwritten. Without `durable` it outlives `kill -9` but not a power cut: for what only tells how
    things stand, many times a second. Raises `DiskFull`.
    """
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    content = data.encode() if isinstance(data, str) else data
    try:
        if durable:
            write_durable(temporary, content)
        else:
            with disk_full_is_named(path):
                temporary.write_bytes(content)
    except BaseException:
        with contextlib.suppress(OSError):  # where nothing may be written nothing may be removed; what failed is told
            temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    if durable:
        fsync_dir(path.parent)


def atomic_write_json(path: Path, value: Any, durable: bool = True) -> None:
    """`atomic_write` of a value as JSON for people."""
    atomic_write(path, pretty_json(value), durable)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def read_json(path: Path) -> Any:
    """A JSON file's value. Raises `Refusal` naming the file if it is missing, unreadable or not JSON."""
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise Refusal(f"{path}: no such file") from None
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Refusal(f"{path}: expected JSON, found something else ({error})") from None


def resolved(name: str) -> Path:
    """The place that a typed path stands for. Raises `Refusal` for a loop of symbolic links, and for ~ of nobody."""
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise Refusal(f"{name}: expected a path, found {error}") from None


def refuse_existing(directory: Path) -> None:
    """Raise `Refusal` if a directory that is to be made exists and is not an empty one.

    One whose path is not UTF-8 is refused too: the files that name it could not hold that.
    """
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise Refusal(
            f"{os.fsencode(directory)!r}: the path is not UTF-8 text in this locale; name a directory whose path is"
        ) from None
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        remove = typed("rm", "-r", directory)
        raise Refusal(f"{directory}: exists already; name a new directory, or remove this one first (`{remove}`)")


def refuse_unmakeable(directory: Path) -> None:
    """Raise `Refusal` if a directory cannot be made at its place, as far as permissions tell: before long work."""
    place = next(parent for parent in directory.absolute().parents if parent.exists())
    if not place.is_dir():
        raise _unmakeable(directory, f"{place} is no directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unmakeable(directory, f"{place} may not be written")


def _unmakeable(directory: Path, why: object) -> Refusal:
    return Refusal(f"{directory} cannot be made ({why}); name a directory in a place that you may write to")


def bytes_below(directory: Path) -> int:
    """Bytes of all files below a directory, 0 if there is none; what vanishes meanwhile does not count."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def remove_entry(path: Path) -> None:
    """Remove a file or a directory with all that is in it; of a link only the link, never what it names."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def directory_by_rename(final: Path) -> Iterator[Path]:
    """Build a directory under a temporary name; it appears under its own name whole, or not at all.

    Yields the temporary directory. Raises `Refusal` if `final` exists and is not an empty directory, or if the place
    has no directories (/proc).
    """
    refuse_existing(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, NotADirectoryError, FileExistsError) as error:
        raise _unmakeable(final, error) from None
    temporary = final.with_name(f".{final.name}{PARTIAL_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_full_is_named(final):
            temporary.mkdir()
            yield temporary
            for directory, _, files in os.walk(temporary):
                for name in files:
                    with open(os.path.join(directory, name), "rb") as file:
                        os.fsync(file.fileno())
                fsync_dir(Path(directory))
            os.rename(temporary, final)
            fsync_dir(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


GLANCE_S = 0.2
"""How long a lock is tried at least: `held_elsewhere` of another process holds it for an instant."""


class FileLock:
    """An exclusive `flock` on a file, held until released or until this process is gone.

    The holder's pid is written into the file so that whoever meets the lock can say who holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free; says whether it is now ours."""
        assert self._fd is None, f"{self.path} is locked by this object already"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        with contextlib.suppress(OSError):  # a full disk must not keep anyone from a lock; the pid is for people
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd
        return True

    def holder(self) -> int | None:
        """The pid that the last holder wrote, if any."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def held_elsewhere(self) -> bool:
        """Whether another open file holds the lock now."""
        if self._fd is not None or not self.path.exists():
            return False
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Shared, so that two who look at once don't take each other for a holder.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def acquire(self, what: str, wait_s: float = 0.0, on_wait: Callable[[int | None], None] | None = None) -> FileLock:
        """Take the lock, waiting at most `wait_s` for a holder that is about to go (an orphan, say).

        `on_wait(pid)` is called once when the wait begins, so that it can be shown. Raises `NstrainError`
        naming the holder if the lock is not free in time.
        """
        deadline = time.monotonic() + max(wait_s, GLANCE_S)
        told = False
        while not self.try_acquire():
            if not told and on_wait is not None and wait_s > 0:
                on_wait(self.holder())
                told = True
            if time.monotonic() >= deadline:
                raise NstrainError(
                    f"{what} is held by process {self.holder()} ({self.path}); "
                    "wait until it ends, or stop it, then run the same command again"
                )
            time.sleep(0.05)
        return self

    def release(self) -> None:
        """Give the lock back (the file stays: removing it would let two holders lock two files)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FileLock:
        assert self._fd is not None, "acquire the lock before entering it"
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
