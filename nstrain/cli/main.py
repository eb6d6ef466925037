"""`nstrain`: the commands, and what is common to them - host.json first, errors as one message, exit codes.

Nothing heavy is imported until a command needs it: `--help` and `status` answer at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, TextIO

import typer

from nstrain import __version__
from nstrain.base.disk import refused_file
from nstrain.base.errors import ExitCode, Interrupted, NstrainError
from nstrain.cli import bench, branches, checkpoints, data, lines, mirror, model, schema, tune

app = typer.Typer(
    help="Pre-train NeuronSpark language models on streamed text: exactly resumable, unattended.",
    epilog=(
        "Exit codes: 0 done, 1 failed, 2 bad configuration or input, 3 stopped on request, 4 needs a person, "
        "5 the GPU is taken, 6 a trainer that cannot be killed."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data.app, name="data")
lines.register(app)
branches.register(app)
checkpoints.register(app)
schema.register(app)
model.register(app)
bench.register(app)
tune.register(app)
mirror.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nstrain {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Put host.json into force before any command runs."""
    from nstrain.settings.host_file import host_is_set

    if host_is_set():
        from nstrain.settings.host import enter_host

        enter_host()


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted("interrupted; what was finished is kept, and the same command goes on from there")


def main() -> None:
    """Entry point: runs a command; an error that a person can act on is one message and an exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored (nohup, a shell's &) stays ignored
        signal.signal(signal.SIGINT, _interrupt)
    output: TextIO | None = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output.errors == "strict":
        output.reconfigure(errors="replace")  # what the locale cannot show must not end a command
    code = _exit_code(_run)
    if output is not None and code:
        with contextlib.suppress(OSError):
            _flush(output)
    elif output is not None:
        code = _exit_code(lambda: _flush(output))
    sys.exit(code)


def _exit_code(act: Callable[[], None]) -> int:
    """Do something; says why it failed, if it did."""
    told: NstrainError | None
    try:
        act()
    except SystemExit as left:
        return int(left.code or ExitCode.DONE)
    except BrokenPipeError:
        # Whoever read our output has closed it (head, a pager): not an error of ours.
        return int(ExitCode.DONE)
    except NstrainError as error:
        told = error
    except OSError as error:
        told = refused_file(error)
        if told is None:
            raise
    else:
        return int(ExitCode.DONE)
    print(f"nstrain: {told}", file=sys.stderr)
    return int(told.exit_code)


def _run() -> None:
    output = sys.stdout
    try:
        app(standalone_mode=True)
    except SystemExit:
        if sys.stdout is output:
            raise
        raise BrokenPipeError from None  # which typer has caught, to wrap the streams and to exit with 1


def _flush(output: TextIO) -> None:
    try:
        output.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # or Python tries again as it ends, and says 120
        raise


if __name__ == "__main__":
    main()
