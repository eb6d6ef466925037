"""`data init`: what it lists and pins, and everything that it refuses before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    EOS,
    contents,
    environment,
    make_line,
    manifest_of,
    prepare,
    prose_tree,
    quick,
    source,
    write_tree,
)
from hypothesis import given
from hypothesis import strategies as st

from nstrain.base.disk import directory_by_rename, sha256_file
from nstrain.base.errors import Exhausted, Refusal
from nstrain.data.extend import extend_line
from nstrain.data.globs import matcher
from nstrain.data.init import init_line, load_recipe
from nstrain.data.line import DataLine
from nstrain.data.manifest import refuse_edited_pasts
from nstrain.data.readers import Row, read_pinned
from nstrain.data.sources import FoundFile, Listing, PinnedFile, SourceSettings, arrange, list_local, resolve_inside
from nstrain.data.verify import verify_line


def settings(path: Path | str = "/nowhere", **fields: Any) -> SourceSettings:
    return SourceSettings(name="web", kind="local", path=str(path), include=("**/*.txt",), **fields)


# ------------------------------------------------------------------ globs


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("*.py", ["a.py", ".py"], ["a/b.py", "a.pyc", "a.py\n"]),
        ("**/*.py", ["a.py", "a/b.py", "a/b/c.py"], ["a.pyx", "b/a.txt"]),
        ("a/**", ["a/b", "a/b/c.py"], ["a", "b/a/c"]),
        ("a/**/z.txt", ["a/z.txt", "a/b/z.txt", "a/b/c/z.txt"], ["z.txt", "b/a/z.txt", "a/bz.txt"]),
        ("data/?.txt", ["data/a.txt", "data/é.txt"], ["data/ab.txt", "data/.txt", "data//.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"], ["c.txt", "ab.txt"]),
        ("[!ab].txt", ["c.txt"], ["a.txt", "/.txt"]),
        ("[a-c]x", ["ax", "bx"], ["dx", "-x"]),
        ("[^a]x", ["^x", "ax"], ["bx"]),
        ("a.b+(c)", ["a.b+(c)"], ["axb+(c)", "a.bb(c)"]),
        ("*", ["a", "a b"], ["a/b", ""][:1]),
    ],
)
def test_globs(pattern: str, matches: list[str], others: list[str]) -> None:
    match = matcher([pattern])
    assert [path for path in [*matches, *others] if match(path)] == matches


def test_any_of_several_globs_and_none_of_none() -> None:
    assert [p for p in ("a.x", "b.y", "c.z") if matcher(["*.x", "*.y"])(p)] == ["a.x", "b.y"]
    assert not matcher([])("a")


@pytest.mark.parametrize("pattern", ["", "/abs/*.txt", "../up/*", "a/../b", "[ab", "[z-a]x", "[!]"])
def test_malformed_globs_are_refused(pattern: str) -> None:
    with pytest.raises(Refusal, match=re.escape(f"glob {pattern!r}")):
        matcher([pattern])


@quick(300)
@given(st.text("ab/*?.[]!^-\\", max_size=8), st.text("ab/.-", max_size=6))
def test_a_glob_matches_or_is_refused(pattern: str, path: str) -> None:
    with contextlib.suppress(Refusal):
        assert matcher([pattern])(path) in (True, False)


# ------------------------------------------------------------------ listing


def test_strata_and_their_order_come_from_the_paths_alone(tmp_path: Path) -> None:
    tree = prose_tree(1, {"a": 12, "b/c": 9, "b/d": 4}) | {"top.txt": "x", "a/skip.md": "no"}
    listings = []
    for place in ("one", "two"):
        names = sorted(tree, reverse=place == "two")
        listings.append(list_local(settings(write_tree(tmp_path / place, {n: tree[n] for n in names})), 3))
    assert listings[0] == listings[1]
    assert listings[0].digest == listings[1].digest
    listing = listings[0]
    assert listing.strata == (".", "a", "b")
    assert [len(files) for files in listing.files] == [1, 12, 13]
    assert listing.count == 26
    for index, files in enumerate(listing.files):
        assert [f.order for f in files] == list(range(len(files)))
        assert {f.stratum for f in files} == {index}
        for file in files:
            path = tmp_path / "one" / file.path
            assert (file.size, file.sha256) == (path.stat().st_size, sha256_file(path))
    assert [f.path for f in listing.files[1]] != sorted(f.path for f in listing.files[1])
    assert list_local(settings(tmp_path / "one"), 4).digest != listing.digest
    other = {f.path for f in list_local(settings(tmp_path / "one"), 4).files[1]}
    assert other == {f.path for f in listing.files[1]}


@pytest.mark.parametrize(
    ("depth", "strata"),
    [(0, [".", ]), (1, [".", "a", "b"]), (2, [".", "a", "a/x", "b"]), (9, [".", "a", "a/x", "a/x/y", "b"])],
)  # fmt: skip
def test_strata_by_directory_at_a_depth(tmp_path: Path, depth: int, strata: list[str]) -> None:
    paths = ("t.txt", "a/1.txt", "a/x/2.txt", "a/x/y/3.txt", "b/4.txt")
    root = write_tree(tmp_path, {path: path for path in paths})
    source = SourceSettings.model_validate_json(
        json.dumps({**settings(root).model_dump(mode="json"), "stratum": {"by": "directory", "depth": depth}})
    )
    listing = list_local(source, 0)
    assert list(listing.strata) == strata
    assert all(f.text_bytes == f.size == len(f.path) for files in listing.files for f in files)


def test_a_file_keeps_its_place_when_others_come_and_go() -> None:
    """A permutation keyed by each path: those that stay do not change their order among themselves."""
    files = [FoundFile(f"{n}.txt", n, "s", {".": n}) for n in range(40)]
    every = [f.path for f in arrange(settings(), files, 1).files[0]]
    some = [f.path for f in arrange(settings(), files[::3], 1).files[0]]
    assert some == [path for path in every if path in set(some)]


def test_a_listing_is_read_back_only_as_it_was_pinned(tmp_path: Path) -> None:
    files = [FoundFile(f"{'ab'[n % 2]}/ü{n}.txt", n, f"sha{n}", {"ab"[n % 2]: n // 2}) for n in range(30)]
    listing = arrange(settings(), files, 1)
    listing.save(tmp_path / "files.parquet")
    assert Listing.load(tmp_path / "files.parquet", listing.digest) == listing
    for other in (
        arrange(settings(), files, 2),
        arrange(
            settings(),
            [dataclasses.replace(f, text_bytes={s: n + 1 for s, n in f.text_bytes.items()}) for f in files],
            1,
        ),
    ):
        other.save(tmp_path / "files.parquet")
        with pytest.raises(Refusal, match=r"line.json pins"):
            Listing.load(tmp_path / "files.parquet", listing.digest)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "C:/x", ".."])
def test_a_pinned_path_that_leads_out_of_the_source_is_refused(path: str) -> None:
    with pytest.raises(Refusal, match="leads out of its source"):
        resolve_inside(Path("/data"), path)
    assert resolve_inside(Path("/data"), "a/..b/c..txt") == Path("/data/a/..b/c..txt")


def test_a_share_held_out_is_an_exact_threshold() -> None:
    for share in (0.01, 0.05, 0.1, 0.3, 1e-6):
        assert settings(held_out=share).held_out_threshold == int(Fraction(str(share)) * 2**64)


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"abc", "abc"), ("数 é".encode(), "数 é"), (b"", None), (b"\xff\xfe", None), ("é".encode("latin-1"), None),
     (b"\xef\xbb\xbfx", "\ufeffx"), (b"a\r\nb\x00", "a\r\nb\x00"), (b"\xed\xa0\x80", None), (b" ", " ")],
)  # fmt: skip
def test_the_rule_for_rows_that_are_no_text(tmp_path: Path, data: bytes, text: str | None) -> None:
    (tmp_path / "f.txt").write_bytes(data)
    file = PinnedFile("f.txt", len(data), sha256_file(tmp_path / "f.txt"), 0, 0, len(data))
    assert list(read_pinned(settings(tmp_path), file, ".")) == [Row(text, None)]


# ------------------------------------------------------------------ what init refuses


def tree_of(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "text", prose_tree(1, {"a": 80}, words=40))


def refuse_init(tmp_path: Path, tokenizer: Path, sources: list[dict[str, Any]], match: str, **options: Any) -> None:
    """Init is refused and leaves nothing behind."""
    work = tmp_path / "line"
    with pytest.raises(Refusal, match=match):
        make_line(work, tokenizer, sources, options.pop("cycle_tokens", 640), options.pop("cycles", 1), **options)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "text") == ["line.recipe.json"]


def breaks_link(root: Path) -> None:
    (root / "a" / "link.txt").symlink_to("nowhere")


def makes_pipe(root: Path) -> None:
    os.mkfifo(root / "a" / "pipe.txt")


def links_to_a_device(root: Path) -> None:
    (root / "a" / "device.txt").symlink_to("/dev/null")


def names_a_drive(root: Path) -> None:
    (root / "c:notes.txt").write_text("x")


def names_badly(root: Path) -> None:
    (root / "a" / os.fsdecode(b"\xff.txt")).write_text("x")


@pytest.mark.parametrize(
    ("breaks", "match"),
    [
        (breaks_link, r"a/link.txt is a link to nothing; make it a readable file, remove it, or exclude it"),
        (makes_pipe, r"a/pipe.txt is not a regular file; .*exclude it by a glob"),
        (links_to_a_device, r"a/device.txt is not a regular file"),
        (names_badly, r"the file's name is not UTF-8"),
        (names_a_drive, r"'c:notes.txt' .*leads out of its source: .*rename the file, or exclude it by a glob"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, tokenizer: Path, breaks: Callable[[Path], None], match: str
) -> None:
    root = tree_of(tmp_path)
    breaks(root)
    refuse_init(tmp_path, tokenizer, [source("web", root)], f"source web: .*{match}")
    exclude = ["**/*link*", "**/*pipe*", "**/*device*", "**/[!0-9]*.txt"]
    (root / "more").symlink_to(root / "a")
    told: list[str] = []
    make_line(tmp_path / "line", tokenizer, [source("web", root, exclude=exclude)], 640, 1, on_notice=told.append)
    assert len(told) == 1
    assert f"source web: {root}/more: a link to a directory, which is not followed" in told[0]


def test_a_file_without_permission_is_refused_by_name(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    unreadable = root / "a" / "000.txt"
    unreadable.chmod(0)
    program = """
import os, sys, pathlib
import nstrain.data.readers  # before the interpreter may read less
from nstrain.data.sources import SourceSettings, list_local
from nstrain.base.errors import Refusal
root = pathlib.Path(sys.argv[1])
os.chdir(root)
if os.geteuid() == 0:
    os.setuid(65534)  # root may read everything
try:
    list_local(SourceSettings(name="web", kind="local", path=".", include=("**/*.txt",)), 0)
except Refusal as error:
    print(error)
"""
    root.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], env=environment(), capture_output=True, text=True, check=True
    )
    assert "a/000.txt cannot be read (Permission denied); make it a readable file" in done.stdout


def test_sources_without_text_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    good = source("good", root)
    refuse_init(tmp_path, tokenizer, [good, source("web", tmp_path / "nowhere")], "source web: .*is not a directory")
    refuse_init(
        tmp_path, tokenizer, [good, source("web", root, include=["**/*.rst"])],
        r"source web: no file under .* matches \['\*\*/\*.rst'\]; correct its globs",
    )  # fmt: skip
    refuse_init(tmp_path, tokenizer, [good, source("web", root, exclude=["a/**"])], r"matches .* without \['a/\*\*'\]")
    write_tree(tmp_path / "text" / "empty", {"a/0.txt": "", "b/1.txt": ""})
    refuse_init(
        tmp_path, tokenizer, [good, source("web", root / "empty")], "source web: all 2 files under .* are empty"
    )


RECIPES: dict[str, tuple[Any, str]] = {
    "no list": ({"format": 1}, "field 'sources' is missing"),
    "empty": ({"format": 1, "sources": []}, "sources': expected at least 1 of them"),
    "format": ({"format": 2, "sources": []}, "field 'format'"),
    "unknown field": ({"nam": "x"}, r"unknown field 'sources.0.nam' \(did you mean 'name'\?\)"),
    "share 0": ({"share": 0}, "'sources.0.share': input should be greater than 0"),
    "share 1.5": ({"share": 1.5}, "'sources.0.share': input should be a valid integer"),
    "no share": ({"share": None}, "'sources.0.share'"),
    "kind": ({"kind": "ftp"}, "'sources.0.kind': input should be 'local'"),
    "held out": ({"held_out": 1.0}, "'sources.0.held_out': input should be less than 1"),
    "held out 0": ({"held_out": 0.0}, "'sources.0.held_out': input should be greater than 0"),
    "no glob": ({"include": []}, "'sources.0.include'"),
    "name": ({"name": "a/b"}, "'sources.0.name': string should match pattern"),
    "upper": ({"name": "READY"}, "'sources.0.name'"),
    "strata": ({"stratum": {"by": "hash"}}, r"'sources.0.stratum.*by': input should be 'directory'.*'file'.*'column'"),
}


@pytest.mark.parametrize("what", RECIPES)
def test_wrong_recipes_are_refused(tmp_path: Path, what: str) -> None:
    value, match = RECIPES[what]
    recipe = value if "format" in value else {"format": 1, "sources": [{**source("web", tmp_path), **value}]}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    with pytest.raises(Refusal, match=match) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


def test_a_name_given_twice_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    refuse_init(tmp_path, tokenizer, [source("web", root), source("web", root)], "two sources are called web")
    for name in ("mix", "mean"):
        refuse_init(
            tmp_path, tokenizer, [source("web", root), source(name, root)], f"val_<L>/{name} is a reading of all"
        )


def test_a_relative_path_is_taken_from_the_recipe(tmp_path: Path, tokenizer: Path, monkeypatch: Any) -> None:
    tree_of(tmp_path)
    monkeypatch.chdir("/")
    line = make_line(tmp_path / "line", tokenizer, [source("web", Path("text"))], 640, 1)
    assert line.source("web").path == str(tmp_path / "text")


def test_shares_that_do_not_fit_the_cycle_and_wrong_numbers_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    sources = [source("web", root, 97), source("two", root, 3)]
    refuse_init(tmp_path, tokenizer, sources, "K = 100 units .* coarser shares", cycle_tokens=1500)
    one = [source("web", root)]
    refuse_init(tmp_path, tokenizer, one, "segment_units 99", segment_units=99)
    refuse_init(tmp_path, tokenizer, one, "unit_tokens: expected a positive", unit_tokens=0)
    refuse_init(tmp_path, tokenizer, one, "open_files: expected a positive", open_files=0)
    refuse_init(tmp_path, tokenizer, one, "cycles: expected a positive", cycles=0)
    refuse_init(tmp_path, tokenizer, one, "take [\\d,]+ tokens", cycle_tokens=10**9)


def test_a_wrong_tokenizer_or_marker_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    refuse_init(tmp_path, root / "missing.json", [source("web", root)], "cannot be read")
    refuse_init(tmp_path, tokenizer, [source("web", root, markers=["<nope>"])], "source web: marker '<nope>'")
    work = tmp_path / "line"
    recipe = load_recipe(tmp_path / "line.recipe.json")
    with pytest.raises(Refusal, match="marker"):
        init_line(work, recipe, tokenizer, EOS, 640, 1)
    assert not work.exists()


def test_a_directory_that_is_in_use_is_refused_and_kept(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    line = make_line(tmp_path / "line", tokenizer, [source("web", root)], 640, 1)
    before = contents(line.work)
    with pytest.raises(Refusal, match="exists already"):
        make_line(tmp_path / "line", tokenizer, [source("web", root)], 640, 1)
    assert contents(line.work) == before
    (tmp_path / "empty").mkdir()
    make_line(tmp_path / "empty", tokenizer, [source("web", root)], 640, 1)
    hashed: list[str] = []
    with pytest.raises(Refusal, match=r"cannot be made \(.* is no directory\); name a directory in a place that"):
        init_line(
            tokenizer / "line",
            load_recipe(tmp_path / "line.recipe.json"),
            tokenizer,
            EOS,
            640,
            1,
            32,
            on_file=lambda name, _: hashed.append(name),
        )
    assert not hashed, "only told after long work"
    with (
        pytest.raises(Refusal, match=r"line cannot be made \(.*No such file"),
        directory_by_rename(Path("/proc/x/line")),
    ):
        raise AssertionError("not reached")


def test_no_room_leaves_nothing(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    make_line(tmp_path / "good", tokenizer, [source("web", root)], 640, 1)
    program = """
import resource, sys, pathlib
from nstrain.base.errors import DiskFull
from nstrain.data.init import init_line, load_recipe
base = pathlib.Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
try:
    init_line(base / "line", load_recipe(base / "good.recipe.json"), pathlib.Path(sys.argv[2]), 1, 640, 1, 32)
except DiskFull as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(tokenizer)],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"{tmp_path / 'line'}" in done.stdout
    assert "bytes are free there" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "good.recipe.json", "text"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_two_inits_of_the_same_are_the_same_line(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    lines = [make_line(tmp_path / n, tokenizer, [source("web", root)], 640, c) for n, c in (("x", 1), ("y", 2))]
    other = make_line(tmp_path / "z", tokenizer, [source("web", root)], 640, 1, seed=1)
    assert lines[0].id == lines[1].id != other.id


# ------------------------------------------------------------------ extending


def test_a_schedule_is_extended_at_its_end(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    line = make_line(tmp_path / "line", tokenizer, [source("web", root), source("two", root)], 640, 1)
    first = line.settings.schedule
    line = extend_line(line.work, 1)
    assert line.settings.schedule == (*first, first[0])
    line = extend_line(line.work, None, cycle_tokens=320, recipe={"two": 1, "web": 3})
    assert line.settings.schedule[:2] == (*first, first[0])
    assert list(line.settings.schedule[2].recipe.items()) == [("web", 3), ("two", 1)]
    assert line.cycle_count is None
    assert DataLine.open(line.work).id == line.id
    before = contents(line.work)
    with pytest.raises(Refusal, match="open-ended already.*--after 0 or later"):
        extend_line(line.work, 1)
    assert contents(line.work) == before


def test_what_is_not_prepared_of_a_schedule_can_be_another_one(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    line = make_line(tmp_path / "line", tokenizer, [source("web", root), source("two", root)], 64, 2)
    line = extend_line(line.work, None, cycle_tokens=128)
    prepare(line, 1)
    first, second = line.settings.schedule
    known = line.manifest_path(1).read_bytes()
    for words, arguments in {
        "cycle 1 is prepared, .*--after 1": {"after": 0, "cycles": 1},
        "no more cycles": {"after": 1, "cycles": 0, "recipe": {"web": 1}},
    }.items():
        with pytest.raises(Refusal, match=words):
            extend_line(line.work, **arguments)  # type: ignore[arg-type]
    assert DataLine.open(line.work).settings == line.settings

    # In the middle of a piece, at its end, inside the open one: what comes before stays as it is.
    for after, kept in {
        5: [first, second.model_copy(update={"cycles": 3})],
        2: [first],
        1: [first.model_copy(update={"cycles": 1})],
    }.items():
        changed = extend_line(line.work, 2, recipe={"two": 1}, after=after)
        assert list(changed.settings.schedule[:-1]) == kept
        assert changed.settings.schedule[-1].recipe == {"two": 1}
        assert (changed.cycle_count, changed.id) == (after + 2, line.id)
        with pytest.raises(Refusal, match=f"has {after + 2} cycles"):
            extend_line(line.work, 1, after=after + 3)
    assert changed.settings.schedule[-1].cycle_tokens == first.cycle_tokens
    refuse_edited_pasts(changed)
    prepare(changed)
    assert manifest_of(changed, 2)["order"] == ["two"]
    assert changed.manifest_path(1).read_bytes() == known
    with pytest.raises(Refusal, match="no more cycles.*with --after"):
        extend_line(line.work, 0)
    assert extend_line(line.work, 0, after=3).settings.schedule == changed.settings.schedule
    assert not [found for found in verify_line(changed) if not found.ok]


def test_a_line_without_a_prepared_cycle_can_have_any_schedule_but_none(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    line = make_line(tmp_path / "line", tokenizer, [source("web", root), source("two", root)], 64, None)
    with pytest.raises(Refusal, match="no more cycles"):
        extend_line(line.work, 0, after=0)
    changed = extend_line(line.work, 3, recipe={"two": 1}, after=0)
    assert [(piece.cycles, piece.recipe) for piece in changed.settings.schedule] == [(3, {"two": 1})]


def test_an_extension_that_cannot_be_met_is_refused_and_changes_nothing(tmp_path: Path, tokenizer: Path) -> None:
    root = tree_of(tmp_path)
    line = make_line(tmp_path / "line", tokenizer, [source("web", root)], 640, 1)
    before = contents(line.work)
    with pytest.raises(Refusal, match="no source is called nope; .*line has web"):
        extend_line(line.work, 1, recipe={"nope": 1})
    with pytest.raises(Exhausted, match="pinned bytes"):
        extend_line(line.work, 10_000)
    assert contents(line.work) == before
