"""The table of launch configurations: by card, saved and taken up again."""

from __future__ import annotations

import json

import pytest
import torch

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, Launch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_registered", {})
    monkeypatch.setattr(launch, "_in_use", {})


def test_a_card_has_its_own_configuration_and_others_the_common_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.register("scan", {ANY: Launch({"BLOCK": 64}, 4), "sm_90": Launch({"BLOCK": 128}, 8, 3)})
    assert launch.pinned("scan", CPU) == Launch({"BLOCK": 64}, 4)
    monkeypatch.setattr(launch, "card_of", lambda device: "sm_90")
    assert launch.pinned("scan", CPU).options() == {"BLOCK": 128, "num_warps": 8, "num_stages": 3}
    monkeypatch.setattr(launch, "card_of", lambda device: "sm_120")
    assert launch.pinned("scan", CPU).num_warps == 4


def test_without_a_common_configuration_nothing_is_registered() -> None:
    with pytest.raises(ValueError, match="scan.*any"):
        launch.register("scan", {"sm_90": Launch({}, 4)})


def test_a_saved_table_outlives_a_change_of_what_is_pinned() -> None:
    launch.register("scan", {ANY: Launch({"BLOCK": 64}, 4)})
    saved = json.loads(json.dumps(launch.table()))
    launch.register("scan", {ANY: Launch({"BLOCK": 32}, 1)})
    launch.register("read", {ANY: Launch({"BLOCK": 16}, 2)})
    assert launch.pinned("scan", CPU).blocks == {"BLOCK": 32}
    launch.use(saved)
    assert launch.pinned("scan", CPU) == Launch({"BLOCK": 64}, 4)
    assert launch.pinned("read", CPU) == Launch({"BLOCK": 16}, 2)
    assert launch.table()["scan"] == saved["scan"]
    launch.use({})
    assert launch.pinned("scan", CPU).blocks == {"BLOCK": 32}
