"""Alarms: neurons that are dead or seize, and a loss that jumps - the same whoever forms them, and after a restart."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nstrain.record.alarms import (
    LEAST_LOSSES,
    NEURONS,
    SHOWN_ALARMS,
    WINDOW_UPDATES,
    LossWatch,
    firing_alarms,
    in_short,
    loss_alarms,
)
from nstrain.record.journal import Journal


def trained(loss: float, update: int = 1, skipped: int = 0) -> dict[str, float]:
    return {"update": update, "train/loss": loss, "skipped": skipped}


def test_dead_and_seizing_neurons() -> None:
    quiet = {
        "val_64/dendritic/firing": 0.95,
        "val_64/hippocampal/gate_firing": 0.8,
        "val_64/hippocampal/layer03/ffn_gate_firing": 0.02,
        "val_64/hippocampal/write_max": 1.0,
        "val_64/dendritic/retention_p50": 0.0,
        "train/loss": 0.0,
    }
    assert firing_alarms(quiet) == []
    loud = {
        "val_64/dendritic/layer00/firing": 0.96,
        "val_64/hippocampal/gate_firing": 0.81,
        "val_64/hippocampal/layer03/ffn_up_firing_seg2": 0.0199,
        "val_64/hippocampal/ffn_in_firing": math.nan,
    }
    alarms = firing_alarms(loud)
    assert [alarm.split(" is ")[0] for alarm in alarms] == list(loud)
    assert "signed neurons seize (above 0.95)" in alarms[0]
    assert "excitatory neurons seize (above 0.8)" in alarms[1]
    assert "nearly dead (below 0.02)" in alarms[2]
    assert set(NEURONS.values()) == {"excitatory", "signed"}


@given(st.lists(st.floats(0.5, 12), min_size=LEAST_LOSSES, max_size=2 * WINDOW_UPDATES), st.floats(0.5, 12))
def test_a_jump_is_told_in_deviations_of_the_window(losses: list[float], loss: float) -> None:
    window = losses[-WINDOW_UPDATES:]
    median = statistics.median(window)
    deviation = max(0.02, 1.4826 * statistics.median(abs(x - median) for x in window))
    watch = LossWatch(map(trained, losses))
    assert watch.read(trained(loss)) == {"train/loss_jump": pytest.approx((loss - median) / deviation)}


def test_only_a_jump_is_an_alarm() -> None:
    watch = LossWatch(trained(3 + 0.1 * (-1) ** u) for u in range(40))
    found = [trained(loss) | watch.read(trained(loss)) for loss in (3.2, 5.0, 3.0)]
    alarms = [loss_alarms(row, 8.0) for row in found]
    assert [len(some) for some in alarms] == [0, 1, 0], "a spike in the window hides no later one and makes none"
    assert "train/loss jumped to 5.0000: 12.8 deviations above" in alarms[1][0]
    assert loss_alarms(found[1], 20.0) == []
    assert loss_alarms(found[1] | {"skipped": 1}, 8.0) == [], "a skip is told by itself"
    assert len(loss_alarms(found[1] | {"train/loss_jump": math.nan, "train/loss": math.nan}, 8.0)) == 1


def test_there_is_no_jump_before_there_are_losses() -> None:
    watch = LossWatch()
    for number in range(LEAST_LOSSES):
        assert watch.read(trained(4.0)) == {}, number
    assert watch.read(trained(4.0)) == {"train/loss_jump": 0.0}
    skips = LossWatch(trained(loss, skipped=1) for loss in (math.nan, 9.0) * LEAST_LOSSES)
    assert skips.read(trained(4.0)) == {}


def test_a_watch_from_the_journal_is_the_one_that_saw_it_all(tmp_path: Path) -> None:
    """Whatever update a line goes on from, skips and an abandoned continuation included."""
    losses = [4 + math.sin(7 * u) for u in range(160)]
    with Journal.open(tmp_path / "journal.db", 2) as journal:
        journal.commit(0, {"tokens": 0})
        watch, jumps = LossWatch(), {}

        def row_of(update: int) -> dict[str, float]:
            return trained(losses[update - 1], update, skipped=int(update % 40 == 3))

        for update in range(1, 161):
            jumps[update] = watch.read(row_of(update))
            journal.commit(update, {name: value for name, value in row_of(update).items() if name != "update"})
        for update in (0, 1, 24, 27, 99, 100, 101, 142):
            again = LossWatch.at(journal, update)
            for following in range(update + 1, min(update + 30, 161)):
                assert again.read(row_of(following)) == jumps[following], (update, following)
        # The line goes back to update 120 and on from there, differently: the rows before are those of both.
        journal.begin_generation(121)
        assert LossWatch.at(journal, 120).read(row_of(121)) == jumps[121]
        journal.commit(121, {"train/loss": 9.0, "skipped": 0})
        assert LossWatch.at(journal, 120).read(row_of(121)) == jumps[121]
        assert LossWatch.at(journal, 121).read(row_of(122)) != jumps[122]


def test_many_alarms_are_cut_short() -> None:
    assert in_short([]) == []
    assert in_short(["a"] * SHOWN_ALARMS) == ["a"] * SHOWN_ALARMS
    assert in_short(["a"] * (SHOWN_ALARMS + 3))[-1] == "and 3 more"
