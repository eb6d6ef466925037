"""Data lines from a hub: the same bytes whatever the network, the disk and `kill -9` do."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hub_lines
import minicpm_hub
import pytest
from fake_hub import Crowd, FakeHub, Fault, SeededFaults
from hub_lines import UNIT, build, command, make_line, prepare, preparer_child, result, some_recipe, status_of

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.branch import branch_line
from nstrain.data.hub import patience
from nstrain.data.hub.errors import AccessDenied, FileVanished, HubRefusal
from nstrain.data.init import Recipe
from nstrain.data.line import DataLine
from nstrain.data.look import data_status
from nstrain.data.manifest import files_taken
from nstrain.data.preparer import PreparerStatus, run_preparer
from nstrain.data.readers import MissingColumn
from nstrain.data.rebuild import rebuild_cycle, rebuild_in_line
from nstrain.data.val import collect_held_out
from nstrain.data.verify import verify_line
from nstrain.settings.model import validate


@pytest.fixture
def corpora(hub: FakeHub) -> FakeHub:
    minicpm_hub.fill(hub)
    return hub


@pytest.fixture(scope="session")
def undisturbed(_server: FakeHub, tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[DataLine]:
    """A line built while nothing went wrong."""
    _server.empty()  # it is made before the test's own `hub`: another test may have left tokens and faults
    minicpm_hub.fill(_server)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "PATIENCE", dataclasses.replace(patience.Patience(), reserve_bytes=0))
        yield build(tmp_path_factory.mktemp("undisturbed") / "line", tokenizer)


def fetched(work: Path) -> list[str]:
    return sorted(p.name for p in (work / "downloads").rglob("*") if p.is_file())


def test_the_example_s_command_as_typed(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    """Nothing more is given than there: recipe, tokenizer, directory and unit are the defaults."""
    host = tmp_path / "host.json"
    host.write_text(json.dumps({"tokenizer": str(tokenizer), "work_root": str(tmp_path)}))
    typed = "data init --work trunk-data --eos-id 1 --cycle-tokens 2e10"
    assert typed in (Path(__file__).parents[2] / "examples" / "minicpm-2b" / "README.md").read_text()
    shown = command(corpora, *typed.split(), NSTRAIN_HOST=str(host))
    assert shown.returncode == 0, shown.stderr
    assert "open-ended of 19,975,372,800 tokens in 16 segments; unit 32,768" in shown.stdout
    line = DataLine.open(tmp_path / "trunk-data")
    assert line.eos_id == 1
    assert line.schedule.cycle(1).shares == (12, 12, 4, 9, 2, 12, 6, 6, 3, 5, 6, 11, 5, 5, 2)
    strata = {name: len(line.listing(name).strata) for name in line.source_names}
    assert strata == {
        "web-en-v14": 3, "web-en-hq": 2, "web-en": 1, "web-zh": 1, "web-en-l1": 2, "l3-en": 2, "l3-zh": 2, "ultrax": 5,
        "math-l1": 2, "math-l2": 1, "math-l3": 4, "code-l2": 11, "code-l3": 11, "stack-v3": 4, "infllm-v2": 4,
    }  # fmt: skip
    pins = {(s.settings.repo, s.settings.revision) for s in line.settings.sources}
    assert pins == {(repo, corpora.refs[repo]["main"]) for repo in corpora.repos}
    assert all(path.endswith(".parquet") for path in fetched(line.work)), "no _SUCCESS, no README"
    planned = command(corpora, "data", "plan", "--work", "trunk-data", NSTRAIN_HOST=str(host))
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count("in cycle 1") == 15, "this hub has less text than the real one"


@pytest.mark.slow  # the example's command is typed in every run
def test_a_cycle_of_all_the_example_s_sources(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    """Up to its rebuilding on a machine that has nothing but its manifest and the tokenizer."""
    line = make_line(tmp_path / "D", tokenizer, hub_lines.find_recipe("minicpm"), cycle_tokens=20_000)
    assert run_preparer(line.work, until_cycle=1, workers=0) == ExitCode.DONE
    assert data_status(line).downloads_bytes == 0, "all that was fetched is open, and deleted"
    assert all(found.ok for found in verify_line(line))
    manifest = tmp_path / "away" / "manifest.json"
    manifest.parent.mkdir()
    shutil.copy(line.manifest_path(1), manifest)
    rebuild_cycle(manifest, tokenizer, {}, manifest.parent / "cycle", workers=0)
    again = {path.name: path.read_bytes() for path in (manifest.parent / "cycle").iterdir()}
    assert again == {path.name: path.read_bytes() for path in line.cycle_directory(1).iterdir()}
    assert sorted(p.name for p in manifest.parent.iterdir()) == ["cycle", "manifest.json"]


def test_a_stored_token_is_used_and_a_wrong_one_is_named(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    """From HF_HOME/token, as `hf auth login` leaves it; HF_TOKEN goes before it."""
    corpora.tokens["openbmb/UltraData-Math"] = "hf_mine"
    (tmp_path / "token").write_text("hf_mine\n")
    recipe = some_recipe(("math-l2",))
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    typed = ["data", "init", "--recipe", str(tmp_path / "recipe.json"), "--tokenizer", str(tokenizer), "--eos-id", "1"]
    typed += ["--cycle-tokens", "2e3", "--unit-tokens", str(UNIT), "--work"]
    shown = command(corpora, *typed, str(tmp_path / "D"), HF_HOME=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    asked = {(request.what, request.authorization) for request in corpora.requests}
    bearer = "Bearer hf_mine"
    assert asked == {("info", bearer), ("tree", bearer), ("resolve", bearer), ("bytes", None)}
    shown = command(corpora, *typed, str(tmp_path / "E"), HF_HOME=str(tmp_path), HF_TOKEN="hf_other")
    assert shown.returncode == ExitCode.BAD_CONFIGURATION
    assert "source math-l2: " in shown.stderr
    assert "HF_TOKEN" in shown.stderr
    assert not (tmp_path / "E").exists()


def test_offline_the_library_s_cache_is_all_there_is(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    """The cache as the hub's own library fills it; without a request."""
    recipe = some_recipe(("math-l2",))
    calm = build(tmp_path / "calm", tokenizer, recipe)
    line = make_line(tmp_path / "line", tokenizer, recipe)
    shutil.rmtree(line.work / "downloads")
    shutil.copytree(calm.work / "val", line.work / "val")
    settings = line.source("math-l2")
    paths = [file.path for file in line.listing("math-l2").files[0]]
    program = f"from huggingface_hub import hf_hub_download as get\nfor path in {paths!r}: " \
        f"get({settings.repo!r}, path, repo_type='dataset', revision={settings.revision!r})"  # fmt: skip
    variables = hub_lines.environment(corpora, HF_HOME=str(tmp_path / "hf"))
    subprocess.run([sys.executable, "-c", program], env=variables, check=True, capture_output=True)
    corpora.requests.clear()
    child = preparer_child(corpora, line.work, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
    assert child.communicate(timeout=60)[1] == ""
    assert result(line.work) == result(calm.work)
    for name in ("cycles", "manifests", "open"):
        shutil.rmtree(line.work / name)
    shutil.rmtree(tmp_path / "hf")
    child = preparer_child(corpora, line.work, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert "UltraData-Math-L2-preview/part-" in str(status_of(line.work)["error"])
    assert "has to be fetched, but HF_HUB_OFFLINE is set" in str(status_of(line.work)["error"])
    assert not corpora.requests


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        ("parquet", r"some/corpus/data/\d.parquet: its footer: .* damaged before it was uploaded"),
        ("jsonl", r"its reader \(jsonl\) finds no text in data/0.jsonl, data/1.jsonl, data/2.jsonl"),
        ("text", r"its \d+ pinned bytes give at most \d+"),
    ],
)
def test_a_pickle_is_a_bad_upload_or_text_and_never_run(
    hub: FakeHub, tmp_path: Path, tokenizer: Path, reader: str, said: str
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    hub.add("some/corpus", {f"data/{n}.{reader}": pickle.dumps((n, Bomb())) + b"\n" * 100 for n in range(3)})
    column = {} if reader == "text" else {"text_column": "content"}
    source = {"name": "web", "kind": "hub", "repo": "some/corpus", "include": ["data/*"], "reader": reader, "share": 1}
    recipe = validate(Recipe, {"format": 1, "sources": [{**source, **column}]}, "test")
    with pytest.raises(Refusal, match=said):
        prepare(make_line(tmp_path / "line", tokenizer, recipe))
    assert not (tmp_path / "ran").exists()


def test_eos_is_checked_against_the_tokenizer(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(Refusal, match="eos id 300"):
        hub_lines.init_line(tmp_path / "D", some_recipe(), tokenizer, 300, 2000, unit_tokens=UNIT)
    assert not list(tmp_path.iterdir())
    assert not corpora.requests


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_faults_change_no_byte(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path, seed: int
) -> None:
    faults = corpora.fault = SeededFaults(seed, 30, rate=0.3)
    line = build(tmp_path / "line", tokenizer)
    assert result(line.work) == result(undisturbed.work)
    assert sum(faults.made.values()) > 10, faults.made
    assert fetched(line.work) == []


@pytest.mark.parametrize("number", [1, pytest.param(9, marks=pytest.mark.slow), 40])
def test_a_killed_preparer_goes_on_with_the_same_files(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path, number: int
) -> None:
    line = make_line(tmp_path / "line", tokenizer)
    shutil.rmtree(line.work / "downloads")  # so that there is something left to fetch
    collect = shutil.copytree(undisturbed.work / "val", line.work / "val")
    child = preparer_child(corpora, line.work, NSTRAIN_KILL_POINT=f"hub:{number}")
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    parts = {path.name: path.stat().st_size for path in (line.work / "downloads" / ".parts").glob("*")}
    corpora.requests.clear()
    prepare(line)
    assert result(line.work) == result(undisturbed.work)
    starts = [request.range_start for request in corpora.requests if request.what == "bytes"]
    assert set(starts) - {0} <= set(parts.values()), "resumed where the killed process stopped, or from the beginning"
    assert collect.exists()


@pytest.mark.slow
def test_a_preparer_killed_at_every_write(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    """One line, its preparer killed at the first write that it makes, then at the second, ...: it gets there."""
    recipe = some_recipe(("web-en-v14",))
    calm = build(tmp_path / "calm", tokenizer, recipe)
    line = make_line(tmp_path / "line", tokenizer, recipe)
    collect_held_out(line, 3 * UNIT)
    for number in range(1, 100):
        shutil.rmtree(line.work, ignore_errors=True)
        line = make_line(tmp_path / "line", tokenizer, recipe)
        shutil.copytree(calm.work / "val", line.work / "val")
        shutil.rmtree(line.work / "downloads")
        child = preparer_child(corpora, line.work, NSTRAIN_KILL_POINT=f"hub:{number}")
        child.communicate(timeout=60)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        prepare(line)
        assert result(line.work) == result(calm.work), number
    assert number > 15


def test_an_init_that_was_stopped_keeps_what_it_fetched(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    corpora.fault = lambda r: Fault("gone") if r.what == "resolve" and "train/" in r.path else None
    with pytest.raises(FileVanished, match="infllm-v2"):
        make_line(tmp_path / "line", tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == [".line.downloads"]
    corpora.fault = lambda request: None
    corpora.requests.clear()
    line = make_line(tmp_path / "line", tokenizer)
    first = line.listing("code-l3").file(0, 0).path
    assert first not in [request.path for request in corpora.requests], "fetched before it failed"
    assert [p.name for p in tmp_path.iterdir()] == ["line"]


def test_a_branch_and_a_rebuild_fetch_again(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path
) -> None:
    trunk = tmp_path / "trunk"
    shutil.copytree(undisturbed.work, trunk)
    shutil.rmtree(trunk / "open")
    line = DataLine.open(trunk)
    branches = []
    for number in range(2):
        branch = branch_line(tmp_path / f"branch{number}", trunk, 1, 10 * 4 * UNIT, cycles=2)
        corpora.fault = SeededFaults(number, 10) if number else lambda request: None
        prepare(branch)
        branches.append({name: data for name, data in result(branch.work).items() if "cycles" in name})
        assert fetched(branch.work) == []
    assert branches[0] == branches[1]
    corpora.requests.clear()
    rebuild_in_line(line, 2, tmp_path / "again", workers=2)
    assert any(request.what == "bytes" for request in corpora.requests)
    for path in line.cycle_directory(2).iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rebuild_fetches_files_ahead(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path, workers: int
) -> None:
    """As the preparer does, and like it no file that the cycle takes nothing of."""
    manifest = undisturbed.manifest_path(1)
    crowd = corpora.fault = Crowd()
    rebuild_cycle(manifest, tokenizer, {}, tmp_path / "cycle", workers=workers)
    assert crowd.most > 1
    for path in undisturbed.cycle_directory(1).iterdir():
        assert (tmp_path / "cycle" / path.name).read_bytes() == path.read_bytes()
    sources = json.loads(manifest.read_bytes())["sources"]
    taken = {undisturbed.listing(name).file(*at).path for name in sources for at in files_taken(sources[name])}
    assert {request.path for request in corpora.requests if request.what == "bytes"} == taken
    assert [path.name for path in tmp_path.iterdir()] == ["cycle"]


def test_a_rebuild_that_failed_goes_on_where_it_stopped(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path
) -> None:
    manifest, last = undisturbed.manifest_path(2), undisturbed.source_names[-1]
    gone = {file.path for files in undisturbed.listing(last).files for file in files}
    corpora.fault = lambda r: Fault("404") if r.path in gone else None
    with pytest.raises(FileVanished, match=f"source {last}: "):
        rebuild_cycle(manifest, tokenizer, {}, tmp_path / "cycle", workers=0)
    assert not (tmp_path / "cycle").exists()
    corpora.fault = lambda request: None
    before = [request.path for request in corpora.requests if request.what == "bytes"]
    corpora.requests.clear()
    rebuild_cycle(manifest, tokenizer, {}, tmp_path / "cycle", workers=0)
    after = [request.path for request in corpora.requests if request.what == "bytes"]
    assert set(after) <= gone
    assert len(before) > len(after) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["cycle"]


def test_a_pinned_revision_that_vanishes_is_survived_or_named(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path
) -> None:
    line = make_line(tmp_path / "line", tokenizer)
    shutil.rmtree(line.work / "downloads")
    repo = "openbmb/UltraData-Code"
    old = corpora.refs[repo]["main"]
    files = corpora.repos[repo].pop(old)
    missing = line.listing("code-l3").file(0, 1).path
    corpora.add(repo, {path: file for path, file in files.items() if path != missing}, "5" * 40)
    words = rf"code-l3.*{missing.rpartition('/')[2]}.*RevisionNotFound.*EntryNotFound.*`nstrain data exclude --work "
    with pytest.raises(FileVanished, match=words):
        prepare(line)
    assert status_of(line.work)["stage"] == "failed"
    corpora.add("copy/of-code", files)
    settings = json.loads((line.work / "line.json").read_text())
    next(s for s in settings["sources"] if s["settings"]["name"] == "code-l3")["settings"]["mirrors"] = ["copy/of-code"]
    (line.work / "line.json").write_text(json.dumps(settings))
    again = DataLine.open(line.work)
    assert again.id == undisturbed.id, "a mirror is no part of what a line is"
    prepare(again)
    for name, data in result(line.work).items():
        if name.startswith(("cycles", "manifests")):
            assert data == result(undisturbed.work)[name], name


def test_the_preparer_tells_of_its_downloads(
    corpora: FakeHub, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line(tmp_path / "line", tokenizer)
    shutil.rmtree(line.work / "downloads")
    visible = dataclasses.replace(patience.PATIENCE, first_wait_s=1.0, longest_wait_s=1.0)
    monkeypatch.setattr(patience, "PATIENCE", visible)
    left = [Fault("500")] * 5
    corpora.fault = lambda r: left.pop() if r.what == "resolve" and left else None
    seen: list[PreparerStatus] = []
    prepare(line, seen.append)
    downloading = [status for status in seen if status.stage == "downloading"]
    assert any("HTTP 500; trying again" in (status.error or "") for status in downloading)
    figures = [status.download_progress for status in downloading]
    assert all(f is not None and 0 <= f.bytes_done <= f.bytes and f.files_done <= f.files for f in figures)
    assert "of" in str(figures[0] and figures[0].describe())
    assert seen[-1].stage == "done"
    assert seen[-1].download is None


def test_a_stopped_preparer_ends_soon_in_the_middle_of_a_download(
    corpora: FakeHub, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line(tmp_path / "line", tokenizer)
    shutil.rmtree(line.work / "downloads")
    monkeypatch.setattr(patience, "PATIENCE", dataclasses.replace(patience.PATIENCE, read_s=30.0, connect_s=30.0))
    corpora.fault = lambda r: Fault("stall", 0.5) if r.what == "bytes" else None
    child = preparer_child(corpora, line.work)
    deadline = time.monotonic() + 120
    parts = line.work / "downloads" / ".parts"
    while time.monotonic() < deadline:
        if status_of(line.work).get("stage") == "downloading" and parts.exists() and any(parts.iterdir()):
            break
        time.sleep(0.05)
    asked = time.monotonic()
    child.terminate()
    assert child.wait(20) == ExitCode.STOPPED
    assert time.monotonic() - asked < 5
    assert status_of(line.work)["stage"] == "stopped"
    assert list(parts.iterdir()), "what came is kept"


def test_a_full_disk_is_waited_for(corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path) -> None:
    """Files that cannot grow, as on a full disk; then they can."""
    line = make_line(tmp_path / "line", tokenizer)
    shutil.rmtree(line.work / "downloads")
    shutil.copytree(undisturbed.work / "val", line.work / "val")
    child = preparer_child(corpora, line.work, file_limit=3000)
    deadline = time.monotonic() + 120
    while status_of(line.work).get("stage") != "waiting_disk" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "bytes are free there" in str(status_of(line.work).get("error"))
    import resource

    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert child.wait(60) == 0
    assert result(line.work) == result(undisturbed.work)


@pytest.mark.slow
def test_a_small_file_system_that_fills_up(
    corpora: FakeHub, undisturbed: DataLine, tmp_path: Path, tokenizer: Path
) -> None:
    """A real one (needs root): too small until something else on it goes away."""
    line = make_line(tmp_path / "line", tokenizer)
    shutil.copytree(undisturbed.work / "val", line.work / "val")
    shutil.rmtree(line.work / "downloads")
    (line.work / "downloads").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(line.work / "downloads")], check=True)
    try:
        ballast = line.work / "downloads" / ".ballast"
        ballast.write_bytes(bytes(390_000))
        child = preparer_child(corpora, line.work)
        deadline = time.monotonic() + 120
        while status_of(line.work).get("stage") != "waiting_disk" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "bytes are free there" in str(status_of(line.work).get("error"))
        ballast.unlink()
        assert child.wait(60) == 0
        assert result(line.work) == result(undisturbed.work)
    finally:
        subprocess.run(["umount", str(line.work / "downloads")], check=True)


def test_what_a_recipe_is_not_sure_of_is_checked_and_told(corpora: FakeHub, tmp_path: Path, tokenizer: Path) -> None:
    told = r"code-l3.*no column 'content'; it has .*full_content.*The recipe notes: its text column"
    with pytest.raises(MissingColumn, match=told):
        make_line(tmp_path / "line", tokenizer, some_recipe(("code-l3",), text_column="content"))
    recipe = some_recipe(("web-en-l1", "math-l2"), include=("data/en/*.parquet",))
    told = r"source web-en-l1: .*no file matches.*under data: data/CC-MAIN-2025-30/.*The recipe notes: where its dumps"
    with pytest.raises(HubRefusal, match=told):
        make_line(tmp_path / "line", tokenizer, recipe)
    corpora.tokens["openbmb/UltraData-Math"] = "hf_secret"
    with pytest.raises(AccessDenied, match="source math-l2: .*terms"):
        make_line(tmp_path / "line", tokenizer, some_recipe(("math-l2",)))
    assert not (tmp_path / "line").exists()
