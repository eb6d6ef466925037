"""Globs over paths with forward slashes, with the same meaning for a local directory and a hub's listing.

`*` and `?` stay inside one path component, `[...]` is a set of characters, `**/` is any number of directories
(also none), and a pattern that ends in `**` takes everything below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from nstrain.base.errors import Refusal


def translate(pattern: str) -> str:
    """The regular expression of one glob, to be matched against a whole path. Raises `Refusal` if it is malformed."""
    if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
        raise Refusal(f"glob {pattern!r}: expected a pattern relative to the source's root, without '..'")
    out, i = [], 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out.append("(?:[^/]+/)*")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        elif pattern[i] == "*":
            out.append("[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append("[^/]")
            i += 1
        elif pattern[i] == "[":
            end = pattern.find("]", i + 2)
            if end < 0:
                raise Refusal(f"glob {pattern!r}: '[' without a closing ']'")
            body = re.sub(r"([\\\[&|~])", r"\\\1", pattern[i + 1 : end])
            body = "^" + body[1:] if body[0] == "!" else body.replace("^", "\\^")
            out.append(f"(?!/)[{body}]")
            i = end + 1
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    return "".join(out)


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path matches any of the globs. Raises `Refusal` for a malformed one."""
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(translate(pattern), re.DOTALL))
        except re.error as error:
            raise Refusal(f"glob {pattern!r}: its [...] is not a set of characters ({error})") from None
    return lambda path: any(expression.fullmatch(path) for expression in compiled)
