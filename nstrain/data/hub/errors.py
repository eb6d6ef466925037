"""What can go wrong with a hub, told apart: what a person must settle, and what waiting settles."""

from __future__ import annotations

from nstrain.base.errors import Refusal
from nstrain.data.readers.errors import FileRefusal


class HubRefusal(Refusal):
    """The hub says no, and would say it again: a person has to do something."""


class Offline(HubRefusal):
    """HF_HUB_OFFLINE is set and something has to be fetched."""


class AccessDenied(HubRefusal):
    """A repository that needs a token, or another one, or the acceptance of its terms."""


class NotOnHub(HubRefusal):
    """A repository or a revision that does not exist (or is hidden from this token)."""


class FileVanished(HubRefusal, FileRefusal):
    """A pinned file that is at its pinned revision no more, nor with the same bytes anywhere else."""


class WrongBytes(HubRefusal, FileRefusal):
    """A pinned file of which every place gives other bytes than the pinned ones, however often it is fetched."""


class UntrustedListing(HubRefusal):
    """A listing with something in it that no repository has: it is not worked with."""


class Suspect(Exception):
    """An answer that cannot be right: it may be right the next time, and is given up on after a few."""

    def __init__(self, cause: str, spoils: bool = False) -> None:
        """With `spoils`, what has come of the file so far is not to be built upon."""
        super().__init__(cause)
        self.cause, self.spoils = cause, spoils


class Transient(Exception):
    """A failure that may be gone at the next try: its cause in words, and how long the server asks to wait."""

    def __init__(self, cause: str, wait_s: float | None = None) -> None:
        super().__init__(cause)
        self.cause, self.wait_s = cause, wait_s
