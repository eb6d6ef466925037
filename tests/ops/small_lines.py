"""A data line small enough for a test: two sources of made-up prose, a tokenizer of 600 tokens, three cycles."""

from __future__ import annotations

import random
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nstrain.data.init import Recipe, init_line
from nstrain.data.line import DataLine
from nstrain.data.val import collect_held_out
from nstrain.line.paths import LinePaths
from nstrain.ops.new import new_line
from nstrain.settings.model import validate

UNIT_TOKENS = 128
CYCLE_TOKENS = 32 * UNIT_TOKENS
CYCLES = 3
ROW_TOKENS = 64
UPDATE_TOKENS = 8 * ROW_TOKENS

_WORDS = ("the", "of", "a", "neuron", "releases", "quanta", "when", "its", "potential", "passes", "rests", "rows", "go")


def write_texts(directory: Path, name: str, files: int = 60) -> None:
    """Files of prose, the same for one name, in two directories that become strata."""
    draw = random.Random(name)
    for number in range(files):
        path = directory / name / ("even", "odd")[number % 2] / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(draw.choice(_WORDS) for _ in range(400)) + f"\n{number}\n")


def write_tokenizer(path: Path, texts: Path) -> int:
    """Train a byte-level BPE tokenizer on the texts; returns the id of its end-of-document token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted(texts.rglob("*.txt"))], trainer)
    tokenizer.save(str(path))
    return int(tokenizer.token_to_id("</s>"))


def make_data_line(directory: Path, cycles: int | None = CYCLES, held_out_rows: bool = True) -> DataLine:
    """A data line in directory/data, with held-out rows unless told otherwise, and nothing prepared."""
    for name in ("prose", "verse"):
        write_texts(directory / "texts", name)
    eos_id = write_tokenizer(directory / "tokenizer.json", directory / "texts")
    sources = [
        {
            "share": share,
            "name": name,
            "kind": "local",
            "path": str(directory / "texts" / name),
            "include": ["**/*.txt"],
            "held_out": 0.2,
        }
        for name, share in (("prose", 3), ("verse", 1))
    ]
    recipe = validate(Recipe, {"format": 1, "sources": sources}, "the test's recipe")
    line = init_line(
        directory / "data",
        recipe,
        directory / "tokenizer.json",
        eos_id,
        CYCLE_TOKENS,
        cycles,
        UNIT_TOKENS,
        open_files=1,
    )
    if held_out_rows:
        collect_held_out(line, tokens_per_source=8 * UNIT_TOKENS)
    return line


def make_small_line(directory: Path, cycles: int | None = CYCLES) -> LinePaths:
    """A new training line `small` in directory/run on a data line in directory/data: eight updates a cycle."""
    data = make_data_line(directory, cycles)
    new_line(
        directory / "run",
        "tiny-32k",
        data.work,
        1e-3,
        UPDATE_TOKENS,
        row_tokens=ROW_TOKENS,
        threads=1,
        device="cpu",
        validation={"every_updates": 8, "rows_per_source": 2},
        checkpoints={"every_updates": 4},
        line_id="small",
    )
    return LinePaths(directory / "run")
