"""Tokens a byte from a sample: how it is counted, pinned, taken over, and that it moves nothing but shares."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    EOS,
    PlainText,
    contents,
    make_line,
    manifest_of,
    prepare,
    prepare_until_exhausted,
    prose,
    prose_tree,
    source,
    write_tree,
)
from mixed_line import mixed_line
from typer.testing import CliRunner

from nstrain.base.errors import Refusal
from nstrain.cli.data import app
from nstrain.data import calibration as calibration_module
from nstrain.data.calibration import load_calibration
from nstrain.data.line import DataLine
from nstrain.data.plan import plan_line


def edited(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def text_line(root: Path, tokenizer: Path, **options: Any) -> DataLine:
    """Two strata; the files of one are so small that all are sampled."""
    tree: dict[str, str | bytes] = dict(prose_tree(1, {"a": 40, "b": 30}))
    tree |= {"a/none.txt": b"", "a/latin1.txt": "é".encode("latin-1") * 9}
    sources = [source("web", write_tree(root / "text", tree), held_out=0.1)]
    return make_line(root / "line", tokenizer, sources, 640, None, **options)


def test_a_sample_counts_every_document_and_its_eos(tmp_path: Path, tokenizer: Path) -> None:
    line = text_line(tmp_path, tokenizer)
    calibration, listing, plain = line.calibration(), line.listing("web"), PlainText(tokenizer)
    assert calibration.tokenizer_sha256 == line.settings.tokenizer.sha256
    assert calibration.sources["web"].identity == line.source("web").identity.hex()
    for index, name in enumerate(listing.strata):
        sample = calibration.sources["web"].strata[name]
        texts = [(tmp_path / "text" / file.path).read_bytes() for file in listing.files[index]]
        documents = [data.decode() for data in texts if data and b"\xe9" not in data]
        assert sample.tokens == sum(len(plain.document(text)) for text in documents)
        assert sample.bytes == sum(len(data) for data in texts)
        rate = calibration.rates(line.source("web"), listing)[index]
        assert (rate.tokens, rate.bytes) == (sample.tokens * Fraction(9, 10), sample.bytes)


def test_a_sample_is_of_the_first_files_and_of_a_long_ones_beginning(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_module, "SAMPLE_BYTES", 3000)
    tree = {f"a/{n}.txt": prose(n, 120) for n in range(30)} | {"long/x.txt": prose(99, 9000)}
    sources = [source("web", write_tree(tmp_path / "text", tree), held_out=0.1)]
    line = make_line(tmp_path / "line", tokenizer, sources, 640, None)
    strata = line.calibration().sources["web"].strata
    sizes = [file.size for file in line.listing("web").files[0]]
    first = next(n for n in range(30) if sum(sizes[:n]) >= 3000)
    assert sum(sizes[: first - 1]) < strata["a"].bytes <= 3000
    assert strata["long"].bytes == 3000
    plain = PlainText(tokenizer)
    beginning = tree["long/x.txt"].encode()[:3000].decode(errors="ignore")
    assert strata["long"].tokens == len(plain.document(beginning))


def test_a_sample_is_the_same_wherever_the_line_and_its_text_are(tmp_path: Path, tokenizer: Path) -> None:
    lines = [mixed_line(tmp_path / place, tokenizer) for place in ("here", "there/deep")]
    assert lines[0].settings.calibration_sha256 == lines[1].settings.calibration_sha256
    assert lines[0].calibration().sources == lines[1].calibration().sources
    assert lines[0].id == lines[1].id
    assert {name: set(s.strata) for name, s in lines[0].calibration().sources.items()} == {
        name: set(lines[0].listing(name).strata) for name in lines[0].source_names
    }


EDITS: dict[str, Callable[[Any], None]] = {
    "a count": lambda c: c["sources"]["web"]["strata"]["a"].update(tokens=1),
    "bytes": lambda c: c["sources"]["web"]["strata"]["a"].update(bytes=1),
    "a stratum": lambda c: c["sources"]["web"]["strata"].pop("b"),
    "the identity": lambda c: c["sources"]["web"].update(identity="0" * 64),
    "the tokenizer": lambda c: c.update(tokenizer_sha256="0" * 64),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_calibration_is_refused(tmp_path: Path, tokenizer: Path, what: str) -> None:
    line = text_line(tmp_path, tokenizer)
    path = line.work / "state.json"
    before = path.read_text()
    edited(path, lambda state: EDITS[what](state["calibration"]))
    for act in (lambda: prepare(line, 1), lambda: plan_line(line)):
        with pytest.raises(Refusal, match=r"state.json: its calibration has digest .*, line.json pins .*put a copy"):
            act()
    assert not line.manifest_path(1).exists()
    path.write_text(before)
    prepare(line, 1)


def test_only_the_speed_may_change_and_the_preparer_keeps_the_calibration(tmp_path: Path, tokenizer: Path) -> None:
    line = text_line(tmp_path, tokenizer)
    before = line.calibration()
    edited(line.work / "state.json", lambda state: state["calibration"].update(tokens_per_s=1.0))
    prepare(line, 2)
    assert line.calibration() == before.model_copy(update={"tokens_per_s": 1.0})
    assert json.loads((line.work / "state.json").read_text())["prepared_cycles"] == 2


@pytest.mark.parametrize("lost", ["state.json", "calibration"])
def test_a_lost_calibration_is_refused_by_name(tmp_path: Path, tokenizer: Path, lost: str) -> None:
    line = text_line(tmp_path, tokenizer)
    if lost == "state.json":
        (line.work / lost).unlink()
    else:
        edited(line.work / "state.json", lambda state: state.pop("calibration"))
    with pytest.raises(Refusal, match=r"state.json"):
        prepare(line, 1)
    assert not line.is_ready(1)


# ------------------------------------------------------------------ taken over from another line


def doctored(line: DataLine, tmp_path: Path) -> Path:
    """The line's state.json with numbers that no sample gives."""
    path = tmp_path / "known.json"
    state = json.loads((line.work / "state.json").read_text())
    for known in state["calibration"]["sources"].values():
        known["strata"] = {name: {"tokens": 777, "bytes": 1000} for name in known["strata"]}
    path.write_text(json.dumps(state))
    return path


def test_numbers_are_taken_over_for_the_same_source_alone(tmp_path: Path, tokenizer: Path) -> None:
    root = write_tree(tmp_path / "text", prose_tree(1, {"a": 60}))
    elsewhere = write_tree(tmp_path / "moved", prose_tree(1, {"a": 60}))
    first = make_line(
        tmp_path / "one", tokenizer, [source("same", root), source("globs", root), source("gone", root)], 320, None
    )
    known = doctored(first, tmp_path)
    others = [
        source("same", elsewhere, 5, held_out=0.3),
        source("globs", root, include=["*/*.txt"]),
        source("new", root),
    ]
    line = make_line(tmp_path / "two", tokenizer, others, 320, None, calibration_from=known)
    found = {name: s.strata["a"].tokens == 777 for name, s in line.calibration().sources.items()}
    assert found == {"same": True, "globs": False, "new": False}
    whole = [source("same", root, stratum={"by": "directory", "depth": 0})]  # the same source without that stratum
    other_strata = make_line(tmp_path / "whole", tokenizer, whole, 320, None, calibration_from=known)
    assert other_strata.calibration().sources["same"].strata["."].bytes > 0
    assert line.calibration().rates(line.source("same"), line.listing("same"))[0].tokens == Fraction(
        7770, 10
    ) * Fraction(7, 10)
    fresh = make_line(tmp_path / "three", tokenizer, others, 320, None)
    assert fresh.settings.calibration_sha256 != line.settings.calibration_sha256
    assert fresh.id != line.id
    assert fresh.calibration().sources["new"] == line.calibration().sources["new"]


def test_a_calibration_of_another_tokenizer_or_none_is_refused_and_nothing_is_left(
    tmp_path: Path, tokenizer: Path
) -> None:
    root = write_tree(tmp_path / "text", prose_tree(1, {"a": 60}))
    first = make_line(tmp_path / "one", tokenizer, [source("web", root)], 320, None)
    other = tmp_path / "other.json"
    other.write_bytes(tokenizer.read_bytes() + b"\n")
    empty, broken = tmp_path / "empty.json", tmp_path / "broken.json"
    empty.write_text('{"format": 1}')
    edited(known := doctored(first, tmp_path), lambda s: s["calibration"]["sources"]["web"]["strata"]["a"].pop("bytes"))
    broken.write_bytes(known.read_bytes())
    for path, named, match in (
        (first.work / "state.json", other, "calibration is of the tokenizer with sha256 .*leave calibration_from out"),
        (empty, tokenizer, r"empty.json: holds no calibration; name the state.json"),
        (broken, tokenizer, r"broken.json: calibration.*bytes"),
        (
            tmp_path / "nowhere.json",
            tokenizer,
            r"nowhere.json: no such file, .*leave calibration_from out of host.json",
        ),
    ):
        before = sorted(p.name for p in tmp_path.iterdir())
        with pytest.raises(Refusal, match=match):
            make_line(tmp_path / "two", named, [source("web", root)], 320, None, calibration_from=path)
        assert sorted(p.name for p in tmp_path.iterdir() if p.name != "two.recipe.json") == [
            name for name in before if name != "two.recipe.json"
        ]


def test_host_json_names_it_for_data_init(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tree(tmp_path / "text", prose_tree(1, {"a": 60}))
    first = make_line(tmp_path / "one", tokenizer, [source("web", root)], 320, None)
    known = doctored(first, tmp_path)
    host = tmp_path / "host.json"
    host.write_text(json.dumps({"calibration_from": str(known), "tokenizer": str(tokenizer)}))
    monkeypatch.setitem(os.environ, "NSTRAIN_HOST", str(host))
    sizes = ["--cycle-tokens", "320", "--unit-tokens", "32", "--eos-id", str(EOS)]
    arguments = ["init", "--work", str(tmp_path / "two"), "--recipe", str(tmp_path / "one.recipe.json"), *sizes]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert load_calibration(tmp_path / "two" / "state.json").sources["web"].strata["a"].tokens == 777


def test_host_json_may_name_the_very_line_that_is_made(tmp_path: Path, tokenizer: Path) -> None:
    """As long as it is not there: the first line is sampled, and those after it take its numbers over."""
    sources = [source("web", write_tree(tmp_path / "text", prose_tree(1, {"a": 60})))]
    (tmp_path / "way").symlink_to(tmp_path)
    known = tmp_path / "way" / "one" / "state.json"
    first = make_line(tmp_path / "one", tokenizer, sources, 320, None, calibration_from=known)
    second = make_line(tmp_path / "two", tokenizer, sources, 320, None, calibration_from=known)
    assert load_calibration(second.work / "state.json") == load_calibration(first.work / "state.json")


# ------------------------------------------------------------------ a whole line under a bad calibration


@pytest.mark.parametrize("factor", [Fraction(1, 100), Fraction(100)])
def test_under_a_bad_calibration_no_stratum_runs_out_before_its_source(
    tmp_path: Path, tokenizer: Path, factor: Fraction
) -> None:
    tree = prose_tree(5, {"a": 90, "b": 30, "c": 3})
    sources = [source("web", write_tree(tmp_path / "text", tree), held_out=0.1)]
    known = tmp_path / "known.json"
    first = make_line(tmp_path / "first", tokenizer, sources, 320, None, open_files=1)
    state = json.loads((first.work / "state.json").read_text())
    wrong = state["calibration"]["sources"]["web"]["strata"]["b"]
    wrong["tokens"] = int(wrong["tokens"] * factor)
    known.write_text(json.dumps(state))
    line = make_line(tmp_path / "line", tokenizer, sources, 320, None, open_files=1, calibration_from=known)
    cycle, message = prepare_until_exhausted(line)
    assert f"source web runs out in cycle {cycle}" in message
    assert cycle > 4
    after = manifest_of(line, cycle - 1)["after"]["web"]
    open_tokens = sum(file["left"] for stratum in after["strata"] for file in stratum["open"])
    files = zip(line.listing("web").files, after["strata"], strict=True)
    unopened = sum(file.size for of_stratum, state in files for file in of_stratum[state["next_file"] :])
    assert open_tokens + after["tail"]["tokens"] + unopened // 2 < 2 * 320  # of some 15,000
    if factor > 1:  # more than its share of the first cycle, so that the numbers did count
        honest, bad = manifest_of_first(first), manifest_of(line, 1)["sources"]["web"]["shares"]
        assert bad[1] > 2 * honest[1]


def manifest_of_first(line: DataLine) -> list[int]:
    prepare(line, 1)
    shares: list[int] = manifest_of(line, 1)["sources"]["web"]["shares"]
    return shares


def test_a_stratum_without_any_text_in_its_sample_takes_its_part_later(tmp_path: Path, tokenizer: Path) -> None:
    """Its first files are no text; what it is worth shows when it opens them."""
    tree: dict[str, str | bytes] = dict(prose_tree(2, {"a": 40, "b": 40}))
    work = tmp_path / "line"
    sources = [source("web", write_tree(tmp_path / "text", tree), held_out=0.1)]
    order = [file.path for file in make_line(tmp_path / "try", tokenizer, sources, 320, None).listing("web").files[1]]
    for path in order[:3]:
        (tmp_path / "text" / path).write_bytes(b"\xff" * calibration_module.SAMPLE_BYTES)
    line = make_line(work, tokenizer, sources, 320, None)
    assert line.calibration().sources["web"].strata["b"].tokens == 0
    for path in (tmp_path / "text").rglob("*.txt"):
        path.write_bytes(b"\xff" * calibration_module.SAMPLE_BYTES)
    with pytest.raises(Refusal, match=r"its reader \(text\) finds no text in a/0.*63 more files. Correct reader"):
        make_line(tmp_path / "none", tokenizer, sources, 320, None)
    assert not (tmp_path / "none").exists()
    write_tree(tmp_path / "text", tree)
    for path in order[:3]:
        (tmp_path / "text" / path).write_bytes(b"\xff" * calibration_module.SAMPLE_BYTES)
    before = contents(line.work / "sources")
    prepare(line, 1)
    shares = manifest_of(line, 1)["sources"]["web"]["shares"]
    assert min(shares) > 0
    assert "source web runs out" in prepare_until_exhausted(line)[1]
    assert contents(line.work / "sources") == before
