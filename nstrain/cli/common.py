"""What several commands share: names to paths, tables, progress."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nstrain.base.disk import resolved
from nstrain.base.errors import Refusal
from nstrain.base.units import parse_tokens
from nstrain.settings.host_file import host_is_set

if TYPE_CHECKING:
    from rich.console import Console

MADE_FILES = ("run.json", "line.json", "hashes.json")
"""One of them is in every training line, data line and checkpoint."""


def resolve(name: str) -> Path:
    """The place of a line, a checkpoint or a file of weights from what was typed; every command asks here.

    A bare name lies under host.json's work_root, unless it says a file (.safetensors) or names something here that was
    made: a file, or the directory of a line or a checkpoint. Everything else is a path.
    """
    place = resolved(name)
    here = Path(name).expanduser()
    bare = os.sep not in name and not here.is_absolute() and name not in ("", ".", "..")
    if not bare or not host_is_set():
        return place
    from nstrain.settings.host import load_host

    root = load_host().work_root
    is_here = here.suffix == ".safetensors" or here.is_file() or any((here / file).is_file() for file in MADE_FILES)
    return place if root is None or is_here else Path(root) / name


LEAST_COLUMNS = 60
"""What is drawn for people is as wide at least: cells of one letter help nobody, lines that the terminal breaks do."""


def console() -> Console:
    """Standard output for a page. Its reader may go (head, a pager): that is for the program's end to judge."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return _wide_enough(Output())


def _wide_enough(console: Console) -> Console:
    console.width = max(console.width, LEAST_COLUMNS)
    return console


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, drawn for the width of the terminal (110 columns elsewhere), plainly if it is not of UTF-8."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    drawn = Table(header_style="bold", box=box.HEAVY_HEAD if unicode else box.ASCII)
    for index, head in enumerate(heads):
        drawn.add_column(head, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    terminal = sys.stdout.isatty()
    out = io.StringIO()
    console = _wide_enough(Console(file=out, width=None if terminal else 110, force_terminal=terminal))
    if console.measure(drawn, options=console.options.update(max_width=1000)).maximum > console.width:
        drawn.padding = 0  # the room is for words: 80 columns hold `nstrain lines`
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)  # a path in it stays whole
    console.print(drawn)
    return out.getvalue().rstrip("\n")


def parse_recipe(shares: list[str] | None) -> dict[str, int] | None:
    """--share NAME=SHARE ... as a recipe; None if there is none."""
    recipe: dict[str, int] = {}
    for pair in shares or ():
        name, separator, number = pair.partition("=")
        if not name or not separator or not number.isdecimal() or int(number) < 1 or name in recipe:
            raise Refusal(f"--share: expected NAME=SHARE with a positive whole number, each name once, found {pair!r}")
        recipe[name] = int(number)
    return recipe or None


def parse_token_option(text: str | None, name: str, *, may_be_zero: bool = False) -> int | None:
    """An option's tokens; None if it was not given. Raises `Refusal` for what is no whole number greater than 0, or
    for one below 0 if it `may_be_zero`.
    """
    if text is None:
        return None
    return 0 if may_be_zero and text == "0" else int(parse_tokens(text, name))


class Bars:
    """Progress of named steps: live bars on a terminal, a line now and then elsewhere."""

    PLAIN_EVERY_S = 5.0

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        self._live = sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}
        self._amounts: dict[str, int] = {}
        self._said_at = time.monotonic()

    def set(self, step: str, share: float) -> None:
        """A step is done to a share of 0 ... 1."""
        self._update(step, share, f"{share:4.0%}")

    def show(self, step: str, share: float, amount: str) -> None:
        """A step is done to a share of 0 ... 1, with words of its own for how far it is."""
        self._update(step, share, amount)

    def add(self, step: str, size: int) -> None:
        """A step of unknown length has done another so many bytes."""
        from nstrain.base.units import human_bytes

        self._amounts[step] = self._amounts.get(step, 0) + size
        self._update(step, None, human_bytes(self._amounts[step]))

    def say(self, text: str) -> None:
        """A line of its own."""
        self._progress.console.print(text, highlight=False, markup=False)

    def _update(self, step: str, share: float | None, amount: str) -> None:
        if step not in self._tasks:
            self._tasks[step] = self._progress.add_task(step, total=None if share is None else 1.0, amount="")
        self._progress.update(self._tasks[step], completed=share, amount=amount)
        if not self._live and time.monotonic() - self._said_at > self.PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            self.say(f"{step}: {amount.strip()}")

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


@contextlib.contextmanager
def progress_bars() -> Iterator[Bars]:
    """Bars for the length of a block, on standard error."""
    with Bars() as bars:
        yield bars
