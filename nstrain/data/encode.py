"""Text to token ids, as plain text.

A tokenizer's added vocabulary (`</s>`, `<think>`, `<param`, ...) is control: written in a document it is only its
characters. The `tokenizers` library matches added tokens inside a text by default, and its switch against that,
`encode_special_tokens`, covers only tokens marked special, is not saved with the tokenizer and is lost by pickling.
So a plain tokenizer is derived from the file each time it is needed: every added token marked special (ids kept: a
filtered list would renumber them silently), then the switch set. A canary proves it on the tokenizer at hand - every
added token in several contexts, and prose with characters that few vocabularies hold, which must not become `<unk>` -
and the line is refused otherwise. Every text encoded later is looked through for control tokens too.

A source's own markers are the one exception: their exact strings encode as those tokens. The text is split on them
first and the pieces between are encoded as plain text.

A long text is encoded in pieces, so that memory does not follow a document's length. It is cut after a newline whose
next character is not whitespace, and only if the tokenizer at hand is proven to split there itself (`pieces`): the ids
are the same. Under any other tokenizer it is encoded whole.

ENCODING_VERSION is raised by any change that makes other ids of the same text and tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from nstrain.base.disk import canonical_json, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.pieces import cuts_at_lines, pieces

ENCODING_VERSION = 1

BATCH_BYTES = 2 << 20
"""Text given to the library at once: an encoding costs it about 100 bytes a token."""

PIECE_CHARACTERS = 1 << 18
"""A longer text is cut at the next safe place: while the library works on it, a character costs it 100 bytes."""

_CONTEXTS = (
    "{}",
    "a{}",
    "{}a",
    "a{}b",
    " {} ",
    "\n{}\n",
    "({})",
    '"{}"',
    "#include {}>",
    "/x{}ing",
    "{0}{0}",
    "1{}2",
)
_CANARY_PROSE = "Grüße, 世界! x = 3.14159; // <b> 'don’t'\n\ttab\r\n  two spaces … \U0001f9e0 \U0010abcd\x01 end"


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """How tokens are stored: the smaller of uint16 and uint32 that holds every id, little-endian."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<u4")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the other rooms need to know of a tokenizer."""

    size: int
    """Token ids are below this."""
    added: dict[str, int]
    """The added vocabulary: content to id."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """How tokens are stored."""
        return token_dtype(self.size)


_Part = str | int | None
"""Of documents one after another: a piece of plain text, a marker's id, or None for a document's end."""


class Encoder:
    """Encodes documents of one line. Building one runs the canary."""

    def __init__(self, tokenizer_json: bytes, eos_id: int, where: str) -> None:
        """From the bytes of a tokenizer.json; `where` names it in messages. Raises `Refusal`."""
        try:
            definition = json.loads(tokenizer_json)
            full = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # the library raises bare Exception
            raise Refusal(f"{where}: not a tokenizer.json of the tokenizers library ({error})") from None
        self.sha256 = sha256_bytes(tokenizer_json)
        self.where = where
        self._json = tokenizer_json
        added = {token["content"]: token["id"] for token in definition.get("added_tokens", [])}
        vocabulary = full.get_vocab(with_added_tokens=True)
        self.vocabulary = Vocabulary(max(vocabulary.values(), default=-1) + 1, added)
        if not 0 <= eos_id < self.vocabulary.size:
            raise Refusal(f"{where}: eos id {eos_id} is not among its ids 0 ... {self.vocabulary.size - 1}")
        if eos_id not in added.values():
            known = ", ".join(f"{i} {t!r}" for t, i in sorted(added.items(), key=lambda x: x[1])[:8])
            raise Refusal(
                f"{where}: eos id {eos_id} is the ordinary token {full.id_to_token(eos_id)!r}, which documents hold; "
                f"name an added token (the first are {known})"
            )
        for content, id in added.items():
            if full.token_to_id(content) != id:
                raise Refusal(
                    f"{where}: added token {content!r} stands there with id {id}, the library gives it "
                    f"{full.token_to_id(content)}: its list of added tokens was edited; use the original file"
                )
        self.eos_id = eos_id
        self._is_control = np.zeros(self.vocabulary.size, dtype=np.bool_)
        self._is_control[list(added.values())] = True
        self._flags = {token["content"]: token for token in definition.get("added_tokens", [])}
        self._plain = _plain(definition)
        self._matching = full
        self._matching.no_truncation()
        self._matching.no_padding()
        self._normalizes = _normalizes(definition.get("normalizer"))
        self._may_lengthen = self._normalizes or _adds_spaces(definition.get("pre_tokenizer"))
        self.canary_sha256 = self._run_canary()
        self.cuts_long_texts = cuts_at_lines(self._plain, definition)
        """Whether a long text is encoded in pieces; its ids are the same."""

    def __reduce__(self) -> tuple[type[Encoder], tuple[bytes, int, str]]:
        """In another process the encoder is built anew: the library's own pickling would lose the switch."""
        return Encoder, (self._json, self.eos_id, self.where)

    def _run_canary(self) -> str:
        """Every added token in every context must come out as ordinary tokens; the hash of all ids pins the library."""
        texts = [context.format(content) for content in self.vocabulary.added for context in _CONTEXTS]
        encoded = self._encode_plain([*texts, _CANARY_PROSE])
        return sha256_bytes(canonical_json([ids.tolist() for ids in encoded]))

    def max_tokens(self, text_bytes: int, documents: int) -> int | None:
        """The most tokens that so many bytes of text can give, EOS included; None if the tokenizer may add to it."""
        return None if self._may_lengthen else text_bytes + documents

    def marker_ids(self, markers: Sequence[str], source: str) -> dict[str, int]:
        """The ids of a source's own markers. Raises `Refusal` for one that the exact split cannot stand for."""
        for marker in markers:
            token = self._flags.get(marker)
            if token is None:
                raise Refusal(f"source {source}: marker {marker!r} is not an added token of {self.where}")
            inexact = ("lstrip", "rstrip", "single_word", *(["normalized"] if self._normalizes else []))
            wrong = [flag for flag in inexact if token.get(flag)]
            if wrong:
                raise Refusal(
                    f"source {source}: marker {marker!r} has {', '.join(wrong)} set in {self.where}; only a token that "
                    "is matched exactly as it is written can be a marker"
                )
        return {marker: self.vocabulary.added[marker] for marker in markers}

    def encode(self, texts: Sequence[str], markers: dict[str, int]) -> list[npt.NDArray[Any]]:
        """Ids of each document, without EOS, as they are stored. Only the given markers become control tokens."""
        return list(self.encode_each(texts, markers))

    def encode_each(self, texts: Iterable[str], markers: dict[str, int]) -> Iterator[npt.NDArray[Any]]:
        """`encode` for as many texts as there are, taken a batch at a time."""
        document: list[npt.NDArray[Any]] = []
        for batch in _batches(self._parts(texts, markers)):
            plain = iter(self._encode_plain([part for part in batch if isinstance(part, str)]))
            for part in batch:
                if part is None:
                    yield document[0] if len(document) == 1 else np.concatenate(document)
                    document = []
                elif isinstance(part, str):
                    document.append(next(plain))
                else:
                    document.append(np.array([part], self.vocabulary.dtype))

    def _parts(self, texts: Iterable[str], markers: dict[str, int]) -> Iterator[_Part]:
        """The documents' pieces of plain text and ids of markers; None ends a document."""
        split = re.compile("(" + "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True)) + ")")
        for text in texts:
            for place, piece in enumerate(split.split(text) if markers else [text]):  # odd places hold the markers
                if place % 2:
                    yield markers[piece]
                else:
                    yield from pieces(piece, PIECE_CHARACTERS) if self.cuts_long_texts else (piece,)
            yield None

    def control_tokens_by_default(self, texts: Sequence[str]) -> tuple[int, int]:
        """What the library's default would make of these texts: (control tokens matched in them, all tokens)."""
        control = total = 0
        for encoding in self._matching.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = np.array(encoding.ids, np.int64)
            control += int(self._is_control[ids].sum())
            total += ids.size
        return control, total

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Text of token ids, control tokens written out."""
        return str(self._matching.decode([int(i) for i in ids], skip_special_tokens=False))

    def _encode_plain(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        encoded = [np.array(encoding.ids, dtype=self.vocabulary.dtype) for encoding in encodings]
        for text, ids in zip(texts, encoded, strict=True):
            leaked = ids[self._is_control[ids]]
            if leaked.size:
                raise Refusal(
                    f"{self.where}: the text {text[:80]!r} encodes as control token {leaked[0]} "
                    f"({self._plain.id_to_token(int(leaked[0]))!r}) although it is plain text; this tokenizer's merges "
                    "or vocabulary build an added token from its characters, or it has no other token for one of them. "
                    "Use one that does not."
                )
        return encoded


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Parts in batches of at most BATCH_BYTES of text, or one piece that is longer."""
    batch: list[_Part] = []
    batch_bytes = 0
    for part in parts:
        size = len(part.encode()) if isinstance(part, str) else 0
        if size and batch_bytes + size > BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(part)
        batch_bytes += size
    if batch:
        yield batch


def _plain(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer under which added tokens in a text are characters; ids as in the original."""
    special = [{**token, "special": True} for token in definition.get("added_tokens", [])]
    plain = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": special}))
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()
    return plain


def _normalizes(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer may change a text: there is one, and it is no sequence of none."""
    if normalizer is None:
        return False
    return normalizer.get("type") != "Sequence" or any(
        _normalizes(part) for part in normalizer.get("normalizers", [{}])
    )


def _adds_spaces(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer gives a text more bytes than it has: a space in front, or a longer sign for each."""
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", [])
    return (
        pre_tokenizer.get("type") == "Metaspace"
        or bool(pre_tokenizer.get("add_prefix_space"))
        or any(_adds_spaces(part) for part in parts)
    )


def load_encoder(path: Path, eos_id: int) -> Encoder:
    """An encoder from a tokenizer.json on disk. Raises `Refusal`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refusal(f"{path}: the tokenizer cannot be read ({error.strerror}); name a tokenizer.json") from None
    return Encoder(data, eos_id, str(path))
