"""What the supervisor's parts have it say."""

from __future__ import annotations

from typing import Protocol

from nstrain.line.notices import Event


class Report(Protocol):
    """Where the news of a keeper goes."""

    def tell(self, text: str) -> None:
        """Write a line of what happened."""

    def update(self, **fields: object) -> None:
        """Change supervisor.json."""

    def notify(self, event: Event, text: str) -> None:
        """Give a notice."""
