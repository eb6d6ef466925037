"""`nstrain demo`: from this machine's own text to a trained line, in about five minutes on two CPU cores.

Four stages - tokenizer, data line, held-out rows, training line - each leaves its result whole or not at all, so the
same command goes on wherever it was interrupted, and to the same bytes. Then it trains, and shows what came of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from nstrain.base.commands import typed
from nstrain.base.disk import atomic_write
from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.data.val import ValidationRow, ValidationRows

UNIT_TOKENS = 1024
ROW_TOKENS = 256
TOKENS_PER_UPDATE = 2048
MICRO_ROWS = 8
CYCLES = 3
CYCLE_TOKENS = 327_680
"""Three cycles of these are 480 updates: two to three minutes of training on two cores."""
SEGMENT_UNITS = 40
"""One segment a cycle: rows are shuffled over all its documents. With the short cycles of a demo anything finer trains
on a few files at a time, and forgets the others."""
PEAK_RATE = 3e-3
FINAL_SHARE = 0.1
"""The rate at the schedule's end over the peak; not 0, so that the line can be extended."""
VALIDATION_ROWS = 32
PROBE_ROWS, LONG_ROWS = 8, 1
"""Probing a row costs a CPU as much as its loss: of some rows only, and one long row (of a unit) a source."""
HELD_OUT_TOKENS = 48 * UNIT_TOKENS


@dataclasses.dataclass(frozen=True)
class DemoPlaces:
    """What the demo makes in its directory."""

    root: Path

    @property
    def tokenizer(self) -> Path:
        """The trained tokenizer."""
        return self.root / "tokenizer" / "tokenizer.json"

    @property
    def data(self) -> Path:
        """The data line."""
        return self.root / "data"

    @property
    def line(self) -> Path:
        """The training line."""
        return self.root / "line"


@dataclasses.dataclass(frozen=True)
class SourceResult:
    """What the line made of one source's held-out rows, in nats a token."""

    source: str
    first_loss: float
    last_loss: float
    unigram_entropy: float


def run_demo(root: Path, say: Callable[[str], None]) -> ExitCode:
    """Make what is missing, train to the schedule's end, and show the result; returns the line's exit code.

    `say` prints a line for the reader. Raises `NstrainError` with a remedy if a stage cannot be done.
    """
    places = DemoPlaces(root)
    prepare_demo(places, say)
    from nstrain.line.paths import LinePaths
    from nstrain.ops.status import status
    from nstrain.record.journal import Journal
    from nstrain.record.plot import plot_line
    from nstrain.supervise.supervisor import run_foreground

    if status(places.line).state != "done":
        say(f"training {places.line}: Ctrl-C stops it with a checkpoint, the same command goes on")
        code = run_foreground(places.line)
        if code != ExitCode.DONE:
            return code
    else:
        say(f"{places.line} is done: it has trained every token of its schedule.")
    with Journal.open_for_reading(LinePaths(places.line).journal) as journal:
        picture = plot_line(journal, places.line / "curves.png", "the demo line")
        say(result_table(demo_results(places, list(journal.rows()))))
    say(_what_next(places, picture))
    return ExitCode.DONE


def prepare_demo(places: DemoPlaces, say: Callable[[str], None]) -> None:
    """The stages before training; each is skipped if its result is there."""
    if not places.tokenizer.exists():
        say("training a byte-level BPE tokenizer of 8,192 ids on this machine's Python sources and headers")
        from nstrain.demo_text import train_tokenizer

        places.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(places.tokenizer, train_tokenizer())
    if not (places.data / "line.json").exists():
        say("making the data line: every file is listed and hashed")
        _init_data(places)
    if not (places.data / "val" / "index.json").exists():
        say("gathering the held-out text")
        from nstrain.data.val import collect_held_out

        collect_held_out(DataLine.open(places.data), HELD_OUT_TOKENS)
    if not (places.line / "run.json").exists():
        say("making the training line (preset tiny-32k)")
        _new_line(places)


def _init_data(places: DemoPlaces) -> None:
    from nstrain.data.init import init_line, parse_recipe
    from nstrain.demo_text import EOS_ID, demo_sources

    recipe = parse_recipe({"format": 1, "sources": demo_sources()}, places.root, "the demo's recipe")
    init_line(
        places.data,
        recipe,
        places.tokenizer,
        EOS_ID,
        CYCLE_TOKENS,
        cycles=CYCLES,
        unit_tokens=UNIT_TOKENS,
        segment_units=SEGMENT_UNITS,
    )


def _new_line(places: DemoPlaces) -> None:
    from nstrain.ops.new import new_line

    new_line(
        places.line,
        "tiny-32k",
        places.data,
        PEAK_RATE,
        TOKENS_PER_UPDATE,
        row_tokens=ROW_TOKENS,
        micro_rows=MICRO_ROWS,
        warmup_tokens=CYCLES * CYCLE_TOKENS // 24,
        decay_tokens=CYCLES * CYCLE_TOKENS * 3 // 5,
        final_lr=FINAL_SHARE * PEAK_RATE,
        validation={
            "every_updates": 80,
            "rows_per_source": VALIDATION_ROWS,
            "probe_rows_per_source": PROBE_ROWS,
            "long_rows_per_source": LONG_ROWS,
        },
        checkpoints={"every_updates": 40, "every_minutes": None, "keep_last": 2},
        device="cpu",
    )


def unigram_entropy(rows: list[ValidationRow]) -> float:
    """Entropy in nats of the distribution of a source's held-out targets, weighted as its loss is.

    The least loss of any model that gives every position the same distribution: what a model that reads its context
    has to beat.
    """
    mass: Counter[int] = Counter()
    for row in rows:
        ids, counts = np.unique(row.tokens[1:], return_counts=True)
        for token, count in zip(ids.tolist(), counts.tolist(), strict=True):
            mass[token] += row.weight * count / (len(row.tokens) - 1)
    p = np.array([mass[token] for token in sorted(mass)])
    p /= p.sum()
    return float(-(p * np.log(p)).sum())


def demo_results(places: DemoPlaces, journal: Sequence[Mapping[str, float]]) -> list[SourceResult]:
    """First and last validation of each source and of the mix, beside the unigram entropy of the same rows."""
    line = DataLine.open(places.data)
    key = f"val_{ROW_TOKENS}/"
    validated = [row for row in journal if key + "mix" in row]
    first, last = validated[0], validated[-1]
    rows = ValidationRows.open(line, ROW_TOKENS, VALIDATION_ROWS).rows
    entropy = {s: unigram_entropy([row for row in rows if row.source == s]) for s in line.source_names}
    plan = line.cycle_plan(int(last["cycle"]))
    shares = dict(zip(plan.sources, plan.shares, strict=True))
    entropy["mix"] = sum(shares[s] * entropy[s] for s in shares) / sum(shares.values())
    return [SourceResult(s, float(first[key + s]), float(last[key + s]), entropy[s]) for s in entropy]


def result_table(results: list[SourceResult]) -> str:
    """The results as a table."""
    lines = [
        f"{'validation loss (nats a token)':<32}{'before':>9}{'after':>9}{'unigram entropy':>18}{'below it':>10}",
    ]
    for r in results:
        below = r.unigram_entropy - r.last_loss
        lines.append(f"  {r.source:<30}{r.first_loss:>9.3f}{r.last_loss:>9.3f}{r.unigram_entropy:>18.3f}{below:>10.3f}")
    return "\n".join(lines)


def _what_next(places: DemoPlaces, picture: Path) -> str:
    line, data = places.line, places.data
    return f"""
the curves: {picture}

look further:
  {typed("nstrain", "status", line)}
  {typed("nstrain", "journal", line)} --format csv
  {typed("nstrain", "generate", line)} --prompt "def "
extend it by two cycles and go on (at the rate it ended with):
  {typed("nstrain", "data", "extend", "--work", data)} --cycles 2
  {typed("nstrain", "run", line)} --foreground"""
