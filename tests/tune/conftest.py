"""New training lines for tuning, on one data line, and made-up devices to tune them for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ops"))  # small_lines

from made_up_device import MadeUpDevice
from small_lines import make_small_line

from nstrain.line.paths import LinePaths
from nstrain.settings.run import RunSettings, save_run


@pytest.fixture(scope="session")
def line_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new line that nobody changes."""
    return make_small_line(tmp_path_factory.mktemp("tuned")).root


@pytest.fixture
def paths(line_once: Path, tmp_path: Path) -> LinePaths:
    """A new line of eight rows of 64 tokens an update, in a shape that no tuning chooses."""
    shutil.copytree(line_once, tmp_path / "run")
    paths = LinePaths(tmp_path / "run")
    fields = json.loads(paths.run_json.read_text()) | {"lengths": {"64": {"micro_rows": 3}}}
    save_run(paths.run_json, RunSettings.model_validate_json(json.dumps(fields)))
    return paths


@pytest.fixture
def device(tmp_path: Path) -> MadeUpDevice:
    """A device with room for everything."""
    return MadeUpDevice(tmp_path / "device")
