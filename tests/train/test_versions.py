"""What decides a line's bits, as checkpoints keep it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from nstrain.train import versions as versions_module
from nstrain.train.model import package_directory
from nstrain.train.versions import GATING, code_digest, machine, software, versions

ROOT = Path(__file__).parents[2]


def test_everything_is_said_and_fits_json() -> None:
    found = versions("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found.items() >= GATING.items()
    assert (found["model_package"], found["torch"]) == ("neuronspark", torch.__version__)
    assert re.fullmatch(r"\w+ (AVX2|AVX512|DEFAULT|.+)", found["device"])
    assert found["cuda"] == torch.version.cuda


def test_the_reference_names_every_version() -> None:
    text = (ROOT / "docs" / "reference" / "checkpoint.md").read_text()
    for name in (*software(), *machine("cpu"), "driver", "cublas"):
        assert f"`{name}`" in text, name


def test_the_code_is_known_by_its_bytes_and_names(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(package_directory(), first)
    shutil.copytree(package_directory(), second)
    assert code_digest(first) == code_digest(second) == software()["model_code"]
    (second / "notes.txt").write_text("no code")
    assert code_digest(second) == software()["model_code"]
    with (second / "kernels" / "linear.py").open("a") as file:
        file.write("\n")
    edited = code_digest(second)
    (second / "kernels" / "linear.py").rename(second / "kernels" / "linear2.py")
    assert len({code_digest(first), edited, code_digest(second)}) == 3


def test_what_cannot_be_read_of_a_card_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions_module, "DRIVER_FILE", tmp_path / "missing")
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    assert machine.__wrapped__("cuda") == {"device": "made up", "driver": None, "cublas": None}
    (tmp_path / "missing").write_text("580.159.04\n")
    assert machine.__wrapped__("cuda")["driver"] == "580.159.04"


@pytest.mark.gpu
def test_on_a_card() -> None:
    found = versions("cuda")
    assert found["device"] == torch.cuda.get_device_name()
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["cublas"])
    assert found["cublas"].startswith(f"{torch.version.cuda.split('.')[0]}.")
    assert isinstance(found["cudnn"], int)
    assert found["triton"]
    print(found)
