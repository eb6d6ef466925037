"""Which checkpoints stay."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_disk import small_disk

from nstrain.base.errors import Refusal
from nstrain.line.checkpoint import (
    discard_partial_writes,
    load_checkpoint,
    newest_good,
    read_latest,
    write_checkpoint,
)
from nstrain.line.paths import LinePaths
from nstrain.line.retention import (
    Found,
    apply_retention,
    find_checkpoints,
    find_set_aside,
    keep,
    refuse_other_disk,
    remove_checkpoints,
    remove_set_aside,
    set_aside_later,
)

K, R, X = True, False, None  # kept, rolling, unreadable


@pytest.mark.parametrize(
    ("checkpoints", "latest", "keep_last", "stay"),
    [
        # Numbers, not strings, decide: u9 < u10 < u100 (and nine digits are more than eight).
        ({9: R, 10: R, 100: R}, 100, 1, {100}),
        ({9: R, 10: R, 100: R}, 100, 2, {10, 100}),
        ({99_999_998: R, 99_999_999: R, 100_000_000: R}, 100_000_000, 2, {99_999_999, 100_000_000}),
        # A limit of one keeps the newest, never nothing.
        ({10: R}, 10, 1, {10}),
        ({10: R, 20: R}, 20, 1, {20}),
        # Kept ones stay for ever and take no rolling one's place.
        ({0: K, 10: R, 20: K, 30: R, 40: R}, 40, 2, {0, 20, 30, 40}),
        ({0: K, 10: R, 20: R, 30: K}, 30, 1, {0, 20, 30}),
        # `latest` stays though newer ones exist; those are an abandoned continuation's and go, kept or not.
        ({10: R, 20: R, 30: R, 40: K}, 20, 1, {20}),
        ({10: R, 20: R, 30: R}, 20, 2, {10, 20}),
        ({0: K, 100: R, 40: R}, 40, 2, {0, 40}),
        # What cannot be read takes no place and is left for a person; beyond `latest` it goes.
        ({10: R, 20: X, 30: R}, 30, 2, {10, 20, 30}),
        ({10: R, 20: X, 30: R}, 30, 1, {20, 30}),
        ({10: R, 20: X}, 10, 1, {10}),
        # `latest` names something that is not there: nothing more is lost than the rule takes.
        ({10: R, 20: R}, 25, 1, {20}),
        # Without a `latest` nothing is known of the line, so nothing goes.
        ({10: R, 20: R, 30: K, 40: X}, None, 1, {10, 20, 30, 40}),
        ({}, 10, 2, set()),
    ],
)
def test_table(checkpoints: dict[int, bool | None], latest: int | None, keep_last: int, stay: set[int]) -> None:
    assert keep([Found(*item) for item in checkpoints.items()], latest, keep_last) == stay


@given(
    st.dictionaries(st.integers(0, 200), st.sampled_from([True, False, None]), min_size=1),
    st.integers(1, 4),
    st.data(),
)
def test_what_must_stay_stays_and_the_rest_is_bounded(
    kinds: dict[int, bool | None], keep_last: int, data: st.DataObject
) -> None:
    latest = data.draw(st.sampled_from(sorted(kinds)))
    found = [Found(*item) for item in kinds.items()]
    stay = keep(found, latest, keep_last)
    assert latest in stay
    assert all(update in stay for update, kind in kinds.items() if kind is True and update <= latest)
    rolling = sorted(update for update, kind in kinds.items() if kind is False and update <= latest)
    assert [update for update in rolling if update in stay] == rolling[-keep_last:]
    assert max(stay) <= latest
    assert keep(found[::-1], latest, keep_last) == stay
    assert keep([Found(update, kinds[update]) for update in stay], latest, keep_last) == stay


def test_a_lines_directory_stays_bounded_while_it_trains(paths: LinePaths, make_checkpoint: Any) -> None:
    for update in range(0, 101, 10):
        write_checkpoint(paths, make_checkpoint(update, kept=update in (0, 50)))
        removed = apply_retention(paths, keep_last=2)
        assert len(removed) <= 1
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000000", "u00000050", "u00000090", "u00000100"]
    assert newest_good(paths) == paths.checkpoint(100)


def test_a_stale_higher_number_never_costs_the_line_its_newest(paths: LinePaths, make_checkpoint: Any) -> None:
    for update in (10, 20, 900):
        write_checkpoint(paths, make_checkpoint(update))
    write_checkpoint(paths, make_checkpoint(30))
    assert apply_retention(paths, keep_last=1) == ["u00000010", "u00000020", "u00000900"]
    assert newest_good(paths) == paths.checkpoint(30)


def test_unreadable_directories_are_seen_and_left(paths: LinePaths, make_checkpoint: Any) -> None:
    for update in (10, 20, 30, 40):
        write_checkpoint(paths, make_checkpoint(update))
    (paths.checkpoint(10) / "state.json").write_text("{")
    (paths.checkpoint(20) / "state.json").unlink()
    (paths.checkpoints / "u00000035.partial").mkdir()
    assert find_checkpoints(paths) == [Found(10, None), Found(20, None), Found(30, False), Found(40, False)]
    assert apply_retention(paths, keep_last=1) == ["u00000030"]
    assert paths.checkpoint_updates() == [10, 20, 40]


def test_garbage_under_the_name_that_a_deletion_uses_does_not_stop_it(paths: LinePaths, make_checkpoint: Any) -> None:
    for update in (10, 20):
        write_checkpoint(paths, make_checkpoint(update))
    shutil.copytree(paths.checkpoint(10), paths.checkpoints / "u00000010.partial")
    apply_retention(paths, keep_last=1)
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000020"]


def test_of_what_was_moved_to_another_place_only_the_link_goes(paths: LinePaths, make_checkpoint: Any) -> None:
    """Where a checkpoint is a link, or a file stands in its place: removed, replaced, set aside, after a kill."""
    moved = paths.root / "moved"
    moved.mkdir()

    def link(name: str) -> None:
        there = moved / f"{len(list(moved.iterdir()))}"
        (paths.checkpoints / name).rename(there)
        (paths.checkpoints / name).symlink_to(there)

    for update in (10, 20, 30, 40):
        write_checkpoint(paths, make_checkpoint(update))
    for name in ("u00000010", "u00000020", "u00000030"):
        link(name)
    load_checkpoint(paths.checkpoint(30))
    remove_checkpoints(paths, [10])
    (paths.checkpoints / "u00000020").rename(paths.checkpoints / "u00000020.partial")
    (paths.checkpoints / "u00000025.replaced").symlink_to(moved / "1")
    assert len(discard_partial_writes(paths)) == 2
    write_checkpoint(paths, make_checkpoint(30))
    for name in ("u00000040", "u00000025"):
        link(name)
    set_aside_later(paths, 30)
    assert remove_set_aside(paths, 40) == ["u00000040"]
    paths.checkpoint(50).write_text("a file")
    paths.checkpoint(60).symlink_to("nowhere")
    for update in (50, 60):
        write_checkpoint(paths, make_checkpoint(update))
    assert sorted(os.listdir(paths.checkpoints)) == ["latest", "u00000025", "u00000030", "u00000050", "u00000060"]
    assert all((place / "state.json").exists() for place in moved.iterdir()), "what a link names is a person's"


def test_checkpoints_on_another_disk_are_not_half_rolled_back(
    paths: LinePaths, make_checkpoint: Any, tmp_path: Path
) -> None:
    """`mv checkpoints /big && ln -s`: the refusal's command, typed, makes a rollback possible."""
    for update in (10, 20):
        write_checkpoint(paths, make_checkpoint(update))
    with small_disk(tmp_path / "big", 4) as big:
        shutil.move(paths.checkpoints, big / "checkpoints")
        paths.checkpoints.symlink_to(big / "checkpoints")
        with pytest.raises(Refusal, match="lies on another disk") as refused:
            refuse_other_disk(paths)
        subprocess.run(str(refused.value).split("`")[1], shell=True, check=True)
        refuse_other_disk(paths)
        assert set_aside_later(paths, 10) == ["u00000020"]
        assert remove_set_aside(paths, None) == ["u00000020"]
        refuse_other_disk(paths)
        assert set_aside_later(paths, 10) == []


# ---- rolled back -----------------------------------------------------------------------------------------------------


def test_a_rollback_sets_aside_what_came_later_and_it_goes_once_the_line_is_as_far(
    paths: LinePaths, make_checkpoint: Any
) -> None:
    """Numbers decide: u9 < u10 < u100; one that is as far as the newest set aside has replaced it."""
    for update in (9, 10, 99, 100):
        write_checkpoint(paths, make_checkpoint(update, kept=update in (10, 100)))
    assert set_aside_later(paths, 9) == ["u00000010", "u00000099", "u00000100"]
    assert newest_good(paths) == paths.checkpoint(9)
    assert read_latest(paths) == 9
    assert paths.checkpoint_updates() == [9]
    load_checkpoint(paths.set_aside / "u00000099")
    for update in (10, 99):
        write_checkpoint(paths, make_checkpoint(update, seed=1))
        assert remove_set_aside(paths, update) == []
        assert find_set_aside(paths) == {"u00000010": 10, "u00000099": 99, "u00000100": 100}
    write_checkpoint(paths, make_checkpoint(100, seed=1))
    assert remove_set_aside(paths, 100) == ["u00000010", "u00000099", "u00000100"]
    assert not paths.set_aside.exists()
    assert remove_set_aside(paths, 102) == []


def test_a_power_cut_leaves_no_half_checkpoint_under_its_name(
    paths: LinePaths, make_checkpoint: Any, disk_events: list[tuple[str, int]]
) -> None:
    """One that goes loses its name first; a rollback is durable before anything moves, and once it is done."""
    for update in (10, 20, 30):
        write_checkpoint(paths, make_checkpoint(update))
    disk_events.clear()
    apply_retention(paths, keep_last=2)
    assert [what for what, _ in disk_events if what.startswith("removed")] == ["removed u00000010.partial"]
    beside = "synchronised", paths.checkpoints.stat().st_ino
    assert disk_events[-1] == beside
    disk_events.clear()
    set_aside_later(paths, 20)
    latest, moved = (("named", path.stat().st_ino) for path in (paths.latest, paths.set_aside / "u00000030"))
    order = [disk_events.index(event) for event in (latest, beside, moved)]
    assert order == sorted(order)
    assert {*disk_events[order[-1] + 1 :]} == {beside, ("synchronised", paths.set_aside.stat().st_ino)}


def test_at_a_lines_end_it_goes_though_that_came_earlier(paths: LinePaths, make_checkpoint: Any) -> None:
    """With larger batches after the rollback the same schedule ends with a lower number."""
    for update in (10, 20):
        write_checkpoint(paths, make_checkpoint(update))
    set_aside_later(paths, 10)
    assert remove_set_aside(paths, 15) == []
    assert remove_set_aside(paths, None) == ["u00000020"]


def test_two_rollbacks_from_the_same_update_keep_both(paths: LinePaths, make_checkpoint: Any) -> None:
    for seed in (1, 2, 3):
        for update in (10, 20):
            write_checkpoint(paths, make_checkpoint(update, seed=seed))
        set_aside_later(paths, 10)
    assert find_set_aside(paths) == {"u00000020": 20, "u00000020.2": 20, "u00000020.3": 20}
    seeds = [load_checkpoint(paths.set_aside / name).state["settings"]["seed"] for name in find_set_aside(paths)]
    assert seeds == [1, 2, 3]
    assert remove_set_aside(paths, 19) == []
    assert len(remove_set_aside(paths, 20)) == 3


def test_a_rollback_to_the_newest_or_to_none_moves_nothing(paths: LinePaths, make_checkpoint: Any) -> None:
    write_checkpoint(paths, make_checkpoint(10))
    assert set_aside_later(paths, 10) == []
    with pytest.raises(Refusal, match="u00000007: no such checkpoint"):
        set_aside_later(paths, 7)
    assert newest_good(paths) == paths.checkpoint(10)
    assert not paths.set_aside.exists()


def test_what_a_person_has_put_there_stays(paths: LinePaths, make_checkpoint: Any) -> None:
    for update in (10, 20):
        write_checkpoint(paths, make_checkpoint(update))
    set_aside_later(paths, 10)
    os.rename(paths.set_aside / "u00000020", paths.set_aside / "before-the-spike")
    (paths.set_aside / "notes.txt").write_text("a person's")
    write_checkpoint(paths, make_checkpoint(900))
    assert remove_set_aside(paths, 900) == []
    assert sorted(os.listdir(paths.set_aside)) == ["before-the-spike", "notes.txt"]
