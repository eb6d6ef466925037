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
from nstrain.line.paths import LinePaths

KERNELS_FORMAT = 1


def kernels_file(paths: LinePaths) -> Path:
    """{"format": 1, "basis", "kernels"}: launch configurations by kernel and card, and what they were measured on."""
    return paths.tune / "kernels.json"


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
