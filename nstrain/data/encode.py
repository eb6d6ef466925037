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

ENCODING_VERSION is raised by any change that makes other ids of the same text and tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from nstrain.base.disk import canonical_json, sha256_bytes
from nstrain.base.errors import Refusal

ENCODING_VERSION = 1

BATCH_BYTES = 8 << 20
"""Text given to the library at once: an encoding costs it about 100 bytes a token."""

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


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the other rooms need to know of a tokenizer."""

    size: int
    """Token ids are below this."""
    added: dict[str, int]
    """The added vocabulary: content to id."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """How tokens are stored: the smallest of uint16 and uint32 that holds every id, little-endian."""
        return np.dtype("<u2" if self.size <= 1 << 16 else "<u4")


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
        self._may_lengthen = definition.get("normalizer") is not None or _adds_spaces(definition.get("pre_tokenizer"))
        self.canary_sha256 = self._run_canary()

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
            wrong = [flag for flag in ("lstrip", "rstrip", "single_word", "normalized") if token.get(flag)]
            if wrong:
                raise Refusal(
                    f"source {source}: marker {marker!r} has {', '.join(wrong)} set in {self.where}; only a token that "
                    "is matched exactly as it is written can be a marker"
                )
        return {marker: self.vocabulary.added[marker] for marker in markers}

    def encode(self, texts: Sequence[str], markers: dict[str, int]) -> list[npt.NDArray[np.int64]]:
        """Ids of each document, without EOS. Only the given markers become control tokens."""
        if not markers:
            return self._encode_in_batches(texts)
        split = re.compile("(" + "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True)) + ")")
        pieces = [split.split(text) for text in texts]  # odd places hold the markers
        plain = iter(self._encode_in_batches([piece for parts in pieces for piece in parts[::2]]))
        documents = []
        for parts in pieces:
            ids: list[npt.NDArray[np.int64]] = []
            for place, part in enumerate(parts):
                ids.append(np.array([markers[part]], np.int64) if place % 2 else next(plain))
            documents.append(np.concatenate(ids))
        return documents

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

    def _encode_in_batches(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        encoded: list[npt.NDArray[np.int64]] = []
        batch: list[str] = []
        batch_bytes = 0
        for text in texts:
            text_bytes = len(text.encode())
            if batch and batch_bytes + text_bytes > BATCH_BYTES:
                encoded += self._encode_plain(batch)
                batch, batch_bytes = [], 0
            batch.append(text)
            batch_bytes += text_bytes
        return encoded + self._encode_plain(batch)

    def _encode_plain(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        encoded = [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
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


def _plain(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer under which added tokens in a text are characters; ids as in the original."""
    special = [{**token, "special": True} for token in definition.get("added_tokens", [])]
    plain = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": special}))
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()
    return plain


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
