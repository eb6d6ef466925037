"""Text as plain text: what a control token's characters become, the markers, the canary."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data_helpers import ADDED, EOS, LAST_ADDED, NOT_SPECIAL, environment, prose, quick, train_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from nstrain.base.errors import Refusal
from nstrain.data import encode as encode_module
from nstrain.data.encode import Encoder, load_encoder, token_dtype


@pytest.fixture(scope="module")
def encoder(tokenizer: Path) -> Encoder:
    return load_encoder(tokenizer, EOS)


def edited(tokenizer: Path, edit: Callable[[dict[str, Any]], None]) -> bytes:
    definition = json.loads(tokenizer.read_bytes())
    edit(definition)
    return json.dumps(definition).encode()


def ids_of(encoder: Encoder, text: str, markers: dict[str, int] | None = None) -> list[int]:
    return encoder.encode([text], markers or {})[0].tolist()


# ------------------------------------------------------------------ plain text

around = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", " ", "\n", "a", "/", "x<", ">", "#include ", "é", "中", "\t\t", "0", "_", "<", "</", "\r\n", "\x00"]
)


@quick(600)
@given(st.lists(st.tuples(around, st.sampled_from(ADDED)), max_size=4), around)
def test_added_tokens_written_in_a_text_are_its_characters(
    encoder: Encoder, parts: list[tuple[str, str]], end: str
) -> None:
    text = "".join(before + token for before, token in parts) + end
    ids = ids_of(encoder, text)
    assert not set(ids) & set(encoder.vocabulary.added.values())
    assert encoder.decode(np.array(ids)) == text


def test_the_librarys_default_does_match_them(encoder: Encoder) -> None:
    """Else the test above would prove nothing."""
    texts = [f"a{token}b" for token in ADDED]
    control, total = encoder.control_tokens_by_default(texts)
    assert control == len(ADDED)
    assert total == 3 * len(ADDED)
    assert encoder.control_tokens_by_default([prose(1, 200)]) == (0, len(ids_of(encoder, prose(1, 200))))


def test_the_switch_alone_leaves_those_that_are_not_special(tokenizer: Path) -> None:
    """The trap that the derived tokenizer avoids; if the library closes it, the derivation may go."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.encode_special_tokens = True
    for token in NOT_SPECIAL:
        assert library.token_to_id(token) in library.encode(f"a{token}b").ids


def test_ids_do_not_depend_on_the_flag_special(encoder: Encoder) -> None:
    other = Encoder(train_tokenizer(special=True).encode(), EOS, "other")
    assert other.canary_sha256 == encoder.canary_sha256
    assert other.vocabulary == encoder.vocabulary


def test_the_vocabulary_counts_the_added_tokens_behind_the_ordinary_ones(encoder: Encoder, tokenizer: Path) -> None:
    ordinary = len(json.loads(tokenizer.read_bytes())["model"]["vocab"])
    assert encoder.vocabulary.size == ordinary + len(LAST_ADDED)
    assert set(encoder.vocabulary.added) == set(ADDED)
    assert encoder.vocabulary.added["</s>"] == EOS
    assert encoder.vocabulary.dtype == np.dtype("<u2")
    assert [token_dtype(size).itemsize for size in (1 << 16, (1 << 16) + 1)] == [2, 4]


@quick(30)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 400), st.booleans())
def test_batches_do_not_change_ids(encoder: Encoder, seeds: list[int], batch_bytes: int, with_markers: bool) -> None:
    texts = [prose(seed, seed) + "<|im_start|>" * (seed % 3) for seed in seeds]
    markers = encoder.marker_ids(["<|im_start|>"], "chat") if with_markers else {}
    alone = [ids_of(encoder, text, markers) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "BATCH_BYTES", batch_bytes)
        together = encoder.encode(texts, markers)
    assert [ids.tolist() for ids in together] == alone


def test_truncation_padding_and_the_post_processor_of_the_file_are_not_applied(tokenizer: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    encoder = Encoder(library.to_str().encode(), EOS, "t")
    assert ids_of(encoder, prose(1, 30)) == ids_of(load_encoder(tokenizer, EOS), prose(1, 30))
    by_default = load_encoder(tokenizer, EOS).control_tokens_by_default([prose(1, 30)])
    assert encoder.control_tokens_by_default([prose(1, 30)]) == by_default
    assert by_default[0] == 0


def test_another_process_gives_the_same_ids(tokenizer: Path, encoder: Encoder) -> None:
    program = (
        "import sys, pathlib; from nstrain.data.encode import load_encoder;"
        "print(load_encoder(pathlib.Path(sys.argv[1]), 1).canary_sha256)"
    )
    for variables in ({"PYTHONHASHSEED": "1", "TOKENIZERS_PARALLELISM": "false"}, {"RAYON_NUM_THREADS": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tokenizer)],
            env=environment(**variables),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == encoder.canary_sha256


# ------------------------------------------------------------------ markers


@quick(200)
@given(
    st.lists(st.sampled_from([*ADDED, "a", " ", "\n", "<", "x y", "数"]), max_size=10), st.sets(st.sampled_from(ADDED))
)
def test_only_a_sources_own_markers_are_control(encoder: Encoder, parts: list[str], own: set[str]) -> None:
    text = "".join(parts)
    markers = encoder.marker_ids(sorted(own), "chat")
    ids = ids_of(encoder, text, markers)
    control = [i for i in ids if i in encoder.vocabulary.added.values()]
    longest_first = sorted(own, key=len, reverse=True)
    expected, rest = [], text
    while rest:
        found = next((m for m in longest_first if rest.startswith(m)), None)
        expected += [markers[found]] if found else []
        rest = rest[len(found or "x") :]
    assert control == expected
    assert encoder.decode(np.array(ids)) == text


def test_the_longer_of_two_markers_wins(tokenizer: Path) -> None:
    def add(definition: dict[str, Any]) -> None:
        longest = definition["added_tokens"][-1]
        definition["added_tokens"].append({**longest, "content": "<think>>", "id": longest["id"] + 1})

    encoder = Encoder(edited(tokenizer, add), EOS, "t")
    for order in (["<think>", "<think>>"], ["<think>>", "<think>"]):
        markers = encoder.marker_ids(order, "s")
        assert ids_of(encoder, "<think>>", markers) == [encoder.vocabulary.added["<think>>"]]


def test_a_marker_that_is_no_added_token_is_refused(encoder: Encoder) -> None:
    with pytest.raises(Refusal, match=r"source chat: marker '<|nope|>' is not an added token".replace("|", r"\|")):
        encoder.marker_ids(["<|im_start|>", "<|nope|>"], "chat")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_a_marker_that_the_library_would_not_match_exactly_is_refused(tokenizer: Path, flag: str) -> None:
    def set_flag(definition: dict[str, Any]) -> None:
        next(t for t in definition["added_tokens"] if t["content"] == "<|im_end|>")[flag] = True
        definition["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}

    encoder = Encoder(edited(tokenizer, set_flag), EOS, "t")
    with pytest.raises(Refusal, match=rf"marker '<\|im_end\|>' has {flag} set"):
        encoder.marker_ids(["<|im_end|>"], "chat")
    text = f"a {ADDED[0]} b <|im_end|> c"
    assert encoder.decode(np.array(ids_of(encoder, text))) == text  # as plain text it is harmless


@pytest.mark.parametrize("normalizer", [None, {"type": "Sequence", "normalizers": []}])
def test_a_marker_to_be_matched_in_normalized_text_is_exact_where_nothing_is_normalized(
    tokenizer: Path, normalizer: dict[str, Any] | None
) -> None:
    def set_flag(definition: dict[str, Any]) -> None:
        next(t for t in definition["added_tokens"] if t["content"] == "<think>")["normalized"] = True
        definition["normalizer"] = normalizer

    encoder = Encoder(edited(tokenizer, set_flag), EOS, "t")
    markers = encoder.marker_ids(["<think>"], "chat")
    assert ids_of(encoder, "<think>", markers) == [encoder.vocabulary.added["<think>"]]
    assert encoder.vocabulary.added["<think>"] not in ids_of(encoder, "a<think>")
    assert encoder.max_tokens(100, 2) == 102


# ------------------------------------------------------------------ what is refused


def merge_together(definition: dict[str, Any], token: str) -> None:
    """Give the model merges that build a token from its characters."""
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    built = token[0]
    for character in token[1:]:
        merges.append([built, character])
        built += character
        if built != token:
            vocabulary.setdefault(built, max(vocabulary.values()) + 1)
    tail = [t for t in definition["added_tokens"] if t["content"] in LAST_ADDED]
    for place, added in enumerate(tail):
        added["id"] = max(vocabulary.values()) + 1 + place


@pytest.mark.parametrize("token", ["</s>", "<param", "<think>"])
def test_merges_that_build_an_added_token_are_refused(tokenizer: Path, token: str) -> None:
    def edit(definition: dict[str, Any]) -> None:
        definition["pre_tokenizer"] = {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
        }  # fmt: skip
        definition["model"]["merges"] = []
        merge_together(definition, token)

    with pytest.raises(Refusal, match="encodes as control token"):
        Encoder(edited(tokenizer, edit), EOS, "leaky.json")


def test_ignore_merges_with_an_added_token_in_the_vocabulary_is_refused(tokenizer: Path) -> None:
    def edit(definition: dict[str, Any]) -> None:
        definition["model"]["ignore_merges"] = True
        definition["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"\s"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }

    with pytest.raises(Refusal, match=r"leaky.json: the text ' ?<s>.*encodes as control token 0 \('<s>'\)"):
        Encoder(edited(tokenizer, edit), EOS, "leaky.json")


def test_a_shortened_list_of_added_tokens_is_refused(tokenizer: Path) -> None:
    """The library gives the tokens behind the missing one other ids, silently."""

    def edit(definition: dict[str, Any]) -> None:
        definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] != "<|im_end|>"]

    with pytest.raises(Refusal, match=r"added token '<unk>' stands there with id (\d+), the library gives it \d+"):
        Encoder(edited(tokenizer, edit), EOS, "t")


def test_a_leak_that_the_canary_does_not_see_is_refused_when_it_happens(
    tokenizer: Path,
) -> None:
    fresh = load_encoder(tokenizer, EOS)
    fresh._is_control[fresh.encode(["the"], {})[0][0]] = True
    with pytest.raises(Refusal, match="the text 'the of it' encodes as control token"):
        fresh.encode(["it is", "the of it"], {})


@pytest.mark.parametrize(("eos", "reason"), [(-1, "not among its ids"), (10**6, "not among"), (300, "ordinary token")])
def test_an_eos_that_is_no_added_token_is_refused(tokenizer: Path, eos: int, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        load_encoder(tokenizer, eos)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(Refusal, match=r"not a tokenizer.json"):
        load_encoder(tmp_path / "t.json", EOS)
    with pytest.raises(Refusal, match="cannot be read"):
        load_encoder(tmp_path / "missing.json", EOS)


# ------------------------------------------------------------------ tokenizers that are not byte-level


def metaspace(byte_fallback: bool) -> bytes:
    """A tokenizer in SentencePiece's manner, with or without tokens for bytes that its vocabulary does not hold."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    if byte_fallback:
        vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    for character in "▁abcdefghijklmnopqrstuvwxyz<>/'.,;=()0123456789":
        vocabulary[character] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer.to_str().encode()


def test_a_tokenizer_without_a_token_for_every_character_is_refused() -> None:
    with pytest.raises(Refusal, match=r"encodes as control token 0 \('<unk>'\)"):
        Encoder(metaspace(byte_fallback=False), 2, "lossy.json")


def test_one_that_falls_back_to_bytes_works_and_claims_no_bound_by_bytes() -> None:
    encoder = Encoder(metaspace(byte_fallback=True), 2, "t")
    text = "a <s> b</s>, 世界 </s>"
    ids = ids_of(encoder, text)
    assert not set(ids) & {0, 1, 2}
    assert encoder.decode(np.array(ids)) == text
    assert encoder.max_tokens(1000, 10) is None


def test_a_normalizer_or_a_space_in_front_claims_no_bound_by_bytes(tokenizer: Path, encoder: Encoder) -> None:
    def normalize(definition: dict[str, Any]) -> None:
        definition["normalizer"] = {"type": "NFKD"}

    def prefix(definition: dict[str, Any]) -> None:
        definition["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True

    assert encoder.max_tokens(1000, 10) == 1010
    for edit in (normalize, prefix):
        assert Encoder(edited(tokenizer, edit), EOS, "t").max_tokens(1000, 10) is None


@quick(200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_a_text_has_no_more_tokens_than_bytes(encoder: Encoder, text: str) -> None:
    most = encoder.max_tokens(len(text.encode()), 1)
    assert most is not None
    assert len(ids_of(encoder, text)) + 1 <= most
