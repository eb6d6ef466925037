"""Whole updates of NeuronSpark beside a compiled Llama of its size, on one GPU; the table of docs/reference.

    python benchmarks/engine.py [--budget-s 470] [--out DIR] [--only ns-2b@4096 ...] [--list]

Every line is a process of its own: `nstrain.bench` for ours - the card's ceilings, then an engine of graphs as the
trainer makes it, then one more update under the profiler - and benchmarks/peers.py for the Llama: torch.compile,
autocast and torch's fused AdamW, with the head's loss ours. Each borrows the GPU first, as `nstrain bench` does. Shapes
are those that fit 140 GB with room to spare (ns-2b takes 2.6 MB of activations a token, and 18 bytes a parameter beside
them); one that runs out of memory is tried again with more recomputation. A line that fails says why and the others go
on. What there is no time for within the budget is not begun, so the most important lines come first.

Predictions, made before the first run (operators' times of docs/reference/performance.md):
- ours at 4096: 514 model TFLOP/s, as ns-2b had;
- ours with 8 rows a micro-batch instead of 4, fewer and larger kernels: the gaps between them 0.45 % (ns-2b) and
  0.6 % (ns-1p3b) of an update instead of 0.87 and 1.15, and as much faster;
- ours at 32,768: the same and the pool's reads of 8 layers longer by 534 ms for 32,768 tokens of ns-2b;
- the Llama at 4096: 336 TFLOP/s by 6 N, as the one of 1.74B; at 32,768 its further attention at 400 TFLOP/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEAST_S = 40.0
"""A line is not begun with less time than this left."""


@dataclasses.dataclass(frozen=True)
class Line:
    """What one process measures; `shapes` are tried in their order until one fits."""

    model: str
    row_tokens: int
    shapes: tuple[tuple[int, int, str], ...]
    """(rows of a micro-batch, micro-batches of an update, what is recomputed)."""
    predicted: float | None
    """Tokens a second."""
    beside: str | None = None
    """Of a peer: the model it stands beside."""
    device: str = "cuda"

    @property
    def name(self) -> str:
        """As --only takes it."""
        return f"{self.model}@{self.row_tokens}"


SHORT = ((8, 2, "none"), (4, 4, "none"), (2, 8, "none"))
LONG = ((1, 2, "none"), (1, 2, "dendritic"), (1, 2, "all"))
PLAIN_LONG = ((1, 2, "none"),)
LINES = (
    Line("ns-2b", 4096, SHORT, 39_500),
    Line("llama-2b", 4096, SHORT, 27_400, beside="ns-2b"),
    Line("ns-1p3b", 4096, SHORT, 60_700),
    Line("llama-1p3b", 4096, SHORT, 42_000, beside="ns-1p3b"),
    Line("ns-2b", 32_768, LONG, 24_000),
    Line("llama-2b", 32_768, PLAIN_LONG, 16_800, beside="ns-2b"),
    Line("ns-1p3b", 32_768, LONG, 33_900),
    Line("llama-1p3b", 32_768, PLAIN_LONG, 24_200, beside="ns-1p3b"),
)


def command(line: Line, shape: tuple[int, int, str], updates: int) -> list[str]:
    """The process that measures a line in one shape and prints JSON last."""
    rows, accum, recompute = shape
    if line.beside is None:
        plan = {"model": line.model, "row_tokens": line.row_tokens, "rows": rows, "accum": accum}
        plan |= {"recompute": recompute, "updates": updates, "device": line.device}
        return [sys.executable, str(HERE / "engine.py"), "--child", json.dumps(plan)]
    options = {"preset": line.model, "seq-len": line.row_tokens, "rows": rows, "accum": accum, "updates": updates}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    compiled = [] if line.device == "cuda" else ["--device", line.device, "--no-compile"]
    return [sys.executable, str(HERE / "peers.py"), *flags, *compiled, "--json"]


def child(plan: dict[str, Any]) -> None:
    """Measure one of ours, here, and print it."""
    sys.path.insert(0, str(HERE.parent))
    from nstrain.settings.host import enter_host

    enter_host()  # before torch is imported
    from nstrain.bench import BenchPlan, bench
    from nstrain.gpu.borrowed import borrowed_gpu
    from nstrain.gpu.readings import gpu_on

    with borrowed_gpu(gpu_on(plan["device"])) as gpu:
        result = bench(BenchPlan(**plan), gpu is not None, lambda said: print(said, flush=True), gpu)
    print(json.dumps(dataclasses.asdict(result) | {"share": result.share}))


def run(arguments: Sequence[str], limit_s: float, log: Path) -> tuple[dict[str, Any] | None, str]:
    """Run a process for `limit_s` at most: (the JSON that it printed last, "") or (None, why there is none)."""
    with log.open("ab") as output:
        at = output.tell()
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_bytes()[at:].decode(errors="replace").strip().splitlines()
    if code == 0:
        for text in reversed(said):  # libraries may have a last word
            if text.startswith("{"):
                found: dict[str, Any] = json.loads(text)
                return found, ""
        return None, "it ended without a result"
    if code is None:
        return None, f"not done after {limit_s:.0f} s; last said: {said[-1] if said else 'nothing'}"
    errors = [text for text in said if "Error" in text or "out of memory" in text] or said[-1:] or ["nothing was said"]
    return None, f"exit code {code}: {errors[-1][:300]}"


def measured(line: Line, deadline: float, updates: int, directory: Path) -> dict[str, Any]:
    """A line's result, or why there is none, in the first shape that fits."""
    why = "no time left"
    for shape in line.shapes:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            break
        began = time.monotonic()
        log = directory / f"{line.model}-{line.row_tokens}.log"
        found, why = run(command(line, shape, updates), left, log)
        tell = f"{line.name}, {shape[0]} x {shape[1]} rows, recompute {shape[2]}: {time.monotonic() - began:.0f} s"
        print(f"{tell}{'' if found else ' - ' + why}", flush=True)
        if found is not None:
            return {"line": line.name, "shape": shape, "predicted": line.predicted, "found": found}
        if "memory" not in why.lower():
            break
    return {"line": line.name, "predicted": line.predicted, "failed": why}


HEADS = (
    "model", "rows of", "micro x accum", "recompute", "parameters", "tokens/s", "predicted", "6N TFLOP/s",
    "model TFLOP/s", "ceiling", "share", "copy TB/s", "peak GiB", "idle", "6N / peer's",
)  # fmt: skip


def table(lines: Sequence[Line], results: dict[str, dict[str, Any]]) -> str:
    """All lines as one table in Markdown; a missing number is empty, a failed line says why."""
    peers = {(line.beside, line.row_tokens): line.name for line in lines if line.beside}
    rows = [HEADS, tuple("---" for _ in HEADS)]
    for line in lines:
        result = results.get(line.name, {"failed": "not asked for"})
        found = result.get("found")
        if found is None:
            rows.append((line.model, f"{line.row_tokens:,}", result["failed"], *[""] * (len(HEADS) - 3)))
            continue
        peer = results.get(peers.get((line.model, line.row_tokens), ""), {}).get("found")
        profile = found.get("profile")
        micro, accum, recompute = result["shape"]
        rows.append(
            (
                line.model if line.beside is None else f"{line.model}, compiled",
                f"{line.row_tokens:,}",
                f"{micro} x {accum}",
                recompute,
                f"{found['parameters'] / 1e9:.2f}B",
                f"{found['tokens_per_s']:,.0f}",
                "" if line.predicted is None else f"{line.predicted:,.0f}",
                f"{found['six_n_tflop_s']:.0f}",
                f"{found['model_tflop_s']:.0f}",
                number(found.get("bf16_tflop_s"), ".0f"),
                number(found.get("share"), ".1%"),
                number(found.get("copy_tb_s"), ".2f"),
                number(found.get("peak_gib"), ".1f"),
                number(profile and profile["idle_share"], ".2%"),
                "" if peer is None else f"{found['six_n_tflop_s'] / peer['six_n_tflop_s']:.2f}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: float | None, form: str) -> str:
    """A number, or nothing."""
    return "" if value is None else format(value, form)


def operators(results: dict[str, dict[str, Any]]) -> str:
    """Where ours spend an update: by operator, then by kernel."""
    parts = []
    for name, result in results.items():
        profile = (result.get("found") or {}).get("profile")
        if profile:
            parts.append(f"{name}: one update, {profile['span_ms']:,.0f} ms")
            parts += [_spent(of, of["operator"]) for of in profile["operators"]]
            parts.append("by kernel:")
            parts += [_spent(of, f"{of['name'][:80]} ({of['operator']})") for of in profile["kernels"][:16]]
    return "\n".join(parts)


def _spent(of: dict[str, Any], name: str) -> str:
    return f"  {of['ms']:9.1f} ms {of['share']:7.2%} {of['calls']:6,} {name}"


def main(arguments: Sequence[str] | None = None, lines: Sequence[Line] = LINES) -> int:
    """Measure all lines and print the table; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=470.0, help="seconds for everything")
    parser.add_argument("--updates", type=int, default=3, help="timed in each line, after two to warm up")
    parser.add_argument("--out", type=Path, help="directory for results.json and what the processes printed")
    parser.add_argument("--only", nargs="+", metavar="MODEL@LENGTH", help="these lines")
    parser.add_argument("--list", action="store_true", help="print the lines' names")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        child(json.loads(asked.child))
        return 0
    if asked.list:
        print("\n".join(line.name for line in lines))
        return 0
    unknown = set(asked.only or ()) - {line.name for line in lines}
    if unknown:
        parser.error(f"--only: no line is called {', '.join(sorted(unknown))}; --list shows them")
    deadline = time.monotonic() + asked.budget_s
    directory = asked.out or Path(tempfile.mkdtemp(prefix="nstrain-engine-"))
    directory.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    chosen = [line for line in lines if not asked.only or line.name in asked.only]
    for line in chosen:
        results[line.name] = measured(line, deadline, asked.updates, directory)
        # Kept as it comes: whoever ends this process has what was measured before.
        (directory / "results.json").write_text(json.dumps(results))
    print(f"\n{table(chosen, results)}\n\n{operators(results)}\n\nresults and logs: {directory}")
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
