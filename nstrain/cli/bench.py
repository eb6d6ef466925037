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
    from nstrain.train.profile import Profile

KERNELS = 24
"""As many are shown by name, the longest first; --json has all."""


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
    profile: Annotated[
        bool, typer.Option("--profile", help="On a GPU: also time by operator and by kernel, and the idle share.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Train a preset on random tokens and say how fast it is."""
    from nstrain.bench import BenchPlan, refuse_unfit
    from nstrain.bench import bench as run
    from nstrain.gpu.borrowed import borrowed_gpu
    from nstrain.gpu.readings import gpu_on

    plan = BenchPlan(model, seq_len, rows, accum, ac, updates, device, threads, eager=eager, ema=ema)
    refuse_unfit(plan, profile)
    with borrowed_gpu(gpu_on(device)) as gpu:  # the one place that takes it: a lease is not taken twice
        result = run(plan, profile, lambda line: print(line, file=sys.stderr, flush=True), gpu)
    if as_json:
        print(json.dumps(dataclasses.asdict(result) | {"share": result.share}, indent=2))
        return
    print(_drawn(result))


def _drawn(result: BenchResult) -> str:
    plan = result.plan
    lines = [
        ("tokens a second", f"{result.tokens_per_s:,.0f}"),
        ("update", f"{result.update_s:.3f} s of {result.tokens_per_update:,} tokens"),
        ("model TFLOP/s", _three_digits(result.model_tflop_s)),
        ("6 N TFLOP/s", _three_digits(result.six_n_tflop_s)),
    ]
    if result.peak_gib is not None:
        lines += [
            ("share of the card's product rate", f"{result.share:.1%} of {result.bf16_tflop_s:.0f} TFLOP/s"),
            ("the card's copy rate", f"{result.copy_tb_s:.2f} TB/s, read and written"),
            ("peak memory", f"{result.peak_gib:.1f} GiB"),
        ]
    title = (
        f"{plan.model}, {human_count(result.parameters)} parameters, rows of {plan.row_tokens:,}: {plan.rows} x "
        f"{plan.accum}, recompute {plan.recompute}; {result.device}"
    )
    drawn = table(title, ("", "measured"), lines)
    if result.profile is None:
        return drawn
    return "\n".join((drawn, *_profile_tables(result.profile)))


def _three_digits(rate: float) -> str:
    """A rate to three digits, one above 1,000 to all before the point: `0.0560`, `61.2`, `1,024`."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:#.3g}"


def _profile_tables(profile: Profile) -> tuple[str, str]:
    operators = [(o.operator, f"{o.ms:.1f}", f"{o.calls:,}", f"{o.share:.2%}") for o in profile.operators]
    kernels = [
        (k.name[:60], k.operator, f"{k.ms:.1f}", f"{k.calls:,}", f"{k.share:.2%}") for k in profile.kernels[:KERNELS]
    ]
    more = f", the longest {KERNELS} of {len(profile.kernels)}" if len(profile.kernels) > KERNELS else ""
    return (
        table(
            f"one update by operator: {profile.span_ms:,.1f} ms, idle {profile.idle_share:.2%}",
            ("operator", "ms", "kernels", "share"),
            operators,
        ),
        table(f"by kernel{more}", ("kernel", "operator", "ms", "calls", "share"), kernels),
    )
