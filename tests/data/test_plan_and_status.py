"""What `data plan` foresees against what happens, schedules that only grow, and what `data status` tells."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    contents,
    make_line,
    manifest_of,
    prepare,
    prepare_until_exhausted,
    prose,
    prose_tree,
    source,
    start_preparer,
    write_tree,
)
from mixed_line import mixed_line
from reader_files import write_records
from sized_checkpoints import make_sized_line, put_sized
from typer.testing import CliRunner

from nstrain.base.disk import bytes_below
from nstrain.base.errors import Refusal
from nstrain.cli.data import app
from nstrain.data.consumers import write_consumer
from nstrain.data.extend import extend_line
from nstrain.data.line import DataLine
from nstrain.data.plan import LinePlan, SourcePlan, plan_line, shortages
from nstrain.data.preparer import run_preparer
from nstrain.data.room import bytes_to_open
from nstrain.data.val import collect_held_out

TOLERANCE = 0.10
"""By how much a plan made before anything is read may be off: what is held out is a sample of documents, and a file's
beginning stands for the file."""


def planned(line: DataLine) -> LinePlan:
    plan = plan_line(line)
    assert plan is not None
    return plan


def by_name(plan: LinePlan) -> dict[str, SourcePlan]:
    return {source.source: source for source in plan.sources}


def left_in(line: DataLine, cycle: int, name: str) -> int:
    """Tokens that a source, all of it opened, has left after a cycle."""
    after = manifest_of(line, cycle)["after"][name]
    assert [s["next_file"] for s in after["strata"]] == [len(files) for files in line.listing(name).files]
    left: int = sum(file["left"] for stratum in after["strata"] for file in stratum["open"])
    return left + int(after["tail"]["tokens"])


@pytest.fixture(scope="module")
def used_up(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DataLine, int]:
    """A line of one text tree, prepared until it runs out, and the cycle that cannot be filled."""
    root = tmp_path_factory.mktemp("plan")
    tree = write_tree(root / "text", prose_tree(3, {"a": 120, "b": 60, "c": 10}))
    line = make_line(root / "line", tokenizer, [source("web", tree, held_out=0.05)], 960, None)
    return line, prepare_until_exhausted(line)[0]


def as_after(line: DataLine, tmp_path: Path, cycles: int) -> DataLine:
    """The line as it was when so many cycles were prepared."""
    shutil.copytree(line.work, tmp_path / "line")
    copy = DataLine.open(tmp_path / "line")
    cycle = cycles + 1
    while copy.manifest_path(cycle).exists():
        copy.manifest_path(cycle).unlink()
        shutil.rmtree(copy.cycle_directory(cycle))
        cycle += 1
    return copy


def test_an_open_ended_line_runs_out_about_when_it_is_planned_to(used_up: tuple[DataLine, int], tmp_path: Path) -> None:
    line, refused = used_up
    assert refused > 8
    before = contents(line.work)
    plan = planned(as_after(line, tmp_path, 0))
    web = by_name(plan)["web"]
    had = 960 * (refused - 1) + left_in(line, refused - 1, "web")
    assert abs(web.left_tokens / had - 1) <= TOLERANCE
    assert (plan.next_cycle, plan.cycle_count) == (1, None)
    assert web.runs_out_in_cycle is not None
    assert abs(web.runs_out_in_cycle - refused) <= 1 + TOLERANCE * refused
    assert (web.cycle_tokens, web.takes_tokens, web.short) == (960, None, False)
    assert contents(line.work) == before


def test_it_is_exact_once_everything_is_open(used_up: tuple[DataLine, int], tmp_path: Path) -> None:
    line, refused = used_up
    plan = planned(as_after(line, tmp_path, refused - 1))
    assert plan.next_cycle == refused
    assert by_name(plan)["web"].left_tokens == left_in(line, refused - 1, "web")
    assert by_name(plan)["web"].runs_out_in_cycle == refused
    shutil.rmtree(tmp_path / "line")
    earlier = planned(as_after(line, tmp_path, refused - 2))
    assert by_name(earlier)["web"].runs_out_in_cycle == refused


def test_it_comes_nearer_as_files_are_opened(used_up: tuple[DataLine, int], tmp_path: Path) -> None:
    line, refused = used_up
    had = left_in(line, refused - 1, "web")
    for cycles in range(1, refused, 3):
        copy = as_after(line, tmp_path, cycles)
        left = by_name(planned(copy))["web"].left_tokens
        assert abs(left - (had + 960 * (refused - 1 - cycles))) <= TOLERANCE * 960 * refused
        shutil.rmtree(copy.work)


@pytest.mark.parametrize("cycles", ["enough", "one too many"])
def test_a_closed_schedule_is_met_or_not_as_planned(used_up: tuple[DataLine, int], tmp_path: Path, cycles: str) -> None:
    line, refused = used_up
    copy = as_after(line, tmp_path, refused - 3)
    value = json.loads((copy.work / "line.json").read_text())
    count = refused - 1 if cycles == "enough" else refused
    value["schedule"][0]["cycles"] = count
    (copy.work / "line.json").write_text(json.dumps(value))
    copy = DataLine.open(copy.work)
    web = by_name(planned(copy))["web"]
    assert web.takes_tokens == (count - (refused - 3)) * 960
    done = CliRunner().invoke(app, ["plan", "--work", str(copy.work)])
    if cycles == "enough":
        assert (web.short, web.runs_out_in_cycle) == (False, None)
        assert done.exit_code == 0
        assert "lasts" in done.output
        assert shortages(copy) == ()
        prepare(copy)
        assert plan_line(copy) is None
        done = CliRunner().invoke(app, ["plan", "--work", str(copy.work)])
        assert done.exit_code == 0
        assert "every cycle of the schedule is prepared" in done.output
        assert json.loads(CliRunner().invoke(app, ["plan", "--work", str(copy.work), "--json"]).stdout) is None
    else:
        assert (web.short, web.runs_out_in_cycle) == (True, refused)
        assert done.exit_code == 1
        assert f"in cycle {refused}" in done.output
        assert f"the schedule cannot be met from cycle {refused}" in done.output
        assert [f"source web: about {web.left_tokens:,} tokens" in told for told in shortages(copy)] == [True]
        assert f"it runs out in cycle {refused} (`nstrain data plan --work {copy.work}`)" in shortages(copy)[0]
        as_json = CliRunner().invoke(app, ["plan", "--work", str(copy.work), "--json"])
        assert as_json.exit_code == 1
        assert json.loads(as_json.stdout)["sources"][0]["runs_out_in_cycle"] == refused


def test_it_sees_recipes_that_change_and_sources_that_pause(tmp_path: Path, tokenizer: Path) -> None:
    line = mixed_line(tmp_path, tokenizer, cycles=1)
    extend_line(line.work, 2, cycle_tokens=640, recipe={"tree": 1, "rows": 4})
    line = extend_line(line.work, 1, cycle_tokens=640, recipe={"nested": 1})
    plan = by_name(planned(line))
    taken = {"rows": 640 + 2 * 512, "nested": 320 + 640, "tree": 320 + 2 * 128}
    assert {name: source.takes_tokens for name, source in plan.items()} == taken
    assert {name: source.cycle_tokens for name, source in plan.items()} == {"rows": 640, "nested": 320, "tree": 320}
    prepare(line, 1)
    later = planned(line)
    assert later.next_cycle == 2
    assert {name: source.cycle_tokens for name, source in by_name(later).items()} == {
        "rows": 512,
        "nested": 0,
        "tree": 128,
    }
    assert {name: source.takes_tokens for name, source in by_name(later).items()} == {
        "rows": 1024, "nested": 640, "tree": 256,
    }  # fmt: skip
    assert later.cycle_bytes == (640 + 2) * 2
    assert later.prepare_s == pytest.approx(640 / line.calibration().tokens_per_s)
    prepare(line, 2)
    on_disk = sum(p.stat().st_size for p in line.cycle_directory(2).glob("*.bin"))
    assert on_disk == later.cycle_bytes


def test_no_file_of_a_source_is_read_for_it(used_up: tuple[DataLine, int], tmp_path: Path) -> None:
    line, _ = used_up
    copy = as_after(line, tmp_path, 2)
    expected = planned(copy)
    value = json.loads((copy.work / "line.json").read_text())
    value["sources"][0]["settings"]["path"] = str(tmp_path / "nowhere")
    (copy.work / "line.json").write_text(json.dumps(value))
    shutil.rmtree(copy.work / "open")
    assert planned(DataLine.open(copy.work)) == expected


def test_it_counts_the_tables_which_are_larger_than_the_tokens_where_documents_are_short(
    tmp_path: Path, tokenizer: Path
) -> None:
    for number in range(4):
        write_records(tmp_path / "web" / f"{number}.jsonl", [{"text": prose(n, 2)} for n in range(1500)])
    fields = {"include": ["*.jsonl"], "reader": "jsonl", "text_column": "text"}
    line = make_line(tmp_path / "line", tokenizer, [source("web", tmp_path / "web", **fields)], 6400, 2)
    assert planned(line).tables_bytes == 0, "nothing is known of how long documents are"
    collect_held_out(line, 200)
    plan = planned(line)
    assert bytes_to_open(line, 1) == plan.opens_bytes
    prepare(line, 1)
    assert plan.tables_bytes > plan.cycle_bytes
    assert bytes_below(line.cycle_directory(1)) == pytest.approx(plan.cycle_bytes + plan.tables_bytes, rel=0.1)
    assert bytes_below(line.work / "open") == pytest.approx(plan.opens_bytes, rel=0.1)


def test_it_tells_about_how_much_a_cycle_opens(used_up: tuple[DataLine, int], tmp_path: Path) -> None:
    """Against what was opened for it; a file more or less a stratum, since their sizes are estimates."""
    line, refused = used_up
    file_tokens = max(s["opened_tokens"] / s["next_file"] for s in manifest_of(line, 1)["after"]["web"]["strata"])

    def opened(states: list[dict[str, Any]]) -> int:
        return sum(int(state["opened_tokens"]) for state in states)

    before, seen = 0, []
    for cycle in range(1, refused):
        plan = planned(as_after(line, tmp_path, cycle - 1))
        shutil.rmtree(tmp_path / "line")
        actual = opened(manifest_of(line, cycle)["sources"]["web"]["opened"]) - before
        before += actual
        opens = by_name(plan)["web"].opens_tokens
        assert plan.opens_bytes >= 2 * opens
        assert abs(opens - actual) <= 2 * 3 * file_tokens
        seen.append(opens)
    assert 1 - 3 * TOLERANCE <= sum(seen) / before <= 1, "on the average it is nearer"
    assert seen[0] > 960, "whole files are opened, and more of them than the cycle takes"


def test_it_tells_what_checkpoints_will_take(tmp_path: Path, tokenizer: Path) -> None:
    line = mixed_line(tmp_path, tokenizer, cycles=3)
    paths = make_sized_line(tmp_path / "run", keep_last=1)
    make_sized_line(tmp_path / "fresh")
    for name in ("run", "fresh", "gone"):
        write_consumer(line.work, name, 1, 0, 0, tmp_path / name)
    put_sized(paths, 0, 3 << 20, cycle=1, kept=True)
    put_sized(paths, 10, 3 << 20, cycle=2, kept=True)

    def shown() -> str:
        done = CliRunner().invoke(app, ["plan", "--work", str(line.work)])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    found = {plan.run: plan for plan in planned(line).checkpoints}
    assert list(found) == [str(tmp_path / "fresh"), str(paths.root)], "of one that is gone nobody knows anything"
    of_run = found[str(paths.root)]
    assert (of_run.forecast.kept, of_run.kept_bytes, of_run.forecast.kept_to_come) == (2, 6 << 20, 2)
    assert of_run.forecast.end_bytes == (2 + 1) * (3 << 20), "two ends of cycles, and a rolling one beside them"
    text = shown()
    assert f"checkpoints of {paths.root}: 2 kept (6.0 MiB), 9.0 MiB more at most up to the schedule's end;" in text
    assert f"checkpoints of {tmp_path / 'fresh'}: none yet" in text
    assert "opened files: about" in text
    (line.work / "downloads" / "tree" / "deep").mkdir(parents=True)
    (line.work / "downloads" / "tree" / "deep" / "file").write_bytes(bytes(2048))
    assert ", and 2.0 KiB fetched" in shown()
    value = json.loads(CliRunner().invoke(app, ["plan", "--work", str(line.work), "--json"]).stdout)
    assert (value["downloads_bytes"], value["open_bytes"]) == (2048, 0)
    assert value["checkpoints"][1]["forecast"]["end_bytes"] == 9 << 20
    prepare(line)
    text = shown()
    assert "every cycle of the schedule is prepared" in text
    assert "9.0 MiB more at most up to the schedule's end" in text, "training goes on, and keeps them"


# ------------------------------------------------------------------ the past


PAST: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "recipe": (lambda pieces: pieces[0].update(recipe={"rows": 1, "nested": 2, "tree": 1}), "cycle 1 .* recipe"),
    "size": (lambda pieces: pieces[0].update(cycle_tokens=2560), "cycle 1 .* cycle_tokens 1280, found 2560"),
    "segments": (lambda pieces: pieces[0].update(segment_units=10), "cycle 1 .* segment_units"),
    "a piece more before": (lambda pieces: pieces.insert(0, {**pieces[0], "cycles": 1}), "cycle 2 .* cycle_tokens"),
    "cycles of the first": (lambda pieces: pieces[0].update(cycles=2), "cycle 2 .* piece 1, found 0"),
    "the second's size": (
        lambda pieces: pieces[1].update(cycle_tokens=1280),
        "cycle 2 .* cycle_tokens 640, found 1280",
    ),
}


@pytest.mark.parametrize("what", PAST)
def test_an_edit_of_the_past_by_hand_is_refused_with_the_first_difference(
    tmp_path: Path, tokenizer: Path, what: str
) -> None:
    line = mixed_line(tmp_path, tokenizer, cycles=1)
    line = extend_line(line.work, 1, cycle_tokens=640)
    line = extend_line(line.work, 1, cycle_tokens=640, recipe={"rows": 1, "tree": 1})
    prepare(line, 2)
    path = line.work / "line.json"
    good = path.read_text()
    value = json.loads(good)
    edit, match = PAST[what]
    edit(value["schedule"])
    path.write_text(json.dumps(value))
    with pytest.raises(Refusal, match=match):
        run_preparer(line.work, until_cycle=3, workers=0)
    with pytest.raises(Refusal, match=match):
        extend_line(line.work, 1)
    assert path.read_text() == json.dumps(value)
    assert not line.manifest_path(3).exists()
    path.write_text(good)
    extend_line(line.work, 1)
    prepare(DataLine.open(line.work), 3)


def test_what_is_not_prepared_may_still_be_edited_by_hand(tmp_path: Path, tokenizer: Path) -> None:
    line = mixed_line(tmp_path, tokenizer, cycles=3)
    prepare(line, 1)
    value = json.loads((line.work / "line.json").read_text())
    first = value["schedule"][0]
    value["schedule"] = [{**first, "cycles": 1}, {**first, "cycles": 1, "recipe": {"tree": 1}}]
    (line.work / "line.json").write_text(json.dumps(value))
    line = DataLine.open(line.work)
    prepare(line)
    assert list(manifest_of(line, 2)["sources"]) == ["tree"]


# ------------------------------------------------------------------ status


def status_of(line: DataLine) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["status", "--work", str(line.work), "--json"])
    assert done.exit_code == 0, done.output
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_status_tells_where_a_line_stands(tmp_path: Path, tokenizer: Path) -> None:
    line = mixed_line(tmp_path, tokenizer, cycles=3, unit_tokens=16)
    new = status_of(line)
    assert set(new) >= {
        "work", "cycle_count", "prepared_cycles", "cycles_on_disk", "held_out", "preparing", "preparer", "consumers",
        "cycles_bytes", "open_bytes",
    }  # fmt: skip
    assert (new["work"], new["cycle_count"], new["prepared_cycles"]) == (str(line.work), 3, 0)
    assert (new["cycles_on_disk"], new["held_out"], new["preparing"], new["preparer"]) == ([], False, False, None)
    assert (new["consumers"], new["cycles_bytes"], new["open_bytes"]) == ([], 0, 0)
    collect_held_out(line)
    prepare(line, 2)
    run = tmp_path / ("a-long-name-" * 10)  # folded in the table, the words before it not
    write_consumer(line.work, "run", 2, 5, 1400, run)
    run_preparer(line.work, until_cycle=2, workers=0)
    now = status_of(line)
    assert (now["prepared_cycles"], now["cycles_on_disk"], now["held_out"]) == (2, [2], True)
    assert now["preparer"]["stage"] == "done"
    assert now["consumers"] == [{"format": 1, "id": "run", "run": str(run), "cycle": 2, "row": 5, "tokens": 1400}]
    assert now["cycles_bytes"] == size_of(line.work / "cycles") > 0
    assert now["open_bytes"] == size_of(line.work / "open") > 0
    text = CliRunner().invoke(app, ["status", "--work", str(line.work)]).output
    assert "2 of 3" in text
    assert "cycle 2, row 5" in text


def test_a_running_preparer_is_seen(tmp_path: Path, tokenizer: Path) -> None:
    line = mixed_line(tmp_path, tokenizer, cycles=5)
    child = start_preparer(line.work)
    try:
        while not ((status := status_of(line))["preparing"] and (status["preparer"] or {}).get("pid") == child.pid):
            assert child.poll() is None
        assert status["preparer"]["stage"] in ("preparing", "waiting_consumer")
    finally:
        child.kill()
        child.communicate()
    assert status_of(line)["preparing"] is False
