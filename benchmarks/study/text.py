"""From a file's bytes to a document's text, and which texts are documents at all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser

from benchmarks.study.packages import Form

SHORTEST_CHARACTERS = 600
LONGEST_CHARACTERS = 1_000_000
LONGEST_MEAN_LINE = 300
"""Generated and packed files have longer lines on average."""
MOST_DIGITS = 0.2
"""Of a text's characters: tables of numbers have more."""

_UNREAD = {"script", "style", "nav", "head", "header", "footer", "svg", "form", "button", "select"}
_VOID = {"br", "hr", "img", "input", "link", "meta", "col", "area", "base", "source", "wbr"}
_BLOCKS = {
    "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "br", "hr", "h1", "h2", "h3", "h4", "h5",
    "h6", "section", "article", "blockquote", "title", "item", "note", "steps", "screen", "code", "td", "th",
}  # fmt: skip


class _Reader(HTMLParser):
    """Collects what a reader of a page sees; works for HTML and for XML manuals."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._unread: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _UNREAD:
            self._unread.append(tag)
        self._pre += tag == "pre"
        if tag in _BLOCKS and tag not in {"code", "td", "th"}:
            self.pieces.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._unread and tag == self._unread[-1]:
            self._unread.pop()
        self._pre = max(0, self._pre - (tag == "pre"))
        if tag in _BLOCKS:
            self.pieces.append(" " if tag in {"code", "td", "th"} else "\n")

    def handle_data(self, data: str) -> None:
        if not self._unread:
            self.pieces.append(data if self._pre else re.sub(r"\s+", " ", data))


def _of_html(text: str) -> str:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    lines = [line.rstrip() for line in "".join(reader.pieces).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _of_roff(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(('.\\"', "'\\\"", '\\"')))


def to_text(data: bytes, form: Form) -> str | None:
    """The text of a file, or None if it is not UTF-8, too short, too long, packed, or mostly numbers."""
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\x00", "")
    except UnicodeDecodeError:
        return None
    if form == "html":
        text = _of_html(text)
    elif form == "roff":
        text = _of_roff(text)
    text = text.strip("\n") + "\n"
    if not SHORTEST_CHARACTERS <= len(text) <= LONGEST_CHARACTERS:
        return None
    if len(text) / text.count("\n") > LONGEST_MEAN_LINE and form != "html":
        return None
    if sum(character.isdigit() for character in text) > MOST_DIGITS * len(text):
        return None
    return text


def without_furniture(texts: Sequence[str]) -> list[str]:
    """A package's pages without the lines that a tenth of them (and at least ten) share: menus, licences, footers."""
    shared = Counter(line for text in texts for line in {*text.split("\n")} if line.strip())
    least = max(10, len(texts) // 10)
    return ["\n".join(line for line in text.split("\n") if shared[line] < least) for text in texts]
