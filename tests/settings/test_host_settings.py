"""host.json: where it is looked for, what is refused, and that its environment reaches children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nstrain
from nstrain.base.errors import Refusal
from nstrain.settings.host import HOST_FILE_VARIABLE, HostSettings, host_file, load_host


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(HOST_FILE_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def test_without_a_file_the_defaults_hold() -> None:
    assert load_host() == HostSettings()


def test_the_file_in_the_home_directory_is_found(own_home: Path) -> None:
    write(own_home / ".nstrain" / "host.json", {"work_root": "/big"})
    assert load_host().work_root == "/big"


def test_a_path_may_begin_in_the_home_directory(own_home: Path) -> None:
    write(own_home / ".nstrain" / "host.json", {"work_root": "~/lines", "tokenizer": "~/t.json"})
    assert load_host() == HostSettings(work_root=f"{own_home}/lines", tokenizer=f"{own_home}/t.json")


def test_a_named_file_comes_first_and_must_exist(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(own_home / ".nstrain" / "host.json", {"work_root": "/big"})
    monkeypatch.setenv(HOST_FILE_VARIABLE, str(tmp_path / "other.json"))
    assert host_file() == tmp_path / "other.json"
    with pytest.raises(Refusal, match=r"other.json: named by \$NSTRAIN_HOST, but there is no such file"):
        load_host()
    write(tmp_path / "other.json", {"tokenizer": "/t.json"})
    assert load_host() == HostSettings(tokenizer="/t.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"work_rot": "/x"}, r"unknown field 'work_rot' \(did you mean 'work_root'\?\)"),
        ({"env": {"A": 1}}, "field 'env.A': input should be a valid string, found 1"),
        ({"env": ["A=1"]}, "field 'env'"),
        ({"tokenizer": 3}, "field 'tokenizer'"),
        ({"work_root": "lines"}, "field 'work_root': expected a path that begins with / or ~, found 'lines'"),
        ({"tokenizer": "./t.json"}, "field 'tokenizer': expected a path that begins with / or ~"),
        ([], "input should be an object"),
        ({"neuronspark": "/nowhere"}, "field 'neuronspark': expected a directory that holds the package neuronspark/"),
    ],
)
def test_wrong_files_are_refused(own_home: Path, value: Any, message: str) -> None:
    path = write(own_home / ".nstrain" / "host.json", value)
    with pytest.raises(Refusal, match=message) as caught:
        load_host()
    assert str(path) in str(caught.value)


def child(program: str, **variables: str) -> str:
    env = {**os.environ, **variables, "PYTHONPATH": str(Path(nstrain.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_environment_is_in_force_here_and_in_children(tmp_path: Path) -> None:
    path = write(tmp_path / "host.json", {"env": {"NSTRAIN_TEST_A": "one", "NSTRAIN_TEST_B": "from host"}})
    program = """
import os, subprocess, sys
from nstrain.settings.host import enter_host
assert "torch" not in sys.modules
enter_host()
print(os.environ["NSTRAIN_TEST_A"], os.environ["NSTRAIN_TEST_B"])
inner = "import os; from nstrain.settings.host import load_host; print(os.environ['NSTRAIN_TEST_A'], load_host().env)"
subprocess.run([sys.executable, "-c", inner], check=True)
"""
    lines = child(program, NSTRAIN_HOST=str(path), NSTRAIN_TEST_B="from outside").splitlines()
    assert lines[0] == "one from host"
    assert lines[1] == "one {'NSTRAIN_TEST_A': 'one', 'NSTRAIN_TEST_B': 'from host'}"


def test_it_refuses_to_come_after_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "host.json", {"env": {"A": "1"}})
    program = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
from nstrain.settings.host import enter_host
try:
    enter_host()
except AssertionError as error:
    print(error)
"""
    assert "before torch is imported" in child(program, NSTRAIN_HOST=str(path))


def test_another_model_package_is_found_first(tmp_path: Path) -> None:
    (tmp_path / "models" / "neuronspark").mkdir(parents=True)
    (tmp_path / "models" / "neuronspark" / "__init__.py").write_text("mine = True\n")
    path = write(tmp_path / "host.json", {"neuronspark": str(tmp_path / "models")})
    program = "from nstrain.settings.host import enter_host; enter_host(); import neuronspark; print(neuronspark.mine)"
    assert child(program, NSTRAIN_HOST=str(path)) == "True\n"


def test_a_package_of_another_name_is_named_by_its_own_directory(tmp_path: Path) -> None:
    (tmp_path / "models" / "other").mkdir(parents=True)
    (tmp_path / "models" / "other" / "__init__.py").write_text("mine = True\n")
    path = write(tmp_path / "host.json", {"neuronspark": str(tmp_path / "models" / "other")})
    program = """
import importlib
from nstrain.settings.host import enter_host, model_package
assert model_package() == "neuronspark"
enter_host()
print(model_package(), importlib.import_module(model_package()).mine)
"""
    assert child(program, NSTRAIN_HOST=str(path)) == "other True\n"


def test_the_reference_names_every_field_and_where_the_file_is() -> None:
    reference = Path(nstrain.__file__).parents[1] / "docs" / "reference" / "host.md"
    text = reference.read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")]
    assert {name.strip("`") for name in rows} >= set(HostSettings.model_fields)
    assert f"${HOST_FILE_VARIABLE}" in text
    assert "~/.nstrain/host.json" in text
    examples = [json.loads(block.partition("```")[0]) for block in text.split("```json\n")[1:]]
    for example in examples:
        if "gpus" not in example:
            HostSettings.model_validate_json(json.dumps(example))
