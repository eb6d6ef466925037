"""The report says what the table says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import report
from benchmarks.study.table import Table
from benchmarks.study.training import Job
from nstrain.base.errors import Refusal

SOURCES = ("python", "c")


def found(val: float, **more: Any) -> dict[str, Any]:
    """What a run finds."""
    return {
        "val": val,
        "val_by_source": dict.fromkeys(SOURCES, val),
        "val_by_document_position": {"bin0": 5.0, "bin3": val, "tokens_frac": 0.9},
        "parameters": 48_000_000,
        "flops_per_token": 3e8,
        "tokens_per_s": 5e5,
        "seconds": 50.0,
        "curve": [[65536 * n, 9.0 / n + val] for n in range(1, 5)],
        "tasks": {"induction-64": {"loss": 1.0, "right": 0.75}},
        "gradient": {"p50": 0.5, "p90": 0.7, "max": 2.0, "clipped": 0.1, "skipped": 0},
        "card": "a card",
        "versions": {"torch": "2", "triton": "3"},
        **more,
    }


@pytest.fixture
def table(tmp_path: Path) -> Table:
    table = Table(tmp_path / "results.jsonl", "data", "abc")
    health = {"dendritic/firing": {"min": 0.1, "mean": 0.4, "max": 0.8}}
    for seed, val in enumerate((2.0, 2.02, 1.98)):
        table.append(Job("default", "50M", 3e-3, seed), found(val, health=health))
    table.append(Job("default", "50M", 1.5e-3), found(2.1))
    table.append(Job("llama", "50M", 1.5e-3), found(2.4))
    table.append(Job("llama", "50M", 3e-3), found(2.5))
    table.append(Job("no-match", "50M", 3e-3), found(2.25))
    for seed, val in ((0, 1.99), (1, 1.98)):
        table.append(Job("pattern-1-1", "50M", 3e-3, seed), found(val))
    long_rows = {"8192": {"loss": 1.5, "by_position": [3.0 - 0.1 * k for k in range(14)]}}
    table.append(Job("default", "150M", 2e-3, 0, "final"), found(1.7, long_rows=long_rows, health=health))
    return table


def test_the_noise_is_the_pooled_spread_over_seeds(table: Table) -> None:
    noise = report.noise_of(table.of(size="50M", arm="default"))
    assert noise.degrees == 2
    assert noise.sd == pytest.approx(0.02)
    # Student's t has a closed form at two degrees of freedom, and at one it is Cauchy's.
    assert noise.told_apart == pytest.approx(0.95 * (2 / (1 - 0.95**2)) ** 0.5 * 2**0.5 * 0.02, rel=1e-3)
    assert report.STUDENT_95[0] == pytest.approx(math.tan(math.pi * 0.475), rel=1e-3)
    assert list(report.STUDENT_95) == sorted(report.STUDENT_95, reverse=True)
    assert report.Noise(1.0, 1000).told_apart == pytest.approx(2.23 * 2**0.5), "never less than is known"
    assert report.noise_of([]).told_apart is None


def test_tables_and_pictures_are_in_the_document(table: Table, tmp_path: Path) -> None:
    document = tmp_path / "0009-study.md"
    document.write_text(f"before\n{report.BEGIN}\nlast time\n{report.END}\nafter\n")
    text = report.report(table, tmp_path / "0009-study")
    report.write(document, text)
    written = document.read_text()
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "last time" not in written
    assert written.index("Spread over seeds") < written.index("Mechanisms")
    assert "| default 50M @ 0.003 | 2.0000, 2.0200, 1.9800 | 2.0000 | 0.0200 | 0.0400 |" in written
    assert "| llama |  | **2.4000** | 2.5000 |  |" in written
    assert "| default |  | 2.1000 | **2.0000 (3 seeds)** |" in written
    assert "| no-match | without the induction match | 0.003 | 1 | 2.2500 | +0.2500 | +0.2500 | +0.2500 |" in written
    assert "| pattern-1-1 | DH, 7 to 6 | 0.003 | 2 | 1.9850 | -0.0250 |" in written
    assert "dendritic/firing (min, mean, max) | 0.1, 0.4, 0.8 | 0.1, 0.4, 0.8 |" in written
    pictures = {path.name for path in (tmp_path / "0009-study").iterdir()}
    assert pictures == {"baselines.png", "document.png", "mechanisms.png", "shapes.png", "final.png", "final-long.png"}
    assert all(f"0009-study/{name}" in written for name in pictures)
    report.write(document, text)
    assert document.read_text() == written


def test_a_document_without_marks_or_a_table_without_runs_is_refused(table: Table, tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text("nothing")
    with pytest.raises(Refusal, match="begin"):
        report.write(document, "text")
    with pytest.raises(Refusal, match="no run"):
        report.report(Table(tmp_path / "none.jsonl", "data", "abc"), tmp_path)


def test_the_committed_document_has_its_marks() -> None:
    text = (Path(report.__file__).parents[2] / "docs" / "decisions" / "0009-study.md").read_text(encoding="utf-8")
    assert text.count(report.BEGIN) == text.count(report.END) == 1


def test_every_row_is_json_of_the_standard(table: Table, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
