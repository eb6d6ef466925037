"""`nstrain` and `python -m nstrain`: the commands, or which package of the extra `run` they lack."""

from __future__ import annotations

import sys

from nstrain.base.errors import ExitCode

RUN_PACKAGES = frozenset(
    {
        *("torch", "numpy", "safetensors", "tokenizers", "pyarrow", "huggingface_hub", "pydantic", "typer", "rich"),
        *("psutil", "pynvml", "matplotlib"),
    }
)
"""What the extra `run` installs, by the names that are imported. Nothing of it comes with a bare install."""


def main() -> None:
    """Run a command. One that lacks a package of RUN_PACKAGES is bad input, and says how it is installed."""
    try:
        from nstrain.cli.main import main as run_command

        run_command()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in RUN_PACKAGES:
            raise
        print(
            f"nstrain: the package {package} is not installed for {sys.executable}. In nstrain's clone, "
            "`pip install -e '.[run]'` installs what is missing; a torch of 2.9 or later stays as it is",
            file=sys.stderr,
        )
        sys.exit(int(ExitCode.BAD_CONFIGURATION))


if __name__ == "__main__":
    main()
