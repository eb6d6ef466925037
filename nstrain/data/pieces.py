"""Cutting a long text where the tokenizer cuts anyway, so that the ids of the pieces are the ids of the text.

A byte-level tokenizer of the usual kind first splits a text into words by a pattern, and no word of it holds a newline
together with the character behind it, unless that is whitespace too. So a text may be cut after a newline whose next
character is not whitespace - if the tokenizer at hand is of that kind, which `cuts_at_lines` finds out by trying
everything that may stand around such a newline: the split must be there, and the ids of both sides those of the whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

_LINE_END = re.compile(r"\n(?=\S)")

_BEFORE = (
    "", "a", "Z", "the", "é", "e\u0301", "ß", "中", "ー", "слово", "0", "12", "123", "1234", ".", ",", ";", ")", "}",
    '"', "'", "'s", "-", "--", "_", "/", "<", ">", "=", ":", "…", "’", "\U0001f9e0", "\u200d", "\ufffd", "\x00", "\x1c",
    " ", "  ", "a ", ". ", "\t", "\n", "\n\n", "a\n", "a\n\n", ".\n", " \n", "\n ", "\r", "\r\n\r", "\u00a0", "\u3000",
    "\u2028",
)  # fmt: skip
_AFTER = (
    "a", "Z", "the", "s", "t", "é", "\u0301", "ß", "中", "ー", "слово", "0", "12", "123", "1234", ".", ",", ";", "(",
    '"', "'", "'s", "'ll", "-", "--", "_", "/", "<", "=", "{", "…", "’", "\U0001f9e0", "\u200d", "\ufeff", "\ufffd",
    "\x00", "a b", "a\n", ". ",
)  # fmt: skip


def pieces(text: str, characters: int) -> Iterator[str]:
    """A text in pieces of at least so many characters each, every one cut at the next place that is safe."""
    start = 0
    while len(text) - start > characters:
        cut = _LINE_END.search(text, start + characters)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def cuts_at_lines(tokenizer: tokenizers.Tokenizer, definition: dict[str, Any]) -> bool:
    """Whether a tokenizer gives a text's ids piece by piece (see the module's text)."""
    normalizer, splitter = definition.get("normalizer"), tokenizer.pre_tokenizer
    # A normalizer may look, or write, across a cut; composing characters (NFC) does neither at a newline.
    if splitter is None or (normalizer and normalizer.get("type") != "NFC" and normalizer.get("normalizers") != []):
        return False
    pairs = list(itertools.product((f"{before}\n" for before in _BEFORE), _AFTER))

    def encoded(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    wholes = encoded([left + right for left, right in pairs])
    lefts, rights = encoded([left for left, _ in pairs]), encoded([right for _, right in pairs])
    return all(whole == left + right for whole, left, right in zip(wholes, lefts, rights, strict=True)) and all(
        len(left) in {start for _, (start, _) in splitter.pre_tokenize_str(left + right)} for left, right in pairs
    )
