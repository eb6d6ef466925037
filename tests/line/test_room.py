"""The room that a line's next checkpoints take, while they come and go."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from sized_checkpoints import make_sized_line, put_sized

from nstrain.line.paths import LinePaths
from nstrain.line.retention import apply_retention
from nstrain.line.room import ROOM_BESIDE_BYTES, room_for_checkpoints

SIZE = 50_000
CYCLES = 4


@pytest.fixture
def paths(tmp_path: Path) -> LinePaths:
    """A line that keeps two rolling checkpoints and has none yet."""
    return make_sized_line(tmp_path / "run", keep_last=2)


def write(paths: LinePaths, update: int, name: str | None = None, *, cycle: int = 1, kept: bool = False) -> Path:
    return put_sized(paths, update, SIZE, cycle=cycle, kept=kept, name=name)


def taken(paths: LinePaths) -> int:
    return sum(file.stat().st_size for file in paths.checkpoints.glob("*/*"))


def soon(paths: LinePaths, cycles: int | None = CYCLES) -> int:
    """Up to the next kept one and one more, in checkpoints; what is left free beside them is the same always."""
    needed = room_for_checkpoints(paths.root, cycles)
    assert needed is not None
    assert needed.next_bytes == SIZE + ROOM_BESIDE_BYTES
    return (needed.soon_bytes - 2 * ROOM_BESIDE_BYTES) // SIZE


def test_it_is_what_the_line_takes_up_to_the_next_end_of_a_cycle_and_one_more(paths: LinePaths) -> None:
    write(paths, 0, kept=True)
    assert soon(paths) == 2 + 1 + 1  # two rolling ones, the cycle's end, and the one after it
    write(paths, 4)
    assert soon(paths) == 1 + 1 + 1
    write(paths, 8)
    assert soon(paths) == 1 + 1
    write(paths, 9, cycle=2, kept=True)
    assert soon(paths) == 1 + 1, "the next end"
    assert soon(paths, cycles=None) == 1 + 1
    assert soon(paths, cycles=2) == 1, "nothing comes after the schedule's end"


def test_none_for_a_line_that_is_done_or_has_not_begun_or_is_not_there(paths: LinePaths) -> None:
    assert room_for_checkpoints(paths.root, CYCLES) is None
    assert room_for_checkpoints(paths.root, None) is None
    write(paths, 0, kept=True)
    assert room_for_checkpoints(paths.root, CYCLES) is not None
    write(paths, 40, cycle=CYCLES + 1, kept=True)
    assert room_for_checkpoints(paths.root, CYCLES) is None
    assert room_for_checkpoints(paths.root, CYCLES + 1) is not None, "the schedule has grown"
    for damaged in ("{", "[]", "{}", '{"checkpoints": {"keep_last": "x"}}', '{"checkpoints": 3}'):
        paths.run_json.write_text(damaged)
        assert room_for_checkpoints(paths.root, CYCLES + 1) is None
    shutil.rmtree(paths.root)
    assert room_for_checkpoints(paths.root, CYCLES) is None


def with_room(paths: LinePaths) -> int:
    """What its checkpoints take, and the room that they will take soon."""
    needed = room_for_checkpoints(paths.root, CYCLES)
    assert needed is not None
    assert needed.next_bytes <= needed.soon_bytes
    return taken(paths) + needed.soon_bytes


def test_what_is_free_beside_it_stays_the_same_while_rolling_checkpoints_come_and_go(
    paths: LinePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken and room together are constant at every moment: half written, named, one too many, half removed."""
    write(paths, 0, kept=True)
    always = with_room(paths)
    remove = shutil.rmtree

    def remove_slowly(path: Any, **options: Any) -> None:
        for file in sorted(Path(path).iterdir()):
            file.unlink()
            assert with_room(paths) == always
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    for update in range(4, 28, 4):
        partial = write(paths, update, f"u{update:08d}.partial")
        assert with_room(paths) == always
        partial.rename(paths.checkpoint(update))
        assert with_room(paths) == always
        paths.latest.write_text(f"u{update:08d}\n")
        assert with_room(paths) == always
        apply_retention(paths, keep_last=2)
        assert with_room(paths) == always
    partial, replaced = write(paths, 24, "u00000024.partial"), paths.checkpoints / "u00000024.replaced"
    for old, new in ((paths.checkpoint(24), replaced), (partial, paths.checkpoint(24))):  # written again over itself
        old.rename(new)
        assert with_room(paths) == always
    remove_slowly(replaced)
    assert len(paths.checkpoint_updates()) == 3


def test_the_next_one_needs_less_the_more_of_it_is_written(paths: LinePaths) -> None:
    for update in (0, 4, 8):
        write(paths, update, kept=update == 0)
    partial = put_sized(paths, 12, SIZE // 2, name="u00000012.partial")
    needed = room_for_checkpoints(paths.root, CYCLES)
    assert needed is not None
    assert needed.next_bytes == SIZE // 2 + ROOM_BESIDE_BYTES
    shutil.rmtree(partial)
    write(paths, 12)  # one of the three rolling ones is about to go
    needed = room_for_checkpoints(paths.root, CYCLES)
    assert needed is not None
    assert needed.next_bytes == ROOM_BESIDE_BYTES


def test_a_kept_checkpoint_takes_of_what_is_free(paths: LinePaths) -> None:
    write(paths, 0, kept=True)
    write(paths, 4)
    write(paths, 8)
    before = with_room(paths)
    write(paths, 9, cycle=2, kept=True)
    assert with_room(paths) == before + SIZE


def test_what_a_rollback_has_set_aside_is_no_checkpoint_of_the_line(paths: LinePaths) -> None:
    write(paths, 0, kept=True)
    write(paths, 4)
    expected = soon(paths)
    shutil.copytree(paths.checkpoint(4), paths.set_aside / "u00000008")
    assert soon(paths) == expected
