"""The table of launch configurations: by card, saved and taken up again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronspark.kernels import launch
from neuronspark.kernels.launch import ANY, Launch, UnfitTable

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_registered", {})
    monkeypatch.setattr(launch, "_in_use", {})
    monkeypatch.setattr(launch, "_launched", set())


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


def test_a_card_that_a_saved_table_does_not_name_keeps_its_own() -> None:
    launch.register("scan", {ANY: Launch({"BLOCK": 64}, 4)})
    launch.use({"scan": {"sm_90": {"blocks": {"BLOCK": 128}, "num_warps": 8}}})
    assert launch.pinned("scan", CPU) == Launch({"BLOCK": 64}, 4)


def test_what_is_saved_is_what_was_launched_or_saved_before() -> None:
    """A kernel that a run has never needed may be gone in a later version."""
    for name in ("scan", "read", "norm"):
        launch.register(name, {ANY: Launch({"BLOCK": 64}, 4)})
    assert launch.used_table() == {}
    launch.pinned("scan", CPU)
    assert launch.used_table() == {"scan": launch.table()["scan"]}
    launch.use({"read": {"any": GOOD}})
    assert list(launch.used_table()) == ["read", "scan"]


GOOD = {"blocks": {"BLOCK": 64}, "num_warps": 4}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([GOOD], "expected launch configurations by kernel"),
        ({"scam": {"any": GOOD}}, "kernel 'scam': expected one of the 1 here, the nearest is 'scan'"),
        ({"scan": GOOD["blocks"]["BLOCK"]}, "kernel 'scan': expected configurations by card, found 64"),
        ({"scan": {"sm_90": None}}, "kernel 'scan', card 'sm_90': expected the fields blocks, num_warps .* found None"),
        ({"scan": {"any": {"blocks": {"BLOCK": 64}}}}, "expected the fields blocks, num_warps .* found blocks$"),
        ({"scan": {"any": {**GOOD, "tiles": 1}}}, r"\(and max_registers, num_stages\), found blocks, num_warps, tiles"),
        ({"scan": {"any": {**GOOD, "blocks": 64}}}, "expected blocks as tile sizes by name, found 64"),
        ({"scan": {"any": {**GOOD, "blocks": {"TILE": 64}}}}, "expected the blocks BLOCK, found TILE"),
        ({"scan": {"any": {**GOOD, "blocks": {}}}}, "expected the blocks BLOCK, found none"),
        ({"scan": {"any": {**GOOD, "blocks": {"BLOCK": 0.5}}}}, "a whole number above 0 as BLOCK, found 0.5"),
        ({"scan": {"any": {**GOOD, "num_warps": None}}}, "a whole number above 0 as num_warps, found None"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_name_and_changes_nothing(table: Any, message: str) -> None:
    launch.register("scan", {ANY: Launch({"BLOCK": 64}, 4)})
    launch.use({"scan": {"any": {**GOOD, "num_warps": 2}}})
    with pytest.raises(UnfitTable, match=message):
        launch.use(table)
    assert launch.pinned("scan", CPU) == Launch({"BLOCK": 64}, 2)


AT_A_START = """
import baselines, neuronspark
from neuronspark.kernels import launch

assert launch.table() == {}, "a kernel is registered where it is first used"
fits = {"trace_scan": {"any": {"blocks": {"BLOCK_K": 64, "CHUNK": 64, "STEP": 16}, "num_warps": 4}}}
neuronspark.use_kernels(fits)
assert list(neuronspark.kernel_table()) == ["trace_scan"]
assert neuronspark.kernel_table()["trace_scan"]["any"]["blocks"] == fits["trace_scan"]["any"]["blocks"]
for package, name in ((neuronspark, "trace_scan"), (neuronspark, "baseline_turn"), (baselines, "baseline_turn")):
    try:
        package.use_kernels({name: {"any": {"blocks": {"CHUNK_TOKENS": 64}, "num_warps": 4}}})
    except ValueError as error:
        print(error)
"""


def test_at_a_start_every_kernel_is_known() -> None:
    """In a process that has run none of them, as a trainer's is when it takes a table up."""
    models = Path(__file__).parents[2] / "benchmarks" / "models"
    code = f"import sys; sys.path.append({str(models)!r})\n{AT_A_START}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = ran.stdout.splitlines()
    assert len(told) == 3, ran.stderr
    assert told[0] == "kernel 'trace_scan', card 'any': expected the blocks BLOCK_K, CHUNK, STEP, found CHUNK_TOKENS"
    assert told[1].startswith("kernel 'baseline_turn': expected one of the ")
    assert told[2] == "kernel 'baseline_turn', card 'any': expected the blocks BLOCK_P, BLOCK_T, found CHUNK_TOKENS"


def test_kernels_are_registered_by_modules_that_a_saved_table_has_imported() -> None:
    sources = Path(launch.__file__).parent.glob("*.py")
    registering = [path.stem for path in sources if "register(" in path.read_text() and path.stem != "launch"]
    assert registering
    assert [name for name in registering if "_triton" not in name] == []
