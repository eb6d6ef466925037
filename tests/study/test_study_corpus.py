"""The corpus: near-copies go, held-out text stays out of training, and the same documents give the same data."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.study import corpus, packages
from benchmarks.study.corpus import Document, Tokens
from benchmarks.study.data import EOS_ID, Held, read_data, write_data
from benchmarks.study.packages import SHARES, Source
from benchmarks.study.shingles import SeenText, shingles
from benchmarks.study.text import to_text, without_furniture
from nstrain.base.errors import Refusal

NO_LIMIT: dict[Source, float] = dict.fromkeys(SHARES, float("inf"))


def words(seed: int, count: int = 600) -> str:
    generator = random.Random(seed)
    return " ".join("".join(generator.choices("abcdefgh", k=generator.randint(2, 9))) for _ in range(count))


def document(name: str, text: str, held_out: bool = False, source: Source = "c") -> Document:
    """A document whose name's hash puts it on the wanted side."""
    for number in range(10_000):
        found = Document(source, f"{name}-{number}", text)
        if found.is_held_out == held_out:
            return found
    raise AssertionError


# --- near-copies -------------------------------------------------------------------------------------------------


def test_shingles_do_not_see_white_space_or_place() -> None:
    text = words(1)
    assert shingles(text.replace(" ", "\n\t ")) == shingles(text)
    moved = shingles(words(2) + " " + text)
    assert len(shingles(text) & moved) > 0.95 * len(shingles(text))
    assert not shingles(text) & shingles(words(3))
    assert shingles("x" * 63) == set()
    assert len(shingles(words(4, 12)[:64])) == 1


def test_about_a_sixteenth_of_the_shingles_is_looked_at() -> None:
    text = words(5, 20_000)
    assert len(shingles(text)) == pytest.approx(len(text) / 16, rel=0.1)


def test_containment_is_the_share_that_was_seen_before_anywhere() -> None:
    seen = SeenText()
    first, second = words(6), words(7)
    seen.add(shingles(first))
    seen.add(shingles(second))
    assert seen.containment(shingles(first + " " + second)) > 0.95
    assert seen.containment(shingles(first + " " + words(8))) == pytest.approx(0.5, abs=0.1)
    assert seen.containment(set()) == 0.0


def test_near_copies_are_dropped_in_training_and_between_training_and_held_out() -> None:
    text = words(10)
    edited = text[:1000] + " something else " + text[1100:]
    found = [
        document("first", text),
        document("copy", edited),
        document("new", words(11)),
        document("held copy", edited, held_out=True),
        document("quotes a third", text[: len(text) // 3] + words(12, 400), held_out=True),
        document("held", words(13), held_out=True),
        document("held again", words(13) + " x", held_out=True),
    ]
    taken = corpus.select(found, NO_LIMIT)
    assert [d.name.rpartition("-")[0] for d in taken.training] == ["first", "new"]
    assert [d.name.rpartition("-")[0] for d in taken.held_out] == ["held"]
    assert taken.dropped == {"copies in training": 1, "held-out, but in training": 2, "copies in held-out": 1}


def test_a_source_is_not_read_beyond_what_it_needs() -> None:
    found = [document(f"d{n}", words(20 + n)) for n in range(5)]
    taken = corpus.select(found, {**NO_LIMIT, "c": 1.5 * len(found[0].text)})
    assert len(taken.training) == 2


# --- text ----------------------------------------------------------------------------------------------------------


def test_html_becomes_what_a_reader_sees() -> None:
    page = (
        "<html><head><title>no</title></head><body><nav>menu</nav><h1>Heading</h1><p>One  two\n three &amp; four.</p>"
        "<script>var no;</script><pre>a  b\n  c</pre><br/></body></html>"
    )
    text = to_text((page.replace("</body>", f"<p>{words(30, 200)}</p></body>")).encode(), "html")
    assert text is not None
    assert text.startswith("Heading\n\nOne two three & four.\n\na  b\n  c\n")
    assert "menu" not in text
    assert "var no" not in text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xfe" + words(31).encode(), "not UTF-8"),
        (b"short", "too short"),
        (words(32, 5000).encode(), "one line"),
        (("12345 67890\n" * 200).encode(), "numbers"),
        (("word\n" * 300_000).encode(), "too long"),
    ],
)
def test_what_is_no_document(data: bytes, why: str) -> None:
    assert to_text(data, "plain") is None, why


def test_lines_that_pages_share_are_left_out() -> None:
    pages = [f"menu\nown line {n}\n" for n in range(20)]
    assert without_furniture(pages)[3] == "own line 3\n"
    assert without_furniture(pages[:5]) == pages[:5]


# --- tokens --------------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_same_each_time_and_gives_every_byte_back() -> None:
    texts = [words(n) for n in range(40, 44)]
    first, second = (corpus.train_tokenizer(iter(texts), 400) for _ in range(2))
    assert first.to_str() == second.to_str()
    strange = "Größe 漢字 \x01 <|end|> tab\t\n"
    (tokens,) = corpus.encode(first, [strange])
    assert list(tokens).count(EOS_ID) == 1
    assert tokens[-1] == EOS_ID
    assert first.decode(tokens[:-1].tolist()) == strange.replace("<|end|>", "< |end|>")


def test_the_stream_has_each_source_to_its_share() -> None:
    total = 1000
    taken = [
        (source, np.full(size, 1 + index, np.uint16)) for index, source in enumerate(SHARES) for size in (150, 150, 150)
    ]
    stream, by_source = corpus.training_stream(taken, total)
    assert len(stream) == total == sum(by_source.values())
    for index, source in enumerate(SHARES):
        assert (stream == 1 + index).sum() == by_source[source] == pytest.approx(SHARES[source] * total, abs=2)
    with pytest.raises(Refusal, match="go 80 of 100"):
        corpus.training_stream(
            [(s, t[:80] if s == "go" else t) for s, t in taken if s != "go"] + [("go", taken[6][1][:80])],
            total,
        )


def test_rows_overlap_by_one_token_and_long_rows_begin_a_document() -> None:
    held: list[Tokens] = [np.arange(1, 31, dtype=np.uint16), np.arange(31, 61, dtype=np.uint16)]
    rows = corpus.validation_rows(held, 3, 16)
    assert rows.shape == (3, 17)
    assert rows[0, -1] == rows[1, 0]
    long = corpus.long_rows(held, 2, 20)
    assert long.shape == (2, 21)
    assert long[:, 0].tolist() == [EOS_ID, EOS_ID]
    assert long[:, 1].tolist() == [1, 31]
    with pytest.raises(Refusal, match="0 held-out documents of more than 30"):
        corpus.long_rows(held, 1, 30)
    with pytest.raises(Refusal, match="held-out tokens"):
        corpus.validation_rows(held, 4, 16)


# --- files ---------------------------------------------------------------------------------------------------------


def test_data_comes_back_and_damage_is_seen(tmp_path: Path) -> None:
    training = np.arange(1000, dtype=np.uint16)
    held = [Held("c", np.ones((2, 9), np.uint16)), Held("long-8", np.full((1, 9), 7, np.uint16))]
    write_data(tmp_path, '{"model": {"vocab": {"a": 0}}}', training, held, {})
    data = read_data(tmp_path)
    assert (data.training == training).all()
    assert data.sources["c"].shape == (2, 9)
    assert data.long_rows[8].tolist() == [[7] * 9]
    (tmp_path / "held_out.bin.xz").write_bytes((tmp_path / "train.bin.xz").read_bytes())
    with pytest.raises(Refusal, match="make the data again"):
        read_data(tmp_path)
    (tmp_path / "train.bin.xz").unlink()
    with pytest.raises(Refusal, match=r"benchmarks\.study\.corpus"):
        read_data(tmp_path)


def test_a_package_of_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", packages.PACKAGES[:1])
    package = packages.PACKAGES[0]
    file = tmp_path / f"{package.name}_1.0_all.deb"
    file.write_bytes(b"bytes")
    lock = tmp_path / "lock.json"
    assert packages.fetch(tmp_path, lock) == {package.name: file}
    assert packages.fetch(tmp_path, lock) == {package.name: file}
    file.write_bytes(b"other")
    with pytest.raises(Refusal, match="SHA-256"):
        packages.fetch(tmp_path, lock)


def test_every_locked_package_is_in_the_list() -> None:
    import json

    locked = json.loads((Path(packages.__file__).parent / "packages.lock.json").read_text())
    assert [row["name"] for row in locked] == [package.name for package in packages.PACKAGES]
    assert sum(SHARES.values()) == pytest.approx(1)
