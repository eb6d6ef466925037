"""Where the hours of a whole line go: updates, validations with their probes, checkpoints, start and end.

    python benchmarks/line.py [--model ns-2b] [--directory DIR] [--json FILE]          on a GPU, about 6 minutes
    python benchmarks/line.py --model tiny-32k --device cpu --row-tokens 256 --batch 2048 --every 40 --updates 80

It makes a data line of this machine's own text (the demo's), a line on it, and runs that as `nstrain run --foreground`
does; what it prints is read from the line's own journal. The tokenizer is the demo's, filled up with ids that no text
uses to the vocabulary of the preset, so that the model is of its full size. Validations come after every so many
updates, of the rows that `nstrain new` gives a line; a run of weeks has one in a thousand updates, and the share that
it then takes is computed from the times measured here. Interrupted or terminated, it stops the line, which writes its
checkpoint, and prints what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from nstrain.base.disk import atomic_write  # noqa: E402
from nstrain.base.errors import ExitCode, Refusal  # noqa: E402
from nstrain.data.init import init_line, parse_recipe  # noqa: E402
from nstrain.data.line import DataLine  # noqa: E402
from nstrain.data.val import collect_held_out  # noqa: E402
from nstrain.demo_text import EOS_ID, demo_sources, train_tokenizer  # noqa: E402
from nstrain.line.paths import LinePaths  # noqa: E402
from nstrain.ops.new import new_line  # noqa: E402
from nstrain.record.journal import Journal  # noqa: E402
from nstrain.supervise.supervisor import run_foreground  # noqa: E402

SOURCES = ("stdlib", "headers")
"""Those of the demo's sources that have enough text for long rows."""
HELD_OUT_SHARE = 0.15
USUAL_EVERY = 1000
"""Updates between validations that a long line has (`nstrain new`; a short one has more of them)."""

LOG_LINES = 60
"""So many of the last lines of its log are shown if the line fails."""


def filled_tokenizer(vocabulary: int) -> bytes:
    """The demo's tokenizer with ids that no text uses, up to `vocabulary` of them."""
    definition = json.loads(train_tokenizer())
    known = definition["model"]["vocab"]
    # The library counts added tokens from the vocabulary's end on, but for those that the vocabulary has.
    known |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    known |= {f"<unused {number}>": number for number in range(len(known), vocabulary)}
    return json.dumps(definition, ensure_ascii=False).encode()


def make_line(place: Path, arguments: argparse.Namespace) -> Path:
    """A data line and a training line on it; the latter's directory."""
    from nstrain.train.model import model_cost

    config = model_cost(arguments.model, arguments.row_tokens).config
    tokenizer = place / "tokenizer.json"
    atomic_write(tokenizer, filled_tokenizer(int(config["vocab_size"])))
    sources = [source | {"held_out": HELD_OUT_SHARE} for source in demo_sources() if source["name"] in SOURCES]
    recipe = parse_recipe({"format": 1, "sources": sources}, place, "the benchmark's recipe")
    tokens = arguments.updates * arguments.batch
    init_line(place / "data", recipe, tokenizer, EOS_ID, tokens, cycles=1, unit_tokens=arguments.unit_tokens)
    collect_held_out(DataLine.open(place / "data"))
    line = place / "line"
    new_line(
        line,
        arguments.model,
        place / "data",
        1e-4,
        arguments.batch,
        row_tokens=arguments.row_tokens,
        micro_rows=arguments.rows,
        validation={"every_updates": arguments.every},
        # The first checkpoint and the last one, which are kept; 64 GB have no room for a third of ns-2b.
        checkpoints={"every_updates": None, "every_minutes": 1e6, "keep_last": 1},
        device=arguments.device,
    )
    return line


def measure(line: Path) -> tuple[ExitCode, dict[str, Any]]:
    """Run the line to its end, or until it is stopped; how it ended, and what it wrote.

    Raises `Refusal` if it did not come to a second update.
    """
    began = time.time()
    code = run_foreground(line)
    ended = time.time()
    log = LinePaths(line).run_log
    if code not in (ExitCode.DONE, ExitCode.STOPPED) and log.exists():
        print(*log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")  # the file goes with the line
    with Journal.open_for_reading(LinePaths(line).journal) as journal:
        return code, readings(list(journal.rows()), began, ended)


def readings(rows: Sequence[Mapping[str, Any]], began: float, ended: float) -> dict[str, Any]:
    """What a journal says of a run between two times. Raises `Refusal` if it says too little."""
    trained = [row for row in rows if "time/update_s" in row]
    validated = [row for row in rows if "time/validation_s" in row]
    if len(trained) < 2 or not validated:
        raise Refusal(f"nothing is known: the line came to {len(trained)} updates and {len(validated)} validations")
    walls = [float(row["time/wall"]) for row in rows]
    updates_s = [float(row["time/update_s"]) for row in trained]
    found: dict[str, Any] = {
        "updates": len(trained),
        "update_s": statistics.median(updates_s[1:]),
        "tokens_per_s": statistics.median(float(row["perf/tokens_per_s"]) for row in trained[1:]),
        "first_update_s": updates_s[0],
        "validations": [
            {name: float(row[f"time/{name}"]) for name in _VALIDATION if f"time/{name}" in row} for row in validated
        ],
        "start_s": walls[0] - began,
        "end_s": ended - walls[-1],
        "whole_s": ended - began,
    }
    between = walls[-1] - walls[0] - sum(updates_s) - sum(float(row["time/validation_s"]) for row in validated)
    if "time/update_s" in rows[0]:
        between += updates_s[0]
    if "time/validation_s" in rows[0]:
        between += float(rows[0]["time/validation_s"])
    last = found["validations"][-1]["validation_s"]
    return found | {"between_s": between, "share": last / (last + USUAL_EVERY * found["update_s"])}


_VALIDATION = ("validation_s", "validation_probe_s", "validation_long_s", "validation_ema_s")


def table(found: dict[str, Any]) -> str:
    """For people."""
    last = found["validations"][-1]
    lines = [
        ("an update, the median", f"{found['update_s']:.3f} s", f"{found['tokens_per_s']:,.0f} tokens/s"),
        ("the first update", f"{found['first_update_s']:.1f} s", ""),
        (
            "a validation, the last",
            f"{last['validation_s']:.2f} s",
            f"{found['share']:.3%} of it and {USUAL_EVERY:,} updates",
        ),
        ("- probing rows", f"{last['validation_probe_s']:.2f} s", ""),
        ("- long rows", f"{last.get('validation_long_s', 0.0):.2f} s", ""),
        (
            "between all updates",
            f"{found['between_s']:.2f} s",
            f"{found['between_s'] / found['whole_s']:.3%} of the whole",
        ),
        ("before the first row", f"{found['start_s']:.1f} s", ""),
        ("after the last row", f"{found['end_s']:.1f} s", ""),
        ("the whole", f"{found['whole_s']:.1f} s", f"{found['updates']} updates"),
    ]
    return "\n".join(f"{what:<24}{time_:>12}   {more}".rstrip() for what, time_, more in lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ns-2b", help="preset (default: ns-2b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--unit-tokens", type=int, default=32_768, help="length of the long rows (default: 32,768)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch (default: 4)")
    parser.add_argument("--batch", type=int, default=131_072, help="tokens of an update (default: 131,072)")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--every", type=int, default=12, help="updates between validations (default: 12)")
    parser.add_argument(
        "--directory", type=Path, help="where the lines are made, and removed (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, help="write the readings there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        code, found = measure(make_line(Path(place), arguments))
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(vars(arguments) | found, default=str, indent=1) + "\n")
    if code != ExitCode.DONE:
        print(f"it ended with exit code {int(code)}, {code.name.lower()}, before its schedule's end")
    sys.exit(int(code))


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        raise SystemExit(str(refusal)) from None
