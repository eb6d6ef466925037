"""The demo's text and tokenizer: what lies on every machine that has nstrain installed.

Four sources - the standard library, installed packages, their C++ headers, their type stubs - and a byte-level BPE
tokenizer of 8,192 ids trained on them, with the same 32 added tokens as the MiniCPM5 tokenizer in the same arrangement:
the first 22 ids, the last 10, `<think>` and `</think>` not marked special. C++ headers hold `#include <functional>` and
paths hold `/think...`, so the text does contain the characters of control tokens.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nstrain.base.errors import Refusal
from nstrain.data.globs import matcher

VOCABULARY = 8192
FIRST_ADDED = (
    *("<s>", "</s>", "<tool_call>", "</tool_call>", "<|im_sep|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<think>", "</think>", "<tool_response>", "</tool_response>", "<tools>", "</tools>", "<arguments>"),
    *("</arguments>", "<parameters>", "</parameters>", "<function", "</function>", "<param", "</param>"),
)
LAST_ADDED = (
    *("<|im_start|>", "<|im_end|>", "<unk>", "<|thought_begin|>", "<|thought_end|>", "<|tool_call|>"),
    *("<|execute_start|>", "<|execute_end|>", "/think", "/no_think"),
)
NOT_SPECIAL = ("<think>", "</think>")
EOS_ID = FIRST_ADDED.index("</s>")

PACKAGES = ("huggingface_hub", "matplotlib", "networkx", "numpy", "pydantic", "pygments", "rich", "torch")
"""Packages that come with the extra `run`, whose Python sources are one of the demo's sources."""

SAMPLE_BYTES = 12 << 20
"""Text the tokenizer is trained on: enough for 8,192 ids, a few seconds of work."""

_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # words, digits, signs, spaces
)


def demo_sources() -> list[dict[str, Any]]:
    """The demo's recipe entries, with the directories of this Python. Raises `Refusal` if there is too little."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec("torch")  # found, not imported
    if spec is None or spec.origin is None:
        raise Refusal("torch is not installed; pip install -e '.[run]'")
    packages = Path(spec.origin).parent.parent
    common = {"kind": "local", "held_out": 0.06}
    return [
        {
            **common,
            "name": "stdlib",
            "path": str(stdlib),
            "include": ["**/*.py"],
            "exclude": ["site-packages/**", "dist-packages/**", "test/**", "**/__pycache__/**", "pydoc_data/**"],
            "stratum": {"by": "directory", "depth": 1},
            "share": 2,
        },
        {
            **common,
            "name": "packages",
            "path": str(packages),
            "include": [f"{name}/**/*.py" for name in PACKAGES],
            "exclude": ["**/tests/**", "**/test/**", "torch/testing/**"],
            "stratum": {"by": "directory", "depth": 1},
            "share": 1,
        },
        {
            **common,
            "name": "headers",
            "path": str(packages / "torch" / "include"),
            "include": ["**/*.h"],
            "stratum": {"by": "directory", "depth": 1},
            "share": 4,
        },
        {
            **common,
            "name": "stubs",
            "path": str(packages),
            "include": ["torch/**/*.pyi", "numpy/**/*.pyi", "matplotlib/**/*.pyi", "tokenizers/**/*.pyi"],
            "stratum": {"by": "directory", "depth": 1},
            "share": 1,
        },
    ]


def sample_text() -> Iterator[str]:
    """The text the tokenizer is trained on: every source's files in the order of their paths, evenly thinned."""
    sources = demo_sources()
    for source in sources:
        root = Path(source["path"])
        included, excluded = matcher(source["include"]), matcher(source.get("exclude", ()))
        paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in (".py", ".h", ".pyi"))
        files = [root / path for path in paths if included(path) and not excluded(path)]
        budget = SAMPLE_BYTES // len(sources)
        every = max(1, sum(file.stat().st_size for file in files) // budget)
        for file in files[::every]:
            yield file.read_bytes().decode("utf-8", errors="ignore")


def train_tokenizer() -> bytes:
    """Train the demo's tokenizer; returns its tokenizer.json, the same bytes for the same text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(LAST_ADDED),
        special_tokens=list(FIRST_ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_text(), trainer)
    tokenizer.add_special_tokens(list(LAST_ADDED))
    definition = json.loads(tokenizer.to_str())
    for token in definition["added_tokens"]:
        token["special"] = token["content"] not in NOT_SPECIAL
        token["normalized"] = False
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != VOCABULARY:
        raise Refusal(f"the text of this machine gives a tokenizer of {found} ids instead of {VOCABULARY}: too little")
    return json.dumps(definition, ensure_ascii=False).encode()
