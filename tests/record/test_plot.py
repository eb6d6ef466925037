"""The picture of a line's curves."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nstrain.base.errors import Refusal
from nstrain.record.journal import Journal
from nstrain.record.plot import Curve, Curves, collect, draw, plot_line, smooth


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    (tmp_path / "my-line").mkdir()
    with Journal.open(tmp_path / "my-line" / "journal.db", 1) as journal:
        yield journal


def validation(update: int, length: int = 256) -> dict[str, float]:
    return {f"val_{length}/{name}": 9.0 - update / 100 + i for i, name in enumerate(("web", "code", "mix", "mean"))}


def fill(journal: Journal, last: int) -> None:
    journal.commit(0, {"tokens": 0, **validation(0)})
    for update in range(1, last + 1):
        skipped = update % 37 == 0
        readings = {
            "tokens": update * 512,
            "skipped": int(skipped),
            "train/loss": math.nan if skipped else 9.0 - update / 50,
            "train/grad_norm": math.inf if skipped else 1.0 + update % 5,
            "train/learning_rate": 1e-3,
        }
        journal.commit(update, {**readings, **(validation(update) if update % 50 == 0 else {})})


def pixels(path: Path) -> np.ndarray[Any, Any]:
    from matplotlib.image import imread

    return imread(path)


def test_the_curves_are_those_of_the_journal(journal: Journal) -> None:
    fill(journal, 100)
    journal.commit(101, {"tokens": 101 * 512, "train/loss": 6.5, **validation(101, length=512)})
    curves = collect(journal)
    assert curves.last_update == 101
    assert curves.last_tokens == 101 * 512
    assert curves.skipped_tokens == [37 * 512, 74 * 512]
    assert curves.loss.tokens == [u * 512 for u in range(1, 102) if u not in (37, 74)]
    assert curves.loss.values[:2] == [9.0 - 1 / 50, 9.0 - 2 / 50]
    assert len(curves.grad_norm.values) == 98
    assert sorted(curves.validation) == ["256", "512"]
    assert curves.validation["256"]["mix"].tokens == [0, 50 * 512, 100 * 512]
    assert curves.validation["512"]["code"].values == [validation(101, 512)["val_512/code"]]


def test_what_is_not_to_be_compared_is_not_joined(journal: Journal, tmp_path: Path) -> None:
    """A change of the mixture moves `mix` and nothing else, one of the row length all; NaN stays and is not bridged."""

    def update(record: Journal, number: int, rows: tuple[int, int], length: int, losses: dict[str, float]) -> None:
        shares = {"train/rows/web": rows[0], "train/rows/code": rows[1]}
        record.commit(number, {"tokens": number * 512, "row_tokens": length, **shares, **losses})

    journal.commit(0, {"tokens": 0, "row_tokens": 256, **validation(0)})
    for number in range(1, 41):
        update(journal, number, (3, 1 + number % 2 * 2), 256, validation(number) if number % 20 == 0 else {})
    assert collect(journal).marks == []
    Journal.make_branch(tmp_path / "branch.db", journal, 40)
    with Journal.open(tmp_path / "branch.db", 1) as branch:
        for number in range(41, 121):
            mixture, length = (4, 0) if number <= 80 else (2, 2), 256 if number <= 100 else 512
            losses = validation(number) | ({"val_256/web": math.nan} if number in (80, 120) else {})
            update(branch, number, mixture, length, losses if number % 20 == 0 else {})
        curves = collect(branch)
    assert [(tokens / 512, text) for tokens, text in curves.marks] == [
        (40, "branch"), (60, "another mixture"), (100, "another mixture"), (120, "rows of 512"),
    ]  # fmt: skip

    def gaps(what: str) -> list[float]:
        curve = curves.validation["256"][what]
        return [tokens / 512 for tokens, value in zip(curve.tokens, curve.values, strict=True) if math.isnan(value)]

    assert (gaps("mix"), gaps("mean"), gaps("code")) == ([60, 100, 120], [120], [120])
    assert gaps("web") == [80, 120, 120]
    legend = draw(curves, "a").axes[1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["code  8.800", "web  not finite", "mix  9.800"]


@pytest.mark.parametrize(("sources", "lengths"), [(15, 2), (40, 3)])
def test_many_sources_leave_room_for_their_curves(sources: int, lengths: int) -> None:
    curve = Curve([0.0, 1e9], [9.0, 3.0])
    names = [*(f"web-of-a-year-{i}" for i in range(sources)), "mix", "mean"]
    lines = {str(4096 << i): dict.fromkeys(names, curve) for i in range(lengths)}
    figure = draw(Curves(curve, curve, curve, validation=lines, last_tokens=1e9, last_update=1000), "a")
    figure.draw_without_rendering()
    places = [axes.get_position() for axes in figure.axes]
    assert min(place.height for place in places) > 0.25
    assert min(place.width for place in places) > 0.2
    drawn = [line for line in figure.axes[1].get_lines() if line.get_linestyle() == "-"]
    looks = {(line.get_color(), line.get_marker()) for line in drawn}
    assert len(looks) == len(drawn) == sources + 1


def test_smoothing_is_centred_and_keeps_straight_lines_straight() -> None:
    assert smooth([]) == []
    assert smooth([3.0]) == [3.0]
    line = [float(i) for i in range(400)]
    assert smooth(line)[:390] == line[:390]
    noise = np.random.default_rng(0).standard_normal(4000)
    assert np.std(smooth(list(noise))[200:-200]) < 0.2
    bump = [0.0] * 200 + [1.0] + [0.0] * 199
    smoothed = smooth(bump)
    assert smoothed[195:206] == smoothed[205:194:-1]
    assert sum(smoothed) == pytest.approx(1.0)


@pytest.mark.parametrize("updates", [0, 1, 300])
def test_a_picture_is_made_at_every_stage_of_a_line(journal: Journal, tmp_path: Path, updates: int) -> None:
    fill(journal, updates)
    path = tmp_path / "curves.png"
    assert plot_line(journal, path) == path
    image = pixels(path)
    assert image.shape[0] > 500
    assert image.shape[1] > 900
    colours = np.unique((image * 255).astype(np.uint8).view(np.uint32))
    assert len(colours) > 20
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "my-line"]


def test_more_data_and_other_names_show(journal: Journal, tmp_path: Path) -> None:
    fill(journal, 50)
    first = pixels(plot_line(journal, tmp_path / "1.png"))
    again = pixels(plot_line(journal, tmp_path / "2.png", name="my-line"))
    assert np.array_equal(first, again)
    renamed = pixels(plot_line(journal, tmp_path / "3.png", name="another"))
    assert not np.array_equal(first, renamed)
    for update in range(51, 90):
        journal.commit(update, {"tokens": update * 512, "train/loss": 5.0})
    assert not np.array_equal(first, pixels(plot_line(journal, tmp_path / "4.png")))


def test_a_line_whose_every_update_was_skipped(journal: Journal, tmp_path: Path) -> None:
    journal.commit(0, {"tokens": 0})
    journal.commit(1, {"tokens": 512, "skipped": 1, "train/loss": math.nan, "train/grad_norm": math.nan})
    plot_line(journal, tmp_path / "curves.png")


def test_nothing_to_plot_is_a_refusal_and_leaves_the_old_picture(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "curves.png").write_bytes(b"old")
    with pytest.raises(Refusal, match="no update is recorded"):
        plot_line(journal, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes() == b"old"


def test_without_matplotlib_the_refusal_says_how_to_get_it(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refusal, match="pip install"):
        plot_line(journal, tmp_path / "curves.png")
