"""The launch configurations that `nstrain tune` measured with, for a line that begins.

A line runs with one table for life: from its first checkpoint on with that of its newest, before with the one in
RUN/tune/kernels.json, and without either with what the model package pins. So a line trains with what it was tuned
with, also where the package has changed its choice in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nstrain.base.disk import read_json
from nstrain.base.errors import Refusal
from nstrain.line.checkpoint import read_state
from nstrain.line.paths import LinePaths

KERNELS_FORMAT = 1


def kernels_file(paths: LinePaths) -> Path:
    """{"format": 1, "basis", "kernels"}: launch configurations by kernel and card, and what they were measured on."""
    return paths.tune / "kernels.json"


def use_line_kernels(paths: LinePaths, newest: Path | None) -> str:
    """Have the kernels run with a line's table, that of its newest checkpoint or, without one, the tuned; says which.

    Raises `Refusal` for a table that is none, or not of the model package's kernels.
    """
    from nstrain.train.model import use_kernels  # torch stands behind it

    if newest is None:
        table, where = tuned_kernels(paths), kernels_file(paths)
        use_kernels(table, str(where), "remove it: the line then begins with what the package pins")
    else:
        table, where = read_state(newest).get("kernels", {}), newest
        use_kernels(table, str(where))
    return f"{len(table)} launch configurations, as in {where.name}" if table else "as the model package pins them"


def tuned_kernels(paths: LinePaths) -> dict[str, Any]:
    """The table of a line that was tuned, empty for one that was not. Raises `Refusal` for a file that is not one."""
    file = kernels_file(paths)
    if not file.exists():
        return {}
    stored = read_json(file)
    try:
        if stored["format"] != KERNELS_FORMAT:
            raise ValueError(f"format {stored['format']}, expected {KERNELS_FORMAT}")
        return {str(name): dict(launches) for name, launches in stored["kernels"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(f"{file}: is not what `nstrain tune` writes ({error!r}); remove it") from None
