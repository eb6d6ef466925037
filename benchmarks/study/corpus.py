"""Makes the study's data: packages -> documents -> no near-copies -> a tokenizer -> tokens.

    python -m benchmarks.study.corpus --out DIR --packages DIR [--lock FILE]

The order of documents, what is held out and what is dropped follow from hashes of the documents' names and texts, so
that the same packages give the same bytes. What is written (format in data.py): the tokenizer, the training tokens,
held-out rows by source, long rows of single documents, and what all of it was made of.

Rules. A document is held out by the hash of its name (long ones more often: the long rows need them). A training
document is dropped if more than half of it occurs in training documents before it; a held-out one if more than a fifth
of it occurs in the training text that is left, or half of it in held-out documents before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.study.data import EOS_ID, Held, write_data
from benchmarks.study.packages import PACKAGES, SHARES, Package, Source, documents, fetch, share_of
from benchmarks.study.shingles import SeenText, shingles
from benchmarks.study.text import to_text, without_furniture
from nstrain.base.errors import Refusal

Tokens = npt.NDArray[np.uint16]

VOCABULARY = 16_384
EOS = "<|end|>"
TRAINING_TOKENS = 366 * 65_536 + 1
"""366 updates of 65,536 tokens, and the last one's last target."""
ROW_TOKENS = 2048
VALIDATION_ROWS = 64
"""Held-out rows of a source."""
LONG_ROWS = {8192: 32, 32_768: 12}
"""Rows of single held-out documents by their length in tokens."""

HELD_OUT = 0.06
HELD_OUT_OF_LONG = 0.4
LONG_CHARACTERS = 100_000
LARGEST_CONTAINMENT = 0.5
LARGEST_LEAK = 0.2
ENOUGH_CHARACTERS_PER_TOKEN = 5.0
"""Training text is taken up to this much a wanted token before it is encoded, and cut to what is wanted after."""
LONGEST_VALIDATION_TOKENS = 30_000
"""Longer held-out documents are for the long rows alone: one of them would fill a source's rows."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and where it comes from."""

    source: Source
    name: str
    """Package and path inside it."""
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept from training."""
        share = HELD_OUT_OF_LONG if len(self.text) > LONG_CHARACTERS else HELD_OUT
        return share_of(f"held out:{self.name}") < share


# --- documents ---------------------------------------------------------------------------------------------------


def read_package(package: Package, path: Path) -> list[Document]:
    """The documents of a package, without what its pages share."""
    plain: list[Document] = []
    pages: dict[tuple[Source, str], list[tuple[str, str]]] = defaultdict(list)
    for pick, name, data in documents(package, path):
        text = to_text(data, pick.form)
        if text is None:
            continue
        full_name = f"{package.name}:{name}"
        if pick.form == "html":
            pages[pick.source, os.path.dirname(name)].append((full_name, text))
        else:
            plain.append(Document(pick.source, full_name, text))
    for (source, _), named in sorted(pages.items()):
        for (name, _), text in zip(named, without_furniture([text for _, text in named]), strict=True):
            plain.append(Document(source, name, text))
    return plain


def in_order(found: Sequence[Document]) -> list[Document]:
    """By the hash of their names: a shuffle that is always the same."""
    return sorted(found, key=lambda document: (share_of(document.name), document.name))


@dataclasses.dataclass
class Selection:
    """What is taken of the documents."""

    training: list[Document]
    held_out: list[Document]
    dropped: dict[str, int]
    """Documents that were not taken, by why."""


def select(found: Sequence[Document], wanted_characters: dict[Source, float]) -> Selection:
    """Training and held-out documents without near-copies; `found` in order. Rules: see the top of this file."""
    taken = Selection([], [], Counter())
    seen, characters = SeenText(), Counter[str]()
    for document in found:
        if document.is_held_out or characters[document.source] >= wanted_characters[document.source]:
            continue
        found_shingles = shingles(document.text)
        if seen.containment(found_shingles) > LARGEST_CONTAINMENT:
            taken.dropped["copies in training"] += 1
            continue
        seen.add(found_shingles)
        characters[document.source] += len(document.text)
        taken.training.append(document)
    seen_held_out = SeenText()
    for document in found:
        if not document.is_held_out:
            continue
        found_shingles = shingles(document.text)
        if seen.containment(found_shingles) > LARGEST_LEAK:
            taken.dropped["held-out, but in training"] += 1
        elif seen_held_out.containment(found_shingles) > LARGEST_CONTAINMENT:
            taken.dropped["copies in held-out"] += 1
        else:
            seen_held_out.add(found_shingles)
            taken.held_out.append(document)
    return taken


# --- tokens ------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE whose token 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.token_to_id(EOS) != EOS_ID:
        raise Refusal(f"the tokenizer gave {EOS} the id {tokenizer.token_to_id(EOS)}, not {EOS_ID}")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Each text's tokens and the end of a document; text that looks like that token is cut in two before."""
    clean = [text.replace(EOS, EOS[0] + " " + EOS[1:]) for text in texts]
    return [np.array([*encoding.ids, EOS_ID], dtype=np.uint16) for encoding in tokenizer.encode_batch_fast(clean)]


def training_stream(taken: Sequence[tuple[Source, Tokens]], total: int) -> tuple[Tokens, dict[str, int]]:
    """Documents in their order, each source to its share of `total` tokens, and the tokens of each source.

    A source's last document is cut where its share is full. Raises `Refusal` for a source that has too little.
    """
    wanted = {source: round(share * total) for source, share in SHARES.items()}
    wanted["python"] += total - sum(wanted.values())
    left = dict(wanted)
    pieces = []
    for source, tokens in taken:
        piece = tokens[: left[source]]
        left[source] -= len(piece)
        pieces.append(piece)
    short = {source: wanted[source] - lack for source, lack in left.items() if lack}
    if short:
        told = ", ".join(f"{source} {has:,} of {wanted[source]:,}" for source, has in sorted(short.items()))
        raise Refusal(f"too little training text: {told} tokens")
    return np.concatenate(pieces), {source: int(count) for source, count in wanted.items()}


def validation_rows(held: Sequence[Tokens], rows: int, row_tokens: int) -> Tokens:
    """Rows [rows, L + 1] of documents one after the other; each begins with the last target of the one before."""
    stream = np.concatenate([tokens for tokens in held if len(tokens) <= LONGEST_VALIDATION_TOKENS])
    if len(stream) < rows * row_tokens + 1:
        raise Refusal(f"{len(stream):,} held-out tokens of a source: {rows} rows need {rows * row_tokens + 1:,}")
    return np.stack([stream[row * row_tokens : (row + 1) * row_tokens + 1] for row in range(rows)])


def long_rows(held: Sequence[Tokens], rows: int, row_tokens: int) -> Tokens:
    """Rows [rows, L + 1] that begin with the end of a document and hold the start of one document alone."""
    chosen = [tokens for tokens in held if len(tokens) > row_tokens][:rows]
    if len(chosen) < rows:
        raise Refusal(f"{len(chosen)} held-out documents of more than {row_tokens:,} tokens, {rows} are needed")
    return np.stack([np.concatenate([[np.uint16(EOS_ID)], tokens[:row_tokens]]) for tokens in chosen])


# --- the whole ---------------------------------------------------------------------------------------------------


def build(out: Path, packages: Path, lock: Path, workers: int) -> None:
    """Make the data in `out`."""
    files = fetch(packages, lock)
    with ProcessPoolExecutor(workers) as pool:
        read = list(pool.map(read_package, PACKAGES, [files[package.name] for package in PACKAGES]))
    found = in_order([document for of_package in read for document in of_package])
    print(f"{len(found):,} documents, {sum(len(document.text) for document in found) / 1e6:.0f} M characters")
    wanted = {source: share * TRAINING_TOKENS * ENOUGH_CHARACTERS_PER_TOKEN for source, share in SHARES.items()}
    taken = select(found, wanted)
    print(f"{len(taken.training):,} for training, {len(taken.held_out):,} held out, dropped {dict(taken.dropped)}")

    tokenizer = train_tokenizer(document.text for document in taken.training)
    encoded = functools.partial(encode, tokenizer)
    training = zip(taken.training, encoded([document.text for document in taken.training]), strict=True)
    stream, by_source = training_stream([(document.source, tokens) for document, tokens in training], TRAINING_TOKENS)
    held = list(zip(taken.held_out, encoded([document.text for document in taken.held_out]), strict=True))
    held_rows = [
        Held(
            source,
            validation_rows([t for document, t in held if document.source == source], VALIDATION_ROWS, ROW_TOKENS),
        )
        for source in SHARES
    ]
    held_rows += [
        Held(f"long-{length}", long_rows([t for _, t in held], rows, length)) for length, rows in LONG_ROWS.items()
    ]
    write_data(
        out,
        tokenizer.to_str(),
        stream,
        held_rows,
        {
            "training tokens by source": by_source,
            "training documents by source": dict(Counter(document.source for document in taken.training)),
            "dropped documents": dict(taken.dropped),
        },
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the data is written")
    parser.add_argument("--packages", type=Path, required=True, help="where packages are downloaded to")
    parser.add_argument("--lock", type=Path, default=Path(__file__).parent / "packages.lock.json")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that read packages")
    arguments = parser.parse_args()
    build(arguments.out, arguments.packages, arguments.lock, arguments.workers)


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        raise SystemExit(str(refusal)) from None
