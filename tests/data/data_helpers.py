"""Small text trees, tokenizers and data lines, and what the tests recompute without the code under test."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

import nstrain
from nstrain.base.errors import Exhausted
from nstrain.data.cycles import STREAM_DOCUMENT
from nstrain.data.init import init_line, load_recipe
from nstrain.data.line import DataLine
from nstrain.data.manifest import load_manifest
from nstrain.data.preparer import run_preparer

EOS = 1
NOT_SPECIAL = ("<think>", "</think>")
FIRST_ADDED = (
    "<s>", "</s>", "<tool_call>", "</tool_call>", "<|im_sep|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<think>", "</think>", "<tool_response>", "</tool_response>", "<tools>", "</tools>", "<arguments>", "</arguments>",
    "<parameters>", "</parameters>", "<function", "</function>", "<param", "</param>",
)  # fmt: skip
LAST_ADDED = (
    "<|im_start|>", "<|im_end|>", "<unk>", "<|thought_begin|>", "<|thought_end|>", "<|tool_call|>",
    "<|execute_start|>", "<|execute_end|>", "/think", "/no_think",
)  # fmt: skip
ADDED = FIRST_ADDED + LAST_ADDED

_SENTENCES = (
    "the of and a to in is it for on with as was at by from or an be this which are not have stream window segment",
    "Wörter größer Straße été naïve 数据 训练 模型 слово def return import self None x = 0.5 3141 2718 // -> {} \t \n",
)
WORDS = [word for sentence in _SENTENCES for word in sentence.split(" ")]


def quick(examples: int) -> hypothesis.settings:
    """Settings of a property test: the same examples on every run."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def thorough(examples: int) -> hypothesis.settings:
    """Settings of a property test marked slow: other examples on every run."""
    return hypothesis.settings(quick(examples), derandomize=False)


def prose(seed: int, words: int) -> str:
    """Some text of about so many words, with characters of several scripts."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def train_tokenizer(special: bool = False) -> str:
    """A tokenizer.json like MiniCPM5's: its pre-tokenizer, its 32 added tokens, two of them not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in FIRST_ADDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(seed, 2000) for seed in range(3)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LAST_ADDED])
    definition = json.loads(tokenizer.to_str())
    for token in definition["added_tokens"]:
        token["special"] = special or token["content"] not in NOT_SPECIAL
    return json.dumps(definition)


def write_tree(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files given by relative path; returns the root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def prose_tree(seed: int, strata: Mapping[str, int], words: int = 60) -> dict[str, str]:
    """So many documents a stratum, of very different lengths around `words` words."""
    draw = random.Random(seed)
    return {
        f"{stratum}/{n:03d}.txt": prose(draw.randrange(1 << 30), 1 + int(words * draw.expovariate(1.0)))
        for stratum, count in strata.items()
        for n in range(count)
    }


def rows_of(text: str) -> list[str]:
    """The rows of a file with several documents (the fixture `many_rows`)."""
    return text.removesuffix("\f").split("\f")


def many_rows_tree(seed: int, strata: Mapping[str, int], rows: int = 6, words: int = 25) -> dict[str, str]:
    """Files of 1 ... `rows` documents of very different lengths; now and then an empty one."""
    draw = random.Random(seed)

    def document() -> str:
        return prose(draw.randrange(1 << 30), 1 + int(words * draw.expovariate(1.0))) if draw.random() < 0.95 else ""

    return {
        f"{stratum}/{n:03d}.txt": "".join(document() + "\f" for _ in range(draw.randint(1, rows)))
        for stratum, count in strata.items()
        for n in range(count)
    }


def source(name: str, path: Path, share: int = 1, **fields: Any) -> dict[str, Any]:
    """A source of a recipe file."""
    return {"name": name, "kind": "local", "path": str(path), "include": ["**/*.txt"], "share": share, **fields}


def make_line(
    work: Path,
    tokenizer: Path,
    sources: Sequence[dict[str, Any]],
    cycle_tokens: int,
    cycles: int | None,
    **options: Any,
) -> DataLine:
    """`data init` from a recipe file that is written beside the line's directory."""
    work.parent.mkdir(parents=True, exist_ok=True)
    recipe = work.with_name(work.name + ".recipe.json")
    recipe.write_text(json.dumps({"format": 1, "sources": list(sources)}))
    options = {"unit_tokens": 32, **options}
    return init_line(work, load_recipe(recipe), tokenizer, EOS, cycle_tokens, cycles, **options)


def prepare(line: DataLine, through: int | None = None) -> None:
    """Prepare cycles 1 ... through (all of them by default) in this process alone."""
    run_preparer(line.work, until_cycle=through or line.cycle_count, workers=0)


def prepare_until_exhausted(line: DataLine) -> tuple[int, str]:
    """Prepare an open-ended line until a source runs out: the cycle that is refused, and the message."""
    try:
        run_preparer(line.work, until_cycle=1000, workers=0)
    except Exhausted as error:
        cycle = 1
        while line.manifest_path(cycle).exists():
            cycle += 1
        return cycle, str(error)
    raise AssertionError("the text did not run out")


def manifest_of(line: DataLine, cycle: int) -> dict[str, Any]:
    """A cycle's manifest."""
    return load_manifest(line.manifest_path(cycle))


def stream_of(line: DataLine, cycle: int, name: str) -> np.ndarray[Any, Any]:
    """A source's token file of a cycle."""
    return np.fromfile(line.cycle_directory(cycle) / f"{name}.bin", dtype=line.token_dtype).astype(np.int64)


def table_of(line: DataLine, cycle: int, name: str) -> np.ndarray[Any, Any]:
    """A source's table of documents of a cycle."""
    return np.fromfile(line.cycle_directory(cycle) / f"{name}.idx", dtype=STREAM_DOCUMENT)


def documents_in(line: DataLine, name: str, cycle: int) -> list[tuple[int, int, int]]:
    """(stratum, file, document) of the documents that a source draws in a cycle; a tail is not drawn again."""
    has_tail = manifest_of(line, cycle)["sources"][name]["tail_in"] is not None
    table = table_of(line, cycle, name)[int(has_tail) :]
    return [(int(entry["stratum"]), int(entry["file"]), int(entry["document"])) for entry in table]


def drawn_documents(line: DataLine, name: str, cycles: int) -> Iterator[tuple[int, int, int, int]]:
    """Every document that a source draws in cycles 1 ... cycles, in order: (cycle, stratum, file, document)."""
    for cycle in range(1, cycles + 1):
        for stratum, file, document in documents_in(line, name, cycle):
            yield cycle, stratum, file, document


class PlainText:
    """The encoding by another way than the code's: a tokenizer without any added token, markers put back by hand."""

    def __init__(self, tokenizer: Path) -> None:
        definition = json.loads(tokenizer.read_bytes())
        self._library = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": []}))

    def document(self, text: str) -> list[int]:
        """A document's ids and EOS."""
        return [*self._library.encode(text, add_special_tokens=False).ids, EOS]


MASK = (1 << 64) - 1


def reference_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_permutation(key: bytes, n: int) -> list[int]:
    a, b, c, d = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8, 16, 24))

    def hashed(counter: int) -> int:
        x = reference_mix((counter * 0x9E3779B97F4A7C15 + a) & MASK) ^ b
        return reference_mix((reference_mix(x) + c) & MASK) ^ d

    return sorted(range(n), key=lambda i: (hashed(i), i))


def is_held_out(text: str, name: str, include: Sequence[str], exclude: Sequence[str], share: float) -> bool:
    """Invariant 5 from its words: a keyed hash of the text below the share of 2^64."""
    identity = json.dumps(["source", "local", name, list(include), list(exclude), None], separators=(",", ":"))
    key = hashlib.blake2b(identity.encode(), digest_size=32).digest()
    digest = hashlib.blake2b(text.encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big") < Fraction(str(share)) * 2**64


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def prepared(line: DataLine) -> dict[str, bytes]:
    """What preparing gave: manifests and cycles, byte for byte."""
    parts = {name: contents(line.work / name) for name in ("manifests", "cycles")}
    return {f"{part}/{name}": data for part, files in parts.items() for name, data in files.items()}


def environment(**variables: str) -> dict[str, str]:
    """The environment of a Python child that imports this nstrain."""
    return {**os.environ, "PYTHONPATH": str(Path(nstrain.__file__).parents[1]), **variables}


def start_preparer(
    work: Path,
    *arguments: str,
    retry_s: float = 0.1,
    limit_bytes: int | None = None,
    pass_fds: Sequence[int] = (),
    workers: int = 0,
    **variables: str,
) -> subprocess.Popen[str]:
    """The preparer as the process that the supervisor starts, but alone and quick to try a full disk again.

    `limit_bytes` is the size beyond which its files cannot grow (a soft limit: the test may lift it).
    """
    program = f"import sys, nstrain.data.preparer as p; p.DISK_RETRY_S = {retry_s}; "
    if limit_bytes is not None:
        program += f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({limit_bytes}, r.RLIM_INFINITY)); "
    program += "sys.exit(p.main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, str(work), "--workers", str(workers), *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        text=True,
    )
