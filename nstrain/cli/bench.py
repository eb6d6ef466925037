"""`nstrain bench`: the speed of a model on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nstrain.base.units import human_count
from nstrain.cli.common import table

if TYPE_CHECKING:
    from nstrain.bench import BenchResult


def register(root: typer.Typer) -> None:
    """Add the command to the program."""
    root.command("bench")(bench)


def bench(
    model: Annotated[str, typer.Option(help="A preset's name (nstrain model list).")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 4096,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 1,
    accum: Annotated[int, typer.Option(min=1, help="Micro-batches of an update.")] = 8,
    ac: Annotated[
        Literal["none", "dendritic", "all"], typer.Option(help="Layers whose activations are computed again.")
    ] = "none",
    updates: Annotated[int, typer.Option(min=1, help="Updates that are timed, after two to warm up.")] = 5,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where.")] = "cuda",
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU.")] = 1,
    eager: Annotated[bool, typer.Option("--eager", help="Operator by operator on a GPU, instead of graphs.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Also keep a moving average of the weights.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also time by kernel and the idle share.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Train a preset on random tokens and say how fast it is."""
    from nstrain.bench import BenchPlan
    from nstrain.bench import bench as run
    from nstrain.gpu.borrowed import borrowed_gpu, gpu_on

    plan = BenchPlan(model, seq_len, rows, accum, ac, updates, device, threads, eager=eager, ema=ema)
    with borrowed_gpu(gpu_on(device)):
        result = run(plan, profile, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(dataclasses.asdict(result) | {"share": result.share}, indent=2))
        return
    print(_drawn(result))


def _drawn(result: BenchResult) -> str:
    plan = result.plan
    lines = [
        ("tokens a second", f"{result.tokens_per_s:,.0f}"),
        ("update", f"{result.update_s:.3f} s of {result.tokens_per_update:,} tokens"),
        ("model TFLOP/s", f"{result.model_tflop_s:.1f}"),
        ("6 N TFLOP/s", f"{result.six_n_tflop_s:.1f}"),
    ]
    if result.peak_gib is not None:
        lines += [
            ("share of the card's product rate", f"{result.share:.1%} of {result.bf16_tflop_s:.0f} TFLOP/s"),
            ("peak memory", f"{result.peak_gib:.1f} GiB"),
        ]
    title = (
        f"{plan.model}, {human_count(result.parameters)} parameters, rows of {plan.row_tokens:,}: {plan.rows} x "
        f"{plan.accum}, recompute {plan.recompute}; {result.device}"
    )
    drawn = table(title, ("", "measured"), lines)
    if result.profile is None:
        return drawn
    kernels = [(k.name[:70], f"{k.ms:.1f}", f"{k.calls:,}", f"{k.share:.1%}") for k in result.profile.kernels[:24]]
    by_kernel = f"one update: {result.profile.span_ms:,.1f} ms, idle {result.profile.idle_share:.2%}"
    return drawn + "\n" + table(by_kernel, ("kernel", "ms", "calls", "share"), kernels)
