"""`new_line`: what it decides, what it refuses before it writes, and what a kill at any instant leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_lines import CYCLE_TOKENS, CYCLES, ROW_TOKENS, UNIT_TOKENS, UPDATE_TOKENS, make_data_line
from typer.testing import CliRunner

from nstrain.base.errors import NstrainError, Refusal
from nstrain.cli.main import app
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.ops import new as new_module
from nstrain.ops.new import new_line
from nstrain.settings.model import dump
from nstrain.settings.run import RunSettings, load_run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    """A data line of three cycles."""
    return make_data_line(tmp_path_factory.mktemp("data"))


def make(run: Path, data: DataLine, **options: Any) -> RunSettings:
    """A line with the fewest settings that one must give."""
    least = {"preset": "tiny-32k", "peak_lr": 1e-3, "tokens_per_update": UPDATE_TOKENS, "device": "cpu"}
    arguments: dict[str, Any] = {**least, **options}
    return new_line(run, work=arguments.pop("work", data.work), **arguments)


def tree(directory: Path) -> list[str]:
    """Every path below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_defaults_come_from_the_data_line_and_are_visible(tmp_path: Path, data: DataLine) -> None:
    settings = make(tmp_path / "run", data)
    assert load_run(tmp_path / "run" / "run.json") == settings
    assert settings.data.work == str(data.work)
    assert settings.row_tokens_at(1) == UNIT_TOKENS  # below 4096
    assert settings.model.config["vocab_size"] == 384  # the tokenizer's, padded to 128
    total = CYCLES * CYCLE_TOKENS
    warm_up, constant = settings.learning_rate
    assert constant.shape == "constant"
    assert constant.from_tokens % UPDATE_TOKENS == 0
    assert 0 < constant.from_tokens <= max(UPDATE_TOKENS, 0.03 * total)
    assert (warm_up.to_tokens, warm_up.start, warm_up.end, constant.start) == (constant.from_tokens, 0.0, 1e-3, 1e-3)
    assert settings.ema is None
    assert settings.branch is None
    assert settings.threads == len(os.sched_getaffinity(0))
    assert settings.optimizer.clip_norm == 1.0
    assert set(dump(settings)) == set(RunSettings.model_fields)
    assert tree(tmp_path / "run") == ["checkpoints", "locks", "run.json"]


@pytest.mark.parametrize(("found", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_used_where_there_is_one(
    tmp_path: Path, data: DataLine, monkeypatch: pytest.MonkeyPatch, found: bool, device: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: found)
    assert make(tmp_path / "run", data, device=None).device == device


def test_first_consumer_entry(tmp_path: Path, data: DataLine) -> None:
    settings = make(tmp_path / "run", data, line_id="mine")
    entry = next(consumer for consumer in read_consumers(data.work) if consumer.id == "mine")
    assert (entry.cycle, entry.row, entry.tokens) == (1, 0, 0)
    assert entry.run == str(tmp_path / "run")
    assert settings.id == "mine"


def test_every_option_arrives(tmp_path: Path, data: DataLine) -> None:
    ramp = [{"from": 0, "to": CYCLE_TOKENS, "tokens": 128}, {"from": CYCLE_TOKENS, "to": None, "tokens": 256}]
    settings = make(
        tmp_path / "run",
        data,
        tokens_per_update=ramp,
        row_tokens=ROW_TOKENS,
        micro_rows=2,
        recompute="all",
        warmup_tokens=640,
        decay_tokens=CYCLE_TOKENS,
        decay_shape="sqrt",
        final_lr=1e-5,
        ema_horizon_tokens=512,
        ema_from_tokens=0,
        optimizer={"beta1": 0.8, "weight_decay_batch": 256},
        validation={"every_updates": 3, "rows_per_source": 5},
        checkpoints={"every_updates": 7, "keep_last": 4},
        seed=9,
        threads=1,
        ahead_cycles=2,
        print_every=1,
        tracker={"service": "wandb", "project": "spikes"},
    )
    value = dump(settings)
    assert value["tokens_per_update"] == ramp
    assert value["rows"] == [{"from_cycle": 1, "row_tokens": ROW_TOKENS}]
    assert value["lengths"] == {"64": {"micro_rows": 2, "recompute": "all"}}
    assert value["learning_rate"] == [
        {"from": 0, "to": 640, "shape": "linear", "start": 0.0, "end": 1e-3},
        {"from": 640, "to": None, "shape": "constant", "start": 1e-3, "end": None},
        {"from": 2 * CYCLE_TOKENS, "to": 3 * CYCLE_TOKENS, "shape": "sqrt", "start": 1e-3, "end": 1e-5},
    ]
    assert value["ema"] == {"horizon_tokens": 512, "from_tokens": 0}
    assert (settings.optimizer.beta1, settings.optimizer.weight_decay_batch) == (0.8, 256)
    assert (settings.validation.every_updates, settings.validation.rows_per_source) == (3, 5)
    assert (settings.checkpoints.every_updates, settings.checkpoints.keep_last) == (7, 4)
    assert value["tracker"] == {"service": "wandb", "project": "spikes", "entity": None, "base_url": None}
    assert (settings.seed, settings.threads, settings.data.ahead_cycles, settings.print_every) == (9, 1, 2, 1)


def test_a_horizon_alone_says_where_the_average_begins(tmp_path: Path, data: DataLine) -> None:
    settings = make(tmp_path / "run", data, ema_horizon_tokens=700)
    assert dump(settings)["ema"] == {"horizon_tokens": 700, "from_tokens": 700}


def test_default_batch_leaves_updates_enough() -> None:
    assert new_module._default_batch(10_000_000, 256) == 32 * 256
    assert new_module._default_batch(10, 256) == 8 * 256
    assert new_module._default_batch(10**13, 4096) == 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_update": 100}, "positive multiple of the row length, 128 tokens, found 100"),
        ({"tokens_per_update": 0}, "positive multiple of the row length"),
        ({"tokens_per_update": []}, "found none"),
        (
            {"tokens_per_update": [{"from": 0, "to": 999, "tokens": 128}, {"from": 5, "to": None, "tokens": 128}]},
            "each piece must begin where the one before it ends",
        ),
        ({"row_tokens": 48}, "do not divide the data line's unit of 128"),
        ({"row_tokens": 2 * UNIT_TOKENS}, "do not divide the data line's unit of 128"),
        ({"row_tokens": 0}, "do not divide"),
        ({"peak_lr": 0.0}, "the learning rate after warm-up must be greater than 0, found 0"),
        ({"peak_lr": -1e-3}, "must be greater than 0, found -0.001"),
        ({"peak_lr": float("nan")}, "must be greater than 0, found nan"),
        ({"peak_lr": float("inf")}, r"'learning_rate.0.end': input should be a finite number"),
        ({"decay_tokens": CYCLE_TOKENS, "final_lr": 0.1}, "the rate cannot fall from 0.001 to 0.1"),
        ({"final_lr": 0.0}, "the rate's way down has no length"),
        ({"decay_shape": "cosine"}, "the rate's way down has no length"),
        ({"decay_tokens": 0}, "a decay of 0 tokens does not fit"),
        ({"ema_from_tokens": 5}, "say over how many tokens the weights are averaged"),
        ({"ema_horizon_tokens": -1}, "'ema.horizon_tokens': input should be greater than 0"),
        ({"micro_rows": 0}, r"micro_rows"),
        ({"decay_tokens": 10**9}, "does not fit the schedule"),
        ({"decay_tokens": CYCLES * CYCLE_TOKENS}, "the decay begins at 0 tokens, inside the warm-up of"),
        ({"optimizer": {"beta3": 0.5}}, "did you mean 'beta"),
        ({"device": "tpu"}, "'device'"),
        ({"preset": "tiny"}, "no preset is called 'tiny'; there are: .*tiny-32k"),
        ({"line_id": "../evil"}, "expected 1 to 64 of a-z"),
        ({"work": Path("/no/such/line")}, "not a data line"),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path, data: DataLine, options: dict[str, Any], message: str
) -> None:
    before = tree(data.work)
    with pytest.raises(Refusal, match=message):
        make(tmp_path / "run", data, **options)
    assert tree(tmp_path) == []
    assert tree(data.work) == before


def test_what_is_typed_arrives_or_is_refused(tmp_path: Path, data: DataLine) -> None:
    """`--warmup-tokens 0` is none; where nothing can be 0 it is refused, as any other number that cannot be."""

    def typed(name: str, *options: str) -> tuple[int, str]:
        command = ["new", str(tmp_path / name), "--model", "tiny-32k", "--data", str(data.work), "--peak-lr", "1e-3"]
        ran = CliRunner().invoke(app, [*command, *options])
        return ran.exit_code, str(ran.exception)

    assert typed("none", "--warmup-tokens", "0")[0] == 0
    (piece,) = load_run(tmp_path / "none" / "run.json").learning_rate
    assert (piece.from_tokens, piece.shape, piece.start) == (0, "constant", 1e-3)
    averaged = ("--ema-horizon-tokens", "1e3", "--ema-from-tokens", "0")
    assert typed("averaged", *averaged)[0] == 0
    average = load_run(tmp_path / "averaged" / "run.json").ema
    assert average is not None
    assert average.from_tokens == 0
    for option in ("--tokens-per-update", "--decay-tokens", "--ema-horizon-tokens", "--weight-decay-batch"):
        code, said = typed("refused", option, "0")
        assert code != 0
        assert f"{option}: expected a positive whole number of tokens, found '0'" in said
    assert not (tmp_path / "refused").exists()
    assert load_run(tmp_path / "none" / "run.json").tracker is None
    code, said = typed("refused", "--wandb-entity", "lab")
    assert code != 0
    assert "--wandb-entity lab: goes with --wandb-project" in said
    assert typed("shown", "--wandb-project", "spikes", "--wandb-entity", "lab")[0] == 0
    tracker = load_run(tmp_path / "shown" / "run.json").tracker
    assert tracker is not None
    assert (tracker.service, tracker.project, tracker.entity) == ("wandb", "spikes", "lab")


def test_rows_longer_than_the_model_reads(tmp_path: Path, data: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from nstrain.train import model

    config = model.preset_config("tiny-32k", data.vocab_size)
    monkeypatch.setattr(model, "preset_config", lambda preset, vocab_size: {**config, "rope_max_seq_len": ROW_TOKENS})
    assert make(tmp_path / "fits", data).row_tokens_at(1) == ROW_TOKENS
    with pytest.raises(Refusal, match="the model reads 64 at most"):
        make(tmp_path / "run", data, row_tokens=UNIT_TOKENS)
    monkeypatch.setattr(model, "preset_config", lambda preset, vocab_size: {**config, "vocab_size": 128})
    with pytest.raises(Refusal, match="has 128 rows in its vocabulary"):
        make(tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


def test_directory_that_exists(tmp_path: Path, data: DataLine) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("keep")
    with pytest.raises(Refusal, match="exists already"):
        make(tmp_path / "run", data)
    assert tree(tmp_path) == ["run", "run/precious"]


def test_place_that_cannot_be_written(tmp_path: Path, data: DataLine) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot be made"):
        make(tmp_path / "file" / "run", data, line_id="nowhere")
    assert "nowhere" not in [consumer.id for consumer in read_consumers(data.work)]


def test_id_that_is_taken(tmp_path: Path, data: DataLine) -> None:
    make(tmp_path / "one", data, line_id="taken")
    with pytest.raises(Refusal, match="'taken' is taken"):
        make(tmp_path / "two", data, line_id="taken")
    assert not (tmp_path / "two").exists()


def test_data_line_without_held_out_rows(tmp_path: Path) -> None:
    bare = make_data_line(tmp_path, held_out_rows=False)
    with pytest.raises(Refusal, match="run `nstrain data val"):
        make(tmp_path / "run", bare)
    assert not (tmp_path / "run").exists()


def test_decay_of_an_open_ended_schedule(tmp_path: Path) -> None:
    endless = make_data_line(tmp_path, cycles=None)
    with pytest.raises(Refusal, match="open-ended schedule"):
        make(tmp_path / "run", endless, decay_tokens=4096)
    settings = make(tmp_path / "run", endless)
    assert settings.learning_rate[1].from_tokens == 2 * CYCLE_TOKENS  # 2 % of a hundred cycles


def test_killed_between_the_directory_and_the_entry(
    tmp_path: Path, data: DataLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(new_module, "enter_consumer", killed)
        make(tmp_path / "run", data, line_id="cut-short")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert load_run(LinePaths(tmp_path / "run").run_json).id == "cut-short"
    assert "cut-short" not in [consumer.id for consumer in read_consumers(data.work)], "it would hold cycles for ever"


def test_entry_that_cannot_be_written(tmp_path: Path, data: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_module, "enter_consumer", full)
    with pytest.raises(NstrainError, match="was made, but its entry"):
        make(tmp_path / "run", data)
    assert (tmp_path / "run" / "run.json").exists()
