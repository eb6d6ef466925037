"""`nstrain model list | show` and `nstrain generate`: what models there are, and what trained weights write."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nstrain.base.units import human_count
from nstrain.cli.common import progress_bars, resolve, table

if TYPE_CHECKING:
    from nstrain.train.model import ModelCost, PartCost

app = typer.Typer(help="Models: sizes and costs.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RowTokens = Annotated[int, typer.Option(min=1, help="Row length that FLOPs are counted at.")]


def register(root: typer.Typer) -> None:
    """Add the commands to the program."""
    root.add_typer(app, name="model")
    root.command("generate")(generate)


@app.command("list")
def list_presets(row_tokens: RowTokens = 4096, as_json: AsJson = False) -> None:
    """The presets, with their parameters and FLOPs a token."""
    from nstrain.ops.model_show import describe_presets

    presets = describe_presets(row_tokens)
    if as_json:
        print(json.dumps({name: dataclasses.asdict(cost) for name, cost in presets.items()}, indent=2))
        return
    rows = [
        (
            name,
            human_count(cost.parameters),
            human_count(cost.flops_per_token),
            f"{cost.config['vocab_size']:,}",
            f"{cost.config['rope_max_seq_len']:,}",
        )
        for name, cost in presets.items()
    ]
    print(table("model presets", ("preset", "parameters", "FLOPs a token", "vocabulary", "longest row"), rows))


@app.command("show")
def show(
    preset: Annotated[str, typer.Argument(help="A preset's name, or a configuration's JSON file.", metavar="PRESET")],
    row_tokens: RowTokens = 4096,
    as_json: AsJson = False,
) -> None:
    """A model's parameters and FLOPs a trained token, by part and by optimizer group."""
    from nstrain.ops.model_show import describe_model

    cost = describe_model(preset, row_tokens)
    if as_json:
        print(json.dumps(dataclasses.asdict(cost), indent=2))
        return
    print(_by_part(preset, cost))
    groups = [
        (group, f"{parameters:,}", f"{parameters / cost.parameters:.1%}") for group, parameters in cost.groups.items()
    ]
    print(table("by optimizer group", ("group", "parameters", "share"), groups))


def _by_part(preset: str, cost: ModelCost) -> str:
    """A table with one line for all parts that are alike."""
    alike: dict[PartCost, list[str]] = {}
    for part, of in cost.parts.items():
        alike.setdefault(of, []).append(part)
    rows = []
    for of, parts in alike.items():
        parameters, flops = of.parameters * len(parts), of.flops_per_token * len(parts)
        rows.append(
            (
                of.kind if len(parts) == 1 else f"{of.kind} x {len(parts)}",
                f"{of.parameters:,}",
                f"{parameters:,}",
                f"{parameters / cost.parameters:.1%}",
                human_count(flops),
                f"{flops / cost.flops_per_token:.1%}",
            )
        )
    rows.append(("all", "", f"{cost.parameters:,}", "", human_count(cost.flops_per_token), ""))
    title = f"{preset}: {human_count(cost.parameters)} parameters, {human_count(cost.flops_per_token)} FLOPs a token"
    heads = ("part", "parameters each", "parameters", "share", "FLOPs a token", "share")
    return table(f"{title} in rows of {cost.row_tokens:,}", heads, rows)


def generate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A training line (its newest checkpoint), a checkpoint, or a .safetensors file.", metavar="CKPT"
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue: the beginning of a document.")],
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most; the document's end ends it earlier.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many of the most probable tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Keys the draws: one seed, one text.")] = 0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model runs.")] = "cpu",
    data: Annotated[
        str | None, typer.Option(help="A data line whose tokenizer is used (default: the weights' own).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with trained weights: a smoke test. Prints the continuation."""
    from nstrain.ops.generate import generate as continue_prompt

    with progress_bars() as bar:
        made = continue_prompt(
            resolve(checkpoint),
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            device=device,
            data=None if data is None else resolve(data),
            on_token=lambda done: bar.show("generating", done / tokens, f"{done} tokens"),
        )
    print(json.dumps(made.to_json(), indent=2) if as_json else made.text)
