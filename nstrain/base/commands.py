"""Commands as they are printed: what a person is told to type works as it stands, whatever a path holds."""

from __future__ import annotations

import shlex


def typed(*words: object) -> str:
    """A command's words as a POSIX shell takes them: a path with a space or a quote is one word still."""
    return shlex.join(str(word) for word in words)
