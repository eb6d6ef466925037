"""The journal as the mirror reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mirror_lines import Line, fast_directory

from nstrain.base.errors import Refusal
from nstrain.mirror import tail
from nstrain.mirror.tail import OtherGeneration, last_update, look, newest_generation, stream
from nstrain.record.journal import Journal


@pytest.fixture
def line() -> Iterator[Line]:
    with fast_directory() as directory:
        yield Line(directory / "trunk")


def test_a_look_takes_a_bounded_number_of_rows(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.train(40)
    journal = line.paths.journal
    monkeypatch.setattr(tail, "BATCH_ROWS", 7)
    assert [row["update"] for row in look(journal, 1, 3).rows] == list(range(3, 10))
    assert [row["update"] for row in look(journal, 1, 3, last=4).rows] == [3, 4]
    assert look(journal, 1, 40).rows == []
    assert look(journal, 1, 40).last_update == 39
    assert [row["update"] for row in stream(journal, 1, 5, 33)] == list(range(5, 34))
    monkeypatch.setattr(tail, "BATCH_READINGS", 12)  # rows have 5 or 9 readings with their key
    assert len(look(journal, 1, 1).rows) == 3
    assert str(list(stream(journal, 1, 0, 100))) == str(list(line.rows().values()))  # a NaN equals no NaN


def test_only_the_newest_generation_is_read(line: Line) -> None:
    journal = line.paths.journal
    assert newest_generation(journal) is None
    with Journal.open(journal, 2):
        pass
    assert (newest_generation(journal), last_update(journal, 1)) == (1, -1)
    line.train(5)
    rows = stream(journal, 1, 0, 4)
    next(rows)
    line.roll_back(2)
    assert (newest_generation(journal), last_update(journal, 2)) == (2, 2)
    for old in (lambda: look(journal, 1, 0), lambda: last_update(journal, 1), lambda: list(stream(journal, 1, 0, 4))):
        with pytest.raises(OtherGeneration) as found:
            old()
        assert found.value.generation == 2
    line.train(1)
    assert [row["generation"] for row in look(journal, 2, 0).rows] == [1, 1, 1, 2]


def test_a_journal_that_is_gone_is_refused(line: Line) -> None:
    with pytest.raises(Refusal, match="no such journal"):
        look(line.paths.journal, 1, 0)
