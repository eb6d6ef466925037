"""The recipes that come with nstrain, by name."""

from __future__ import annotations

from pathlib import Path

DEFAULT = "minicpm"
"""The recipe of `nstrain data init` without --recipe."""


def packaged_recipes() -> dict[str, Path]:
    """Name and file of each."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.json"))}
