"""Branches: what they take over, where their stages lie, and that they are trained to the same bits each time."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from real_line import (
    UNIT_TOKENS,
    change_run,
    journal_summary,
    last_update,
    launch,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run_here,
    state_of,
    tensors_of,
)
from typer.testing import CliRunner

from nstrain.base.errors import ExitCode, Refusal
from nstrain.cli.main import app
from nstrain.data.branch import branch_line
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.val import held_out_digest
from nstrain.line.branches import read_branches
from nstrain.line.paths import LinePaths
from nstrain.ops import branch as branch_module
from nstrain.ops.branch import Branched, make_branch
from nstrain.ops.branch_plan import StageOptions, parse_plan
from nstrain.ops.check import check_line
from nstrain.record.journal_reader import JournalReader
from nstrain.settings.model import dump
from nstrain.settings.run import load_run
from nstrain.train.schedule import learning_rate

ROW_TOKENS = 16
PLAN = "decay:1000,long:600"
FORK_UPDATE, FORK_TOKENS = 13, 2016
STAGES = [960, 576]
"""Whole segments of 3 shares and 32 tokens each."""


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    """A trunk with a batch ramp and an average of its weights, three updates into its second cycle."""
    root = tmp_path_factory.mktemp("trunk")
    data = make_data_line(root, 3)
    prepare(data.work, 2)
    ramp = [{"from": 0, "to": 1000, "tokens": 128}, {"from": 1000, "to": None, "tokens": 192}]
    paths = make_run(
        root / "run",
        data,
        rows=[{"from_cycle": 1, "row_tokens": ROW_TOKENS}],
        tokens_per_update=ramp,
        ema={"horizon_tokens": 1000, "from_tokens": 500},
        learning_rate=[
            {"from": 0, "to": 640, "shape": "linear", "start": 0.0, "end": 0.01},
            {"from": 640, "shape": "constant", "start": 0.01},
        ],
    )
    assert run_here(paths, stop_after=17) == ExitCode.STOPPED
    return paths


def branch(trunk: LinePaths, root: Path, plan: str = PLAN, at_cycle: int = 1, **more: Any) -> Branched:
    """A branch in `root`/run with its data line in `root`/data, both made here."""
    options = StageOptions(**more.pop("options", {}))
    root.mkdir(exist_ok=True)
    where = (root / "run", trunk.root, at_cycle, parse_plan(plan), plan, root / "data")
    return make_branch(*where, options=options, **more)


@pytest.fixture(scope="module")
def through(trunk: LinePaths, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    """A branch run through without an interruption."""
    root = tmp_path_factory.mktemp("through")
    made = branch(trunk, root)
    prepare(made.data.work, 2)
    assert run_here(LinePaths(root / "run")) == ExitCode.DONE
    return LinePaths(root / "run")


def fork_of(trunk: LinePaths) -> int:
    """The update at the end of the trunk's first cycle."""
    return next(u for u in trunk.checkpoint_updates() if state_of(trunk, u)["tokens"] == FORK_TOKENS)


def test_it_takes_over_everything_at_the_fork(trunk: LinePaths, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in sorted(trunk.root.rglob("*")) if p.is_file() and "lock" not in p.name}
    made = branch(trunk, tmp_path)
    paths, update = LinePaths(tmp_path / "run"), fork_of(trunk)
    assert made.update == update
    assert paths.checkpoint_updates() == [update]
    assert tensors_of(paths, update) == tensors_of(trunk, update)
    assert {kind for kind, _ in tensors_of(paths, update)} == {"weights", "exp_avg", "exp_avg_sq", "ema"}
    theirs, ours = state_of(trunk, update), state_of(paths, update)
    for field in ("update", "tokens", "optimizer", "threads", "versions"):
        assert ours[field] == theirs[field]
    assert (ours["position"]["cycle"], ours["position"]["row"], ours["reason"]) == (1, 0, "start")
    parent_rows = rows_of(trunk)[: update + 1]
    assert rows_of(paths) == [{**row, "generation": 0} for row in parent_rows], "marked as the parent's"
    (entry,) = read_branches(trunk)
    assert (entry.run, entry.id, entry.at_cycle, entry.update) == (str(paths.root), made.settings.id, 1, update)
    after = {p: p.read_bytes() for p in sorted(trunk.root.rglob("*")) if p.is_file() and "lock" not in p.name}
    after.pop(trunk.branches)
    assert after == {p: data for p, data in before.items() if p != trunk.branches}, "the trunk is as it was"
    (consumer,) = read_consumers(made.data.work)
    assert (consumer.id, consumer.cycle, consumer.row, consumer.tokens) == (made.settings.id, 1, 0, FORK_TOKENS)


def test_its_stages_end_with_cycles_of_its_data_line(trunk: LinePaths, through: LinePaths) -> None:
    settings = load_run(through.run_json)
    data = DataLine.open(Path(settings.data.work))
    assert [data.cycle_plan(k).tokens for k in (1, 2)] == STAGES
    assert [(p.from_cycle, p.row_tokens) for p in settings.rows] == [(1, ROW_TOKENS), (2, UNIT_TOKENS)]
    assert settings.tokens_per_update == load_run(trunk.run_json).tokens_per_update
    end = FORK_TOKENS + STAGES[0]
    rates = {p: learning_rate(settings.learning_rate, p) for p in (320, FORK_TOKENS, end, end + 1, end + 10**6)}
    assert rates == {320: 0.005, FORK_TOKENS: 0.01, end: 0.001, end + 1: 0.001, end + 10**6: 0.001}
    assert learning_rate(settings.learning_rate, FORK_TOKENS + STAGES[0] // 2) == pytest.approx(0.0055, rel=1e-12)


def test_it_is_trained_from_the_fork_on(through: LinePaths, trunk: LinePaths) -> None:
    update = fork_of(trunk)
    rows = rows_of(through)
    assert [int(row["update"]) for row in rows] == list(range(len(rows)))
    assert [int(row["generation"]) for row in rows] == [0] * (update + 1) + [1] * (len(rows) - update - 1)
    own = rows[update + 1 :]
    assert own[0]["tokens"] == FORK_TOKENS + 192
    assert own[-1]["tokens"] == FORK_TOKENS + sum(STAGES)
    assert own[0]["train/learning_rate"] < 0.01
    at_end = [row for row in own if row["tokens"] >= FORK_TOKENS + STAGES[0]]
    assert {row["train/learning_rate"] for row in at_end} == {0.001}
    assert {int(row["row_tokens"]) for row in at_end[1:]} == {UNIT_TOKENS}
    kept = {u: state_of(through, u)["reason"] for u in through.checkpoint_updates() if state_of(through, u)["kept"]}
    assert list(kept.values()) == ["start", "length_change", "end"]
    (opened,) = read_consumers(DataLine.open(Path(load_run(through.run_json).data.work)).work)
    assert (opened.cycle, opened.row) == (3, 0)


def test_started_twice_and_killed_it_ends_with_the_same_bits(
    through: LinePaths, trunk: LinePaths, tmp_path: Path
) -> None:
    """Another branch of the same trunk on a data line of its own, killed twice with kill -9: equal to the first."""
    made = branch(trunk, tmp_path)
    prepare(made.data.work, 2)
    paths = LinePaths(tmp_path / "run")
    draw = random.Random(random.SystemRandom().random())
    seen = []
    for _ in range(2):
        seen.append((last_update(paths) or 0) + draw.randint(1, 3))
        process = launch(paths, NSTRAIN_KILL_POINT=f"train:{2 * draw.randint(1, 3)}")
        assert process.wait(timeout=60) == -signal.SIGKILL, seen
    assert run_here(paths) == ExitCode.DONE
    end = last_update(through)
    assert end is not None
    assert journal_summary(paths) == journal_summary(through)
    assert journal_summary(paths)[1] == 0
    assert tensors_of(paths, end) == tensors_of(through, end)


def test_it_keeps_what_the_trunk_was_trained_with_at_the_fork(trunk: LinePaths, tmp_path: Path) -> None:
    """The trunk was changed on purpose and trained on since: that is the trunk's, and told. What is free is of now."""
    later = LinePaths(tmp_path / "trunk")
    shutil.copytree(trunk.root, later.root)
    then = load_run(later.run_json)
    change_run(
        later,
        allow_changes=["learning_rate", "optimizer", "tokens_per_update", "ema", "validation"],
        learning_rate=[{"from": 0, "shape": "constant", "start": 2e-5}],
        optimizer={"clip_norm": 1.0, "weight_decay": 0.5},
        tokens_per_update=256,
        ema=None,
        validation={"every_updates": 3, "rows_per_source": 2},
        checkpoints={"every_updates": 7, "every_minutes": None},
        lengths={"16": {"micro_rows": 1}, "32": {"micro_rows": 1}},
        tracker={"service": "wandb", "project": "spikes"},
    )
    made = branch(later, tmp_path / "b", options={"tokens_per_update": 192})
    settings = load_run(tmp_path / "b" / "run" / "run.json")
    assert settings == made.settings
    assert learning_rate(settings.learning_rate, FORK_TOKENS) == 0.01
    assert (settings.optimizer, settings.ema, settings.model) == (then.optimizer, then.ema, then.model)
    assert [settings.batch_tokens_at(p) for p in (0, 1500, FORK_TOKENS)] == [128, 192, 192]
    assert (settings.validation.rows_per_source, settings.validation.every_updates) == (3, 3)
    assert (settings.checkpoints.every_updates, settings.lengths["16"].micro_rows) == (7, 1)
    assert settings.tracker is not None
    assert settings.tracker.project == "spikes", "it is shown where its trunk is now"
    assert settings.allow_changes == ()
    told = {difference.split(".")[0].split()[0] for difference in made.changed_since}
    assert told == {"learning_rate", "optimizer", "tokens_per_update", "ema", "validation"}
    assert "optimizer.weight_decay was 0.1 and is now 0.5" in made.changed_since
    prepare(made.data.work, 1)
    assert run_here(LinePaths(tmp_path / "b" / "run"), stop_after=FORK_UPDATE + 1) == ExitCode.STOPPED


def test_a_trunk_that_only_grew_beyond_the_fork_has_not_changed(trunk: LinePaths, tmp_path: Path) -> None:
    later = LinePaths(tmp_path / "trunk")
    shutil.copytree(trunk.root, later.root)
    rates = dump(load_run(later.run_json))["learning_rate"]
    rates.append({"from": 5000, "to": 6000, "shape": "linear", "start": 0.01, "end": 0.0})
    rows = [{"from_cycle": 1, "row_tokens": ROW_TOKENS}, {"from_cycle": 3, "row_tokens": UNIT_TOKENS}]
    change_run(later, learning_rate=rates, rows=rows, print_every=1)
    assert branch(later, tmp_path / "b").changed_since == ()


def test_updates_that_no_cycle_holds_are_noted(trunk: LinePaths, tmp_path: Path) -> None:
    made = branch(trunk, tmp_path / "b", options={"tokens_per_update": 992})
    assert [note.split(":")[0] for note in made.notes] == [
        "updates of 992 tokens are larger than a data cycle (960 tokens from cycle 1 on)",
        "updates of 992 tokens are larger than a data cycle (576 tokens from cycle 2 on)",
    ]
    assert branch(trunk, tmp_path / "c").notes == ()


def test_the_command_tells_what_was_changed_what_is_odd_and_what_comes_next(trunk: LinePaths, tmp_path: Path) -> None:
    later = LinePaths(tmp_path / "trunk")
    shutil.copytree(trunk.root, later.root)
    change_run(later, optimizer={"clip_norm": 1.0, "weight_decay": 0.5})

    def command(name: str, *more: str) -> str:
        where = (str(tmp_path / name), "--from", str(later.root), "--at-cycle", "1", "--plan", PLAN)
        done = CliRunner().invoke(app, ["branch", *where, "--data", str(tmp_path / f"{name}-data"), *more])
        assert done.exit_code == 0, done.output
        return " ".join(done.stdout.split())

    shown = command("b", "--tokens-per-update", "992")
    assert "keeps what it was trained with at the fork: optimizer.weight_decay was 0.1 and is now 0.5" in shown
    assert "note: updates of 992 tokens are larger than a data cycle (960 tokens from cycle 1 on)" in shown
    run = tmp_path / "b"
    assert f"next: nstrain tune {run} (rows of a new length go through one at a time until it has)" in shown
    assert f"nstrain check {run} then: nstrain run {run}" in shown
    value = json.loads(command("c", "--json"))
    assert value["changed_since"] == ["optimizer.weight_decay was 0.1 and is now 0.5"]
    assert value["notes"] == []


def test_it_begins_with_its_own_held_out_text(trunk: LinePaths, through: LinePaths) -> None:
    data = DataLine.open(Path(load_run(through.run_json).data.work))
    theirs = DataLine.open(Path(load_run(trunk.run_json).data.work))
    recorded = {state_of(through, update)["held_out"] for update in through.checkpoint_updates()}
    assert recorded == {held_out_digest(data)}
    assert {state_of(trunk, update)["held_out"] for update in trunk.checkpoint_updates()} == {held_out_digest(theirs)}


def test_before_its_first_update_its_fixed_fields_are_fixed_already(trunk: LinePaths, tmp_path: Path) -> None:
    """It begins with a checkpoint: an entry in allow_changes is what lets a rate be corrected."""
    branch(trunk, tmp_path)
    paths = LinePaths(tmp_path / "run")
    settings = next(found for found in check_line(paths.root, quick=True) if found.name == "settings")
    assert settings.ok
    assert "begins with a checkpoint" in settings.message
    rates = dump(load_run(paths.run_json))["learning_rate"]
    rates[-2]["end"] = 0.002
    change_run(paths, learning_rate=rates)
    with pytest.raises(Refusal, match="learning_rate"):
        run_here(paths)
    change_run(paths, allow_changes=["learning_rate"])
    settings = next(found for found in check_line(paths.root, quick=True) if found.name == "settings")
    assert "changed on purpose: learning_rate" in settings.message
    prepare(Path(load_run(paths.run_json).data.work), 1)
    assert run_here(paths, stop_after=FORK_UPDATE + 1) == ExitCode.STOPPED


def test_a_branch_on_a_data_line_of_its_own_mixture(trunk: LinePaths, tmp_path: Path) -> None:
    """Made beforehand with `data branch`: a cycle may end inside a stage, the last ends with the plan."""
    trunk_work = Path(load_run(trunk.run_json).data.work)
    data = branch_line(tmp_path / "data", trunk_work, 1, 480, cycles=3, recipe={"books": 1, "code": 1})
    sizes = [data.cycle_plan(k).tokens for k in (1, 2, 3)]
    made = branch(trunk, tmp_path, plan="decay:1000,long:500")
    assert not made.made_data
    assert [(stage.first_cycle, stage.cycles, stage.tokens) for stage in made.stages] == [
        (1, 2, sizes[0] + sizes[1]),
        (3, 1, sizes[2]),
    ]
    with pytest.raises(Refusal, match="goes on after the plan"):
        make_branch(tmp_path / "other", trunk.root, 1, parse_plan("decay:500"), "decay:500", tmp_path / "data")


def test_a_branch_of_a_branch(through: LinePaths, trunk: LinePaths, tmp_path: Path) -> None:
    made = branch(through, tmp_path, plan="long:600", at_cycle=2)
    paths = LinePaths(tmp_path / "run")
    assert made.settings.branch is not None
    assert made.settings.branch.tokens == FORK_TOKENS + sum(STAGES)
    assert rows_of(paths) == [{**row, "generation": 0} for row in rows_of(through)]
    assert learning_rate(made.settings.learning_rate, made.settings.branch.tokens + 1) == 0.001, "held"
    prepare(made.data.work, 1)
    assert run_here(paths) == ExitCode.DONE


def test_options_arrive(trunk: LinePaths, tmp_path: Path) -> None:
    options = {"decay_shape": "sqrt", "final_lr": 0.0, "long_lr": 0.003, "tokens_per_update": 160}
    made = branch(trunk, tmp_path, options=options)
    end = FORK_TOKENS + STAGES[0]
    rates = [learning_rate(made.settings.learning_rate, p) for p in (FORK_TOKENS + STAGES[0] // 4, end, end + 1)]
    assert rates == [0.005, 0.0, 0.003]
    assert [made.settings.batch_tokens_at(p) for p in (0, 1500, FORK_TOKENS, end)] == [128, 192, 160, 160]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("decay", "expected stages like decay:10e9,long:2e9, found 'decay'"),
        ("warm:5", "found 'warm:5'"),
        ("decay:0", "tokens of decay: expected a positive whole number"),
        ("long:1,decay:1", "expected a decay, a long stage, or a decay followed by a long stage"),
        ("decay:1,decay:1", "expected a decay"),
        ("", "expected stages"),
    ],
)
def test_a_plan_that_is_none_is_refused(plan: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        parse_plan(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_cycle": 2}, "no checkpoint at the end of data cycle 2; it has those of cycles 1"),
        ({"plan": "decay:5"}, "--plan: decay:5: .*period of K = 3 units"),
        ({"options": {"final_lr": 0.5}}, "a decay cannot end at the rate 0.5: the trunk's is 0.01 at the fork"),
        ({"options": {"tokens_per_update": 48}}, "updates of 48 tokens are not a whole number of rows of 32"),
        ({"options": {"long_row_tokens": 24}}, "do not divide the data line's unit of 32"),
        ({"options": {"long_row_tokens": 16}}, "long rows of 16 tokens are no longer than the trunk's of 16"),
        ({"options": {"decay_shape": "step"}}, "'learning_rate.2.shape'"),
        ({"options": {"final_lr": 0.0}}, "the long stage would learn nothing at the rate 0: .*--long-lr"),
        ({"plan": "long:600", "options": {"final_lr": 0.0}}, "--final-lr is of a decay stage, and the plan has none"),
        ({"plan": "long:600", "options": {"decay_shape": "sqrt"}}, "--decay-shape is of a decay stage"),
        ({"plan": "decay:600", "options": {"long_lr": 1e-9}}, "--long-lr is of a long stage, and the plan has none"),
        ({"plan": "decay:600", "options": {"long_row_tokens": 7}}, "--long-row-tokens is of a long stage"),
        ({"recipe": {"poems": 1}}, "no source is called poems"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    trunk: LinePaths, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refusal, match=message):
        branch(trunk, tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_the_record_or_the_data_line_does_not_fit_is_no_place_to_fork_from(
    trunk: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of before a rollback, put back from a copy; one that was trained on another cycle."""
    with monkeypatch.context() as patch:
        patch.setattr(JournalReader, "generation_at", lambda journal, update: 7)
        with pytest.raises(Refusal, match="is of generation 1, .* in generation 7"):
            branch(trunk, tmp_path)
    state_at = branch_module._state_at_cycle_end

    def trained_on_another(paths: LinePaths, cycle: int) -> dict[str, Any]:
        state = state_at(paths, cycle)
        previous = {**state["position"]["previous"], "manifest_sha256": "another"}
        return {**state, "position": {**state["position"], "previous": previous}}

    monkeypatch.setattr(branch_module, "_state_at_cycle_end", trained_on_another)
    with pytest.raises(Refusal, match="the parent's checkpoint was trained on another;"):
        branch(trunk, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trunk_that_lost_its_latest_has_its_ends_of_cycles(trunk: LinePaths, tmp_path: Path) -> None:
    latest = trunk.latest.read_bytes()
    trunk.latest.unlink()
    try:
        with pytest.raises(Refusal, match="no checkpoint at the end of data cycle 2; it has those of cycles 1"):
            branch(trunk, tmp_path, at_cycle=2)
    finally:
        trunk.latest.write_bytes(latest)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"branches": [{"run": "b"}]}'])
def test_a_damaged_list_of_branches_is_told_before_anything_is_made(
    trunk: LinePaths, tmp_path: Path, content: bytes
) -> None:
    before = trunk.branches.read_bytes() if trunk.branches.exists() else b'{"branches": []}'
    trunk.branches.write_bytes(content)
    try:
        with pytest.raises(Refusal, match=rf"{trunk.branches}: expected .*`rm {trunk.branches}`"):
            branch(trunk, tmp_path)
    finally:
        trunk.branches.write_bytes(before)
    assert list(tmp_path.iterdir()) == []


def test_existing_directories_are_left_alone(trunk: LinePaths, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes").write_text("mine")
    with pytest.raises(Refusal, match="exists already and is no data line"):
        branch(trunk, tmp_path)
    (tmp_path / "data" / "notes").unlink()
    branch(trunk, tmp_path)
    with pytest.raises(Refusal, match="exists already"):
        branch(trunk, tmp_path)
    with pytest.raises(Refusal, match="is a data line, but not a fork of"):
        make_branch(tmp_path / "b", trunk.root, 1, parse_plan("long:600"), "", Path(load_run(trunk.run_json).data.work))


def test_longer_rows_than_the_trunks_unit_get_held_out_text_of_their_own(trunk: LinePaths, tmp_path: Path) -> None:
    made = branch(trunk, tmp_path, plan="long:600", options={"long_row_tokens": 2 * UNIT_TOKENS})
    assert made.data.unit_tokens == 2 * UNIT_TOKENS
    assert json.loads((made.data.work / "val" / "index.json").read_text())["unit_tokens"] == 2 * UNIT_TOKENS
    assert "losses before the fork and after it are of different text" in made.notes[0]


def test_it_is_made_again_after_a_kill(trunk: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the data line is there and the line is not: the same command takes it and goes on."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nstrain.ops.branch.fork_checkpoint", fail)
        with pytest.raises(KeyboardInterrupt):
            branch(trunk, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    made = branch(trunk, tmp_path)
    assert not made.made_data
    assert [stage.tokens for stage in made.stages] == STAGES
