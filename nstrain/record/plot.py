"""A line's curves as one picture: loss, validation loss, learning rate and gradient norm over tokens."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from nstrain.base.disk import atomic_write
from nstrain.base.errors import Refusal
from nstrain.base.units import human_count
from nstrain.record.journal_reader import JournalReader

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING_SHARE = 0.05
"""The smoothed curves average over this share of the updates."""

SOURCE_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#994455", "#004488", "#bbbbbb",
)  # fmt: skip
"""Paul Tol's scheme "bright" (https://personal.sron.nl/~pault/), then some of his "medium-contrast"."""

DARK, LIGHT, MUTED, GRID, WARN = "#1b2a41", "#9db4d0", "#8a94a3", "#e6e9ee", "#cc3311"


@dataclasses.dataclass
class Curve:
    """Values over tokens."""

    tokens: list[float] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)

    def add(self, tokens: float, value: float) -> None:
        self.tokens.append(tokens)
        self.values.append(value)


@dataclasses.dataclass
class Curves:
    """What the picture shows of a journal."""

    loss: Curve = dataclasses.field(default_factory=Curve)
    learning_rate: Curve = dataclasses.field(default_factory=Curve)
    grad_norm: Curve = dataclasses.field(default_factory=Curve)
    skipped_tokens: list[float] = dataclasses.field(default_factory=list)
    """Positions of updates that were skipped."""
    validation: dict[str, dict[str, Curve]] = dataclasses.field(default_factory=dict)
    """By row length (the text between `val_` and the slash), then by source, `mix` and `mean`."""
    last_tokens: float = 0
    last_update: float = 0


def collect(journal: JournalReader) -> Curves:
    """The curves of the lineage's rows. Values that are not finite are left out; a skipped update is marked."""
    curves = Curves()
    singles = {
        "train/loss": curves.loss,
        "train/learning_rate": curves.learning_rate,
        "train/grad_norm": curves.grad_norm,
    }
    for row in journal.rows():
        tokens = row["tokens"]
        curves.last_tokens, curves.last_update = tokens, row["update"]
        if row.get("skipped"):
            curves.skipped_tokens.append(tokens)
        for name, value in row.items():
            if not math.isfinite(value):
                continue
            if name in singles:
                singles[name].add(tokens, value)
            elif name.startswith("val_") and name.count("/") == 1:
                length, what = name.removeprefix("val_").split("/")
                curves.validation.setdefault(length, {}).setdefault(what, Curve()).add(tokens, value)
    return curves


def smooth(values: list[float]) -> list[float]:
    """A moving average that does not lag: centred, narrower where the curve begins, and cut off where it ends."""
    reach = round(SMOOTHING_SHARE * len(values) / 2)
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for i in range(len(values)):
        begin, end = i - min(i, reach), min(i + min(i, reach) + 1, len(values))
        smoothed.append((sums[end] - sums[begin]) / (end - begin))
    return smoothed


def plot_line(journal: JournalReader, png_path: Path, name: str | None = None) -> Path:
    """Draw a line's curves into a PNG, replacing it as a whole; returns its path.

    `name` is the title (default: the name of the journal's directory). Raises `Refusal` if matplotlib is missing or
    the journal is empty.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise Refusal("a plot needs matplotlib: pip install 'matplotlib>=3.8'") from None
    with journal.snapshot():
        curves = collect(journal)
    if journal.last_row() is None:
        raise Refusal(f"{journal.path}: no update is recorded yet, so there is nothing to plot")
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches
    # A figure without pyplot: nothing global, no display, drawn by the Agg backend because a PNG is asked for.
    figure = Figure(figsize=(12.5, 8.0), dpi=110, layout=layout, facecolor="white")
    (loss, validation), (learning_rate, grad_norm) = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    _draw_loss(loss, curves)
    _draw_validation(validation, curves)
    learning_rate.plot(curves.learning_rate.tokens, curves.learning_rate.values, color=DARK, linewidth=1.6)
    _dress(learning_rate, "learning rate", curves, from_zero=True)
    _draw_grad_norm(grad_norm, curves)
    for axes in (learning_rate, grad_norm):
        axes.set_xlabel("tokens", fontsize=10, color=DARK)
    title = name or journal.path.resolve().parent.name
    figure.suptitle(
        f"{title}   ·   update {curves.last_update:,.0f}   ·   {human_count(curves.last_tokens)} tokens",
        x=0.012, ha="left", fontsize=14, fontweight="bold", color=DARK,
    )  # fmt: skip
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name that the font lacks is drawn as boxes
        figure.savefig(picture, format="png")
    atomic_write(png_path, picture.getvalue())
    return png_path


def _draw_loss(axes: Axes, curves: Curves) -> None:
    loss = curves.loss
    axes.plot(loss.tokens, loss.values, color=LIGHT, linewidth=0.8, label="each update")
    axes.plot(loss.tokens, smooth(loss.values), color=DARK, linewidth=1.8, label="smoothed")
    if curves.skipped_tokens:
        axes.plot(
            curves.skipped_tokens, [0.98] * len(curves.skipped_tokens), linestyle="none", marker="v", color=WARN,
            clip_on=False, transform=axes.get_xaxis_transform(), label=f"{len(curves.skipped_tokens)} skipped",
        )  # fmt: skip
    _dress(axes, "training loss (nats a token)", curves, legend=bool(loss.values))


def _draw_validation(axes: Axes, curves: Curves) -> None:
    """Sources in colours, the mix of them in black; row lengths, if there are several, by line style."""
    sources = sorted({what for by_source in curves.validation.values() for what in by_source} - {"mix", "mean"})
    styles = ("-", "--", "-.", ":")
    for i, length in enumerate(sorted(curves.validation, key=lambda text: (len(text), text))):
        suffix = f" ({length})" if len(curves.validation) > 1 else ""
        for what, curve in sorted(curves.validation[length].items(), key=lambda item: (item[0] == "mix", item[0])):
            if what == "mean":
                continue
            mix = what == "mix"
            axes.plot(
                curve.tokens, curve.values, linestyle=styles[i % len(styles)], marker="o",
                markersize=3.5 if mix else 2.5, linewidth=2.2 if mix else 1.3,
                color="black" if mix else SOURCE_COLOURS[sources.index(what) % len(SOURCE_COLOURS)],
                label=f"{what}{suffix}  {curve.values[-1]:.3f}",
            )  # fmt: skip
    _dress(axes, "validation loss (nats a token)", curves, legend=bool(curves.validation))


def _draw_grad_norm(axes: Axes, curves: Curves) -> None:
    norm = curves.grad_norm
    axes.plot(norm.tokens, norm.values, color=LIGHT, linewidth=0.8)
    axes.plot(norm.tokens, smooth(norm.values), color=DARK, linewidth=1.6)
    if any(value > 0 for value in norm.values):
        axes.set_yscale("log")
    _dress(axes, "gradient norm (before clipping)", curves)


def _dress(axes: Axes, title: str, curves: Curves, legend: bool = False, from_zero: bool = False) -> None:
    """What the panels have in common."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_title(title, loc="left", fontsize=11, color=DARK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(which="both", colors=MUTED, labelcolor=DARK, labelsize=9)
    span = curves.last_tokens
    axes.set_xlim(-0.01 * (span or 1.0), 1.01 * span + (0 if span else 0.01))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: human_count(tokens)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True) if span else FixedLocator([0]))
    if not axes.lines or axes.dataLim.width < 0:  # an empty curve leaves the limits inside out
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    if from_zero:
        axes.set_ylim(bottom=0)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if legend:
        axes.legend(frameon=False, fontsize=9, loc="upper right", labelcolor=DARK)
