"""examples/minicpm-2b: its run.json is one of this version, and every command of its README is one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from nstrain.cli.main import app
from nstrain.settings.model import dump
from nstrain.settings.run import METRICS_VERSION, RunSettings, load_run
from nstrain.train.model import preset_config, refuse_long_rows

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "minicpm-2b"
VOCABULARY = 130_560
"""MiniCPM5's, which the presets have."""


def commands_of(path: Path) -> list[list[str]]:
    """The words of every `nstrain` command in a page's code blocks, fenced or indented."""
    text = re.sub(r"\$\(\(.*?\)\)", "$N", path.read_text().replace("\\\n", " "))
    lines = re.findall(r"^(?:    )?(nstrain .*)$", text, re.MULTILINE)
    return [shlex.split(line.split("; ")[0], comments=True) for line in lines]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that the words name and its options, as the program reads them. Raises what it says of wrong ones."""
    command: Any = typer.main.get_command(app)
    words = words[1:]
    name = ""
    while hasattr(command, "commands"):  # a group of commands; typer may bring its own click
        name = words.pop(0)
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    assert name
    return name, command.make_context(name, words).params


@pytest.mark.parametrize(
    "page", ["examples/minicpm-2b/README.md", "docs/guide/lines.md", "docs/guide/data.md", "README.md"]
)
def test_every_command_is_understood(page: str) -> None:
    commands = commands_of(ROOT / page)
    assert len(commands) > 3
    for words in commands:
        try:
            parsed([re.sub(r"\$[A-Z]+", "4096", word) for word in words])  # a shell's variables
        except Exception as error:
            pytest.fail(f"{' '.join(words)}: {getattr(error, 'message', error)}")


def test_what_is_no_command_is_noticed() -> None:
    for words in (["nstrain", "nwe", "x"], ["nstrain", "status"], ["nstrain", "stop", "x", "--at-cycle-end", "soon"]):
        with pytest.raises(Exception, match=r"no command nwe|Missing parameter: run|valid integer"):
            parsed(words)


def test_the_example_shows_a_whole_line() -> None:
    names = [words[1] for words in commands_of(EXAMPLE / "README.md")]
    assert set(names) >= {
        *("data", "new", "tune", "check", "run", "status", "lines", "stop"),
        *("branch", "rollback", "verify", "checkpoints"),
    }


def test_its_run_json_is_what_its_command_makes() -> None:
    settings = load_run(EXAMPLE / "run.json")
    assert set(dump(settings)) == set(RunSettings.model_fields)
    assert settings.metrics == METRICS_VERSION
    assert settings.model.config == preset_config("ns-2b", VOCABULARY)
    refuse_long_rows(settings)
    options = next(parsed(w)[1] for w in commands_of(EXAMPLE / "README.md") if w[1] == "new")
    assert options["model"] == settings.model.preset
    assert Path(settings.data.work).name == options["data"]
    assert (settings.device, settings.threads) == (options["device"], options["threads"])
    assert max(piece.start for piece in settings.learning_rate) == options["peak_lr"]
    assert str(settings.optimizer.weight_decay_batch) == options["weight_decay_batch"]
    assert settings.ema is not None
    assert settings.ema.horizon_tokens == settings.ema.from_tokens == float(options["ema_horizon_tokens"])
    assert [settings.batch_tokens_at(p) for p in (0, 4_699_999_999, 4_700_000_000)] == [262_144, 262_144, 393_216]
