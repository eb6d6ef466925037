"""Tables and curves from the table of runs, into the document that draws the conclusions.

    python -m benchmarks.study.report --table benchmarks/study/results.jsonl --document docs/decisions/0009-study.md

Everything between the two marks in the document is written anew; the rest of it, with the conclusions, is left as it
is. Curves are PNG files beside it. All tables are about one data set: that of the newest row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.arms import ARMS, BASELINES, DEFAULT, MECHANISMS, SHAPES, TOGETHER, Arm
from benchmarks.study.plan import RATES
from benchmarks.study.table import Row, Table, best, by_rate, mean_loss
from nstrain.base.disk import atomic_write
from nstrain.base.errors import Refusal

BEGIN, END = "<!-- written by benchmarks.study.report: begin -->", "<!-- written by benchmarks.study.report: end -->"
SMALL, LARGE = "50M", "150M"
STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t that 95 % stay below in size, at 1, 2, ... degrees of freedom; the last one stands for all after it."""


# --- the noise -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Noise:
    """How far apart runs are that differ in their seed alone."""

    sd: float | None
    """Standard deviation of one run's validation loss, pooled over the arms that have several seeds; None without."""
    degrees: int
    """Its degrees of freedom: runs less arms."""

    @property
    def told_apart(self) -> float | None:
        """The least difference of two runs that is not put down to seeds: 95 % of those of equal arms are less."""
        if self.sd is None:
            return None
        t = STUDENT_95[min(self.degrees, len(STUDENT_95)) - 1]
        return float(t * 2**0.5 * self.sd)


def noise_of(rows: Sequence[Row]) -> Noise:
    """The pooled spread over seeds of each arm at each rate."""
    squares, degrees = 0.0, 0
    for group in _groups(rows):
        losses = np.array([row["val"] for row in group])
        squares += float(((losses - losses.mean()) ** 2).sum())
        degrees += len(losses) - 1
    return Noise((squares / degrees) ** 0.5 if degrees else None, degrees)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one arm, rate and recipe that differ in their seed, where there is more than one."""
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        if row["val"] is not None:
            groups.setdefault((row["arm"], row["size"], row["rate"], row["recipe"]), {})[row["seed"]] = row
    return [list(group.values()) for group in groups.values() if len(group) > 1]


# --- tables --------------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _loss(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4f}"


def spread_table(rows: Sequence[Row]) -> str:
    """Each arm's seeds: losses, mean, standard deviation, range."""
    lines = []
    for group in _groups(rows):
        losses = [row["val"] for row in sorted(group, key=lambda row: row["seed"])]
        lines.append(
            [
                f"{group[0]['arm']} {group[0]['size']} @ {group[0]['rate']:g}",
                ", ".join(f"{loss:.4f}" for loss in losses),
                f"{np.mean(losses):.4f}",
                f"{np.std(losses, ddof=1):.4f}",
                f"{max(losses) - min(losses):.4f}",
            ]
        )
    return markdown(["runs", "losses by seed", "mean", "standard deviation", "range"], lines)


def rates_table(table: Table, arms: Sequence[Arm]) -> str:
    """Validation loss of each arm at each rate, the mean over its seeds."""
    lines = []
    for arm in arms:
        rows = table.of(arm=arm.name, size=SMALL, recipe="one epoch")
        if not rows:
            continue
        found, chosen = by_rate(rows), best(rows)
        cells = ["" if rate not in found else _mean_cell(found[rate], found[rate] == chosen) for rate in RATES]
        row = chosen[0] if chosen else rows[-1]
        lines.append(
            [arm.name, *cells, f"{row['parameters'] / 1e6:.1f}", f"{row['flops_per_token'] / 1e6:.0f}", _speed(row)]
        )
    rates = [f"{rate:g}" for rate in RATES]
    return markdown(["arm", *rates, "M parameters", "M FLOPs a token", "K tokens/s"], lines)


def _mean_cell(rows: Sequence[Row], is_best: bool) -> str:
    mean = mean_loss(rows)
    text = _loss(mean if math.isfinite(mean) else None) + (f" ({len(rows)} seeds)" if len(rows) > 1 else "")
    return f"**{text}**" if is_best else text


def _speed(row: Row) -> str:
    return "" if row["tokens_per_s"] is None else f"{row['tokens_per_s'] / 1e3:,.0f}"


def differences_table(table: Table, arms: Sequence[Arm]) -> str:
    """Each arm less the default at the same rate, over the seeds that both have; negative is better."""
    sources = list(table.rows[-1]["val_by_source"])
    lines = []
    for arm in arms:
        rows = best(table.of(arm=arm.name, size=SMALL, recipe="one epoch"))
        if not rows:
            continue
        rate = rows[0]["rate"]
        default = by_rate(table.of(arm=DEFAULT.name, size=SMALL, recipe="one epoch", rate=rate)).get(rate, [])
        of_default = {row["seed"]: row for row in default if row["val"] is not None}
        pairs = [(row, of_default[row["seed"]]) for row in rows if row["seed"] in of_default]
        lines.append(
            [
                arm.name,
                arm.about,
                f"{rate:g}",
                str(len(pairs)),
                _loss(mean_loss(rows)),
                _mean_difference([(mine["val"], its["val"]) for mine, its in pairs]),
                *(
                    _mean_difference([(mine["val_by_source"][name], its["val_by_source"][name]) for mine, its in pairs])
                    for name in sources
                ),
                f"{rows[0]['parameters'] / 1e6:.1f}",
                _speed(rows[0]),
            ]
        )
    head = ["arm", "what it is", "rate", "seeds", "loss", "less the default's", *sources, "M parameters", "K tokens/s"]
    return markdown(head, lines)


def _mean_difference(pairs: Sequence[tuple[float, float]]) -> str:
    return f"{np.mean([mine - its for mine, its in pairs]):+.4f}" if pairs else ""


def tasks_table(rows: Sequence[Row]) -> str:
    """Induction and recall: share of right targets, and loss."""
    names = list(rows[0]["tasks"]) if rows else []
    lines = [
        [_title(row), *(f"{row['tasks'][name]['right']:.0%} ({row['tasks'][name]['loss']:.2f})" for name in names)]
        for row in rows
    ]
    return markdown(["run", *names], lines)


def long_table(rows: Sequence[Row]) -> str:
    """Loss on long rows, in all and by doublings of the position."""
    lines = []
    for row in rows:
        for length, found in row["long_rows"].items():
            later = found["by_position"][9:]
            lines.append(
                [f"{_title(row)}, {int(length):,} tokens", _loss(found["loss"]), *(f"{loss:.3f}" for loss in later)]
            )
    most = max((len(line) for line in lines), default=2) - 2
    head = ["run and row length", "loss", *(f"{1 << (8 + k):,}-{1 << (9 + k):,}" for k in range(most))]
    return markdown(head, [[*line, *[""] * (most + 2 - len(line))] for line in lines])


HEALTH = (
    ("dendritic/firing", ("min", "mean", "max")),
    ("hippocampal/gate_firing", ("min", "mean", "max")),
    ("hippocampal/ffn_in_firing", ("min", "mean", "max")),
    ("hippocampal/ffn_gate_firing", ("min", "mean", "max")),
    ("hippocampal/ffn_up_firing", ("min", "mean", "max")),
    ("dendritic/retention", ("p50", "frac_gt_0.9")),
    ("dendritic/tau", ("p50", "max")),
    ("hippocampal/copy_pi", ("min", "p50", "max")),
    ("hippocampal/clock_tau", ("min", "p50", "max")),
)


def health_table(rows: Sequence[Row]) -> str:
    """Firing, retention and gradient norms."""
    lines = []
    for name, statistics in HEALTH:
        cells = []
        for row in rows:
            found = row.get("health", {}).get(name)
            cells.append("" if found is None else ", ".join(_short(found.get(statistic)) for statistic in statistics))
        lines.append([f"{name} ({', '.join(statistics)})", *cells])
    for name in ("p50", "p90", "max", "clipped", "skipped"):
        lines.append([f"gradient norm, {name}", *(_short(row["gradient"][name]) for row in rows)])
    return markdown(["reading", *map(_title, rows)], lines)


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _title(row: Row) -> str:
    return f"{row['arm']} {row['size']} seed {row['seed']}"


# --- curves --------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], path: Path, what: str) -> None:
    """Lines of one kind: `curve` over tokens, `document` over the position in the document, `long` over long rows."""
    figure, axes = _figure(width=8)
    for row in rows:
        x, y = _points(row, what)
        axes.plot(x, y, label=f"{_title(row)} @ {row['rate']:g}", linewidth=1.2)
    axes.set_xlabel({"curve": "million training tokens"}.get(what, "tokens from the start"))
    axes.set_ylabel("nats a token")
    if what != "curve":
        axes.set_xscale("log", base=2)
    else:
        lowest = min(min(_points(row, what)[1]) for row in rows)
        axes.set_ylim(lowest - 0.1, lowest + 2.0)
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_less(default: Row, rows: Sequence[Row], path: Path) -> None:
    """Each run's training loss less the default's at the same tokens: both saw the same rows up to there.

    From a third of the tokens on, the legend in the order of the ends.
    """
    of_default = dict(zip(*_points(default, "curve"), strict=True))
    lines = []
    for row in rows:
        points = [(x, y - of_default[x]) for x, y in zip(*_points(row, "curve"), strict=True) if x in of_default]
        lines.append((f"{row['arm']} @ {row['rate']:g}", [(x, y) for x, y in points if x >= max(of_default) / 3]))
    figure, axes = _figure(width=9)
    axes.axhline(0, color="black", linewidth=1.2, label=f"{_title(default)} @ {default['rate']:g}")
    for number, (label, points) in enumerate(sorted(lines, key=lambda line: -line[1][-1][1])):
        style = ("-", "--", ":")[number // 10 % 3]  # ten colours
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2)
    ends = [points[-1][1] for _, points in lines]
    axes.set_ylim(min(*ends, 0) - 0.1, min(max(*ends, 0), 0.5) + 0.1)
    axes.set_xlabel("million training tokens")
    axes.set_ylabel("nats a token, less the default's")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def _figure(width: float) -> tuple[Any, Any]:
    """A figure without a display, and its axes; `width` in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5), dpi=110)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _points(row: Row, what: str) -> tuple[list[float], list[float]]:
    if what == "curve":
        points = [(tokens / 1e6, loss) for tokens, loss in row["curve"] if loss is not None]
    elif what == "document":
        bins = {int(n[3:]): v for n, v in row["val_by_document_position"].items() if n.startswith("bin")}
        points = [(max(1.0, 2.0 ** (k - 1)), loss) for k, loss in sorted(bins.items())]
    else:
        longest = row["long_rows"][max(row["long_rows"], key=int)]
        points = [(max(1.0, 2.0 ** (k - 1)), loss) for k, loss in enumerate(longest["by_position"])]
    return [x for x, _ in points], [y for _, y in points]


# --- the document --------------------------------------------------------------------------------------------------


def report(table: Table, pictures: Path) -> str:
    """Everything between the marks; PNG files go to `pictures`."""
    small = table.of(size=SMALL, recipe="one epoch")
    if not small:
        raise Refusal("the table has no run of parts 1 to 3: run benchmarks.study.run first")
    of_baselines = {arm.name for arm in BASELINES}
    families = {
        "The default and its variants": [row for row in small if row["arm"] not in of_baselines],
        "The baselines": [row for row in small if row["arm"] in of_baselines],
    }
    at_best = [rows[0] for arm in (DEFAULT, *BASELINES) if (rows := best(table.of(arm=arm.name, size=SMALL)))]
    lines = [_made_with(table.rows), "## Spread over seeds\n"]
    lines += [spread_table(small), ""]
    lines += [f"{name}: {_noise_sentence(noise_of(rows))}\n" for name, rows in families.items()]
    lines += [
        "\n## The default and the baselines, each at its own best rate\n",
        rates_table(table, (DEFAULT, *BASELINES)),
    ]
    lines += ["\n", tasks_table(at_best)]
    draw(at_best, pictures / "baselines.png", "curve")
    draw(at_best, pictures / "document.png", "document")
    lines += [
        f"\n![training loss]({pictures.name}/baselines.png)",
        f"![loss in a document]({pictures.name}/document.png)",
    ]
    for title, how, arms in (
        ("Mechanisms", "one change at a time", MECHANISMS),
        ("Shapes", "one change at a time", SHAPES),
        ("Together", "the shapes that helped", TOGETHER),
    ):
        rows = [rows[0] for arm in arms if (rows := best(table.of(arm=arm.name, size=SMALL)))]
        if rows:
            file = f"{title.lower()}.png"
            draw_less(at_best[0], rows, pictures / file)
            lines += [f"\n## {title}: {how}\n", differences_table(table, arms)]
            lines += ["\n", tasks_table([*at_best[:1], *rows]), f"\n![{title.lower()}]({pictures.name}/{file})"]
    final = [row for row in table.of(size=LARGE) if row["val"] is not None]
    if final:
        draw(final, pictures / "final.png", "curve")
        draw(final, pictures / "final-long.png", "long")
        lines += ["\n## The final pair\n", spread_table(final), "\n", tasks_table(final), "\n", long_table(final)]
        lines += [f"\n![final]({pictures.name}/final.png)", f"![long rows]({pictures.name}/final-long.png)"]
    healthy = [row for row in [*at_best[:1], *final] if row.get("health")]
    if healthy:
        lines += ["\n## Health at the end of training\n", health_table(healthy)]
    return "\n".join(lines) + "\n"


def _made_with(rows: Sequence[Row]) -> str:
    cards, commits = sorted({row["card"] for row in rows}), sorted({row["commit"] for row in rows})
    row = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return (
        f"{len(rows)} runs on {', '.join(cards)}; {versions}; "
        f"commits {', '.join(commits)} (+: with changes that were not committed); data {row['data']}; losses in nats a "
        "token, the mean over the six sources' held-out rows.\n"
    )


def _noise_sentence(noise: Noise) -> str:
    if noise.sd is None or noise.told_apart is None:
        return "none has several seeds yet; no difference is told apart from noise."
    return (
        f"pooled standard deviation of a run {noise.sd:.4f} ({noise.degrees} degrees of freedom). Two runs that differ "
        f"by less than {noise.told_apart:.4f} are not told apart (95 %); means over n seeds by less than that over the "
        "root of n."
    )


def write(document: Path, text: str) -> None:
    """Put the report between the document's marks. Raises `Refusal` if it has none."""
    before, begin, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Refusal(f"{document} has no lines '{BEGIN}' and '{END}' between which the report goes")
    atomic_write(document, f"{before}{BEGIN}\n{text}{END}{after}".encode())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--document", type=Path, required=True)
    arguments = parser.parse_args()
    newest = json.loads(arguments.table.read_text().splitlines()[-1])
    table = Table(arguments.table, newest["data"], newest["commit"], any_commit=True)
    unknown = sorted({row["arm"] for row in table.rows} - set(ARMS))
    if unknown:
        raise Refusal(f"{arguments.table} has runs of arms that there are none of any more: {', '.join(unknown)}")
    write(arguments.document, report(table, arguments.document.with_suffix("")))


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        raise SystemExit(str(refusal)) from None
