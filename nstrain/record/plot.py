"""A line's curves as one picture: loss, validation loss, learning rate and gradient norm over tokens."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nstrain.base.disk import atomic_write
from nstrain.base.errors import Refusal
from nstrain.base.units import human_count
from nstrain.record.journal_reader import PARENTS_GENERATION, JournalReader

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING_SHARE = 0.05
"""The smoothed curves average over this share of the updates."""

SOURCE_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#994455", "#004488", "#bbbbbb",
)  # fmt: skip
"""Paul Tol's scheme "bright" (https://personal.sron.nl/~pault/), then some of his "medium-contrast"."""

SOURCE_MARKERS = ("o", "s", "^", "D", "v", "P")
"""Ten sources have the first of them, ten more the second: colour and marker together are one source's."""

STYLES: tuple[Any, ...] = ("-", "--", "-.", ":")
"""Of the row lengths, the shortest first."""

ROOM_INSIDE = 8
"""A legend of more entries stands beside its panel."""

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
    """By row length (the text between `val_` and the slash), then by source, `mix` and `mean`. A value that is not
    finite is NaN, which is not drawn; so is a point between two values that are not to be compared."""
    marks: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    """Positions from which on something else is read, and what."""
    last_tokens: float = 0
    last_update: float = 0


def collect(journal: JournalReader) -> Curves:
    """The curves of the lineage's rows. Of training, values that are not finite are left out and a skipped update is
    marked. Validation losses are cut where names go on with other rows or weights (docs/reference/metrics.md).
    """
    curves = Curves()
    singles = {
        "train/loss": curves.loss,
        "train/learning_rate": curves.learning_rate,
        "train/grad_norm": curves.grad_norm,
    }
    generation, validated, mixture, counted = None, None, None, _Mixture()
    for row in journal.rows():
        tokens = row["tokens"]
        if generation == PARENTS_GENERATION != row["generation"]:
            curves.marks.append((curves.last_tokens, "branch"))
        generation = row["generation"]
        curves.last_tokens, curves.last_update = tokens, row["update"]
        if row.get("skipped"):
            curves.skipped_tokens.append(tokens)
        counted.add(row)
        losses = {}
        for name, value in row.items():
            if name in singles and math.isfinite(value):
                singles[name].add(tokens, value)
            elif name.startswith("val_") and name.count("/") == 1:
                losses[name] = value
        if not losses:
            continue
        length = row.get("row_tokens")
        other_rows = validated is not None and length != validated
        other_mixture = mixture is not None and counted.differs_from(mixture)
        if other_rows:
            curves.marks.append((tokens, _rows_of(length)))
        if other_mixture:
            curves.marks.append((tokens, "another mixture"))
        for name, value in losses.items():
            rows_of, what = name.removeprefix("val_").split("/")
            curve = curves.validation.setdefault(rows_of, {}).setdefault(what, Curve())
            if curve.tokens and (other_rows or (other_mixture and what == "mix")):
                curve.add(tokens, math.nan)
            curve.add(tokens, value if math.isfinite(value) else math.nan)
        validated = length
        if counted.rows:
            mixture, counted = counted, _Mixture()
    return curves


def _rows_of(length: float | str | None) -> str:
    return "other rows" if length is None else f"rows of {float(length):,.0f}"


class _Mixture:
    """Rows of each source, counted over updates."""

    def __init__(self) -> None:
        self.rows = 0.0
        self._by_source: dict[str, float] = {}

    def add(self, row: Mapping[str, float]) -> None:
        """Count an update's."""
        for name, rows in row.items():
            if name.startswith("train/rows/"):
                self._by_source[name] = self._by_source.get(name, 0) + rows
                self.rows += rows

    def differs_from(self, other: _Mixture) -> bool:
        """Whether these cannot be rows of one mixture: consecutive rows hold a source within two rows of its share."""
        if not self.rows or not other.rows:
            return False
        reach = 2 / self.rows + 2 / other.rows
        names = self._by_source.keys() | other._by_source.keys()
        return any(abs(self._share(name) - other._share(name)) > reach + 1e-12 for name in names)

    def _share(self, name: str) -> float:
        return self._by_source.get(name, 0) / self.rows


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
        import matplotlib  # noqa: F401
    except ImportError:
        raise Refusal("a plot needs matplotlib: pip install 'matplotlib>=3.8'") from None
    with journal.snapshot():
        curves = collect(journal)
    if journal.last_row() is None:
        raise Refusal(f"{journal.path}: no update is recorded yet, so there is nothing to plot")
    figure = draw(curves, name or journal.path.resolve().parent.name)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name that the font lacks is drawn as boxes
        figure.savefig(picture, format="png")
    atomic_write(png_path, picture.getvalue())
    return png_path


def draw(curves: Curves, name: str) -> Figure:
    """The picture, with a name in its title."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

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
    figure.suptitle(
        f"{name}   ·   update {curves.last_update:,.0f}   ·   {human_count(curves.last_tokens)} tokens",
        x=0.012, ha="left", fontsize=14, fontweight="bold", color=DARK,
    )  # fmt: skip
    return figure


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
    """Sources in colours, the mix of them in black; row lengths, if there are several, by line style. A name has one
    entry in the legend, with its last value of each length.
    """
    from matplotlib.lines import Line2D

    lengths = sorted(curves.validation, key=lambda text: (len(text), text))
    sources = sorted({what for by_source in curves.validation.values() for what in by_source} - {"mix", "mean"})
    entries: list[Line2D] = []
    for what in [*sources, "mix"]:
        index, mix = 0 if what == "mix" else sources.index(what), what == "mix"
        look: dict[str, Any] = {
            "color": "black" if mix else SOURCE_COLOURS[index % len(SOURCE_COLOURS)],
            "marker": SOURCE_MARKERS[index // len(SOURCE_COLOURS) % len(SOURCE_MARKERS)],
            "markersize": 3.5 if mix else 2.5,
            "linewidth": 2.2 if mix else 1.3,
        }
        last = []
        for length, style in zip(lengths, itertools.cycle(STYLES), strict=False):
            curve = curves.validation[length].get(what)
            if curve is not None:
                axes.plot(curve.tokens, curve.values, linestyle=style, **look)
                last.append(f"{curve.values[-1]:.3f}" if math.isfinite(curve.values[-1]) else "not finite")
        if last:
            entries.append(Line2D([], [], label=f"{what}  {' | '.join(last)}", **look))
    if len(lengths) > 1:
        styles = zip(lengths, itertools.cycle(STYLES), strict=False)
        entries += [Line2D([], [], color=MUTED, linestyle=style, label=_rows_of(length)) for length, style in styles]
    _dress(axes, "validation loss (nats a token)", curves)
    for tokens, text in curves.marks:
        axes.axvline(tokens, color=MUTED, linewidth=0.8, linestyle=":")
        axes.text(
            tokens, 0.02, f" {text}", transform=axes.get_xaxis_transform(), rotation=90, fontsize=7, color=MUTED,
            ha="right", va="bottom",
        )  # fmt: skip
    if len(entries) > ROOM_INSIDE:
        columns = -(-len(entries) // 24)  # 24 are as high as the panel
        axes.legend(
            handles=entries, frameon=False, fontsize=8, loc="upper left", labelcolor=DARK,
            bbox_to_anchor=(1.0, 1.0), ncols=columns,
        )  # fmt: skip
    elif entries:
        axes.legend(handles=entries, frameon=False, fontsize=9, loc="upper right", labelcolor=DARK)


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
