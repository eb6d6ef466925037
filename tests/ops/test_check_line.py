"""`check_line`: what is in order passes, each thing that is broken is found under its name, and all at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_card import UUID, FakeCard
from sized_checkpoints import make_sized_line, put_sized

from nstrain.base.errors import Refusal
from nstrain.data.consumers import consumer_path, write_consumer
from nstrain.data.line import DataLine
from nstrain.data.room import bytes_to_open
from nstrain.line.checkpoint import read_state, seal_checkpoint
from nstrain.line.paths import LinePaths
from nstrain.ops import check as check_module
from nstrain.ops import check_disk
from nstrain.ops.check import Finding, check_line, refuse_failed
from nstrain.ops.generate import generate
from nstrain.record import local_disk
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, load_run


def failures(paths: LinePaths, **options: Any) -> dict[str, str]:
    """The failed checks by name."""
    return {found.name: found.message for found in check_line(paths.root, **options) if found.ok is False}


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def work_of(paths: LinePaths) -> Path:
    """The line's data line."""
    return Path(load_run(paths.run_json).data.work)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, but for what SQLite keeps beside a database that is open."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path): path.read_bytes() for path in files if not path.name.endswith(("-shm", "-wal"))}


def test_new_line_is_in_order(paths: LinePaths) -> None:
    findings = check_line(paths.root)
    assert all(found.ok for found in findings), findings
    assert [found.name for found in findings] == [check.name for check in check_module.CHECKS]


def test_trained_line_is_in_order_and_left_alone(trained: LinePaths) -> None:
    before = contents(trained.root.parent)
    findings = check_line(trained.root, deep=True)
    assert all(found.ok for found in findings), findings
    messages = {found.name: found.message for found in findings}
    assert messages["checkpoint"] == "u00000008, every byte verified"
    assert messages["learning rate"].startswith("no update is left, 0.001 at the end")
    assert messages["model"].endswith("as in the checkpoint")
    assert messages["resume"].startswith("goes on from u00000008")
    assert contents(trained.root.parent) == before


def test_quick_checks_load_no_torch(paths: LinePaths) -> None:
    code = (
        "import sys, pathlib; from nstrain.ops.check import check_line\n"
        "found = check_line(pathlib.Path(sys.argv[1]), quick=True)\n"
        "sys.exit(not all(f.ok for f in found) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(paths.root)]).returncode == 0


def test_no_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not a training line"):
        check_line(tmp_path)


def test_unreadable_settings_leave_the_others_unchecked(paths: LinePaths) -> None:
    edit(paths.run_json, lambda value: value.update(learning_rat=1))
    findings = {found.name: found for found in check_line(paths.root)}
    assert "did you mean 'learning_rate'" in findings["run.json"].message
    assert findings["data line"].ok is None
    assert "needs run.json" in findings["data line"].message
    assert findings["checkpoint"].ok


def test_several_failures_at_once(trained: LinePaths) -> None:
    edit(trained.run_json, lambda value: value.update(seed=1))
    shutil.rmtree(work_of(trained) / "val")
    (trained.checkpoint(8) / "weights.safetensors").write_bytes(b"short")
    found = failures(trained)
    assert set(found) == {"settings", "held-out text", "checkpoint"}
    assert "seed was 0 and is now 1" in found["settings"]
    assert "nstrain data val" in found["held-out text"]
    assert "expected" in found["checkpoint"]
    with pytest.raises(Refusal) as refusal:
        refuse_failed(check_line(trained.root))
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("metrics", METRICS_VERSION + 1, "run.json"),
        ("threads", 2, "settings"),
        ("id", "other", "settings"),
    ],
)
def test_edited_settings(trained: LinePaths, field: str, value: object, name: str) -> None:
    edit(trained.run_json, lambda settings: settings.update({field: value}))
    assert name in failures(trained)
    assert name in failures(trained, quick=True)


def test_data_line_is_gone(paths: LinePaths) -> None:
    shutil.rmtree(work_of(paths))
    assert set(failures(paths)) == {"data line"}


def test_row_lengths(paths: LinePaths) -> None:
    def longer_rows(value: Any) -> None:
        value["rows"].append({"from_cycle": 9, "row_tokens": 128})
        value["lengths"]["128"] = {"micro_rows": 1, "recompute": "none"}

    edit(paths.run_json, longer_rows)
    assert "begins at cycle 9, but the schedule has 3" in failures(paths)["row lengths"]


def test_other_tokenizer(paths: LinePaths) -> None:
    path = work_of(paths) / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert "put the original back" in failures(paths)["tokenizer"]


def test_damaged_held_out_rows(paths: LinePaths) -> None:
    path = work_of(paths) / "val" / "prose.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert set(failures(paths)) == {"held-out rows"}


def test_sources_that_changed(paths: LinePaths) -> None:
    texts = work_of(paths).parent / "texts"
    same_size = texts / "prose" / "even" / "000.txt"
    same_size.write_text(same_size.read_text()[::-1])
    assert failures(paths) == {}
    assert "000.txt has other content" in failures(paths, deep=True)["sources"]
    (texts / "verse" / "odd" / "001.txt").write_text("shorter")
    (texts / "prose" / "odd" / "003.txt").unlink()
    found = failures(paths)["sources"]
    assert "001.txt had" in found
    assert "003.txt cannot be read" in found


def test_progress_of_the_sources(paths: LinePaths) -> None:
    seen: list[tuple[str, int]] = []
    check_line(paths.root, on_file=lambda source, size: seen.append((source, size)))
    assert len(seen) == 120
    assert {source for source, _ in seen} == {"prose", "verse"}


def test_journal_of_another_metrics_version(trained: LinePaths) -> None:
    trained.journal.unlink()
    Journal.open(trained.journal, 7).close()
    assert "metrics version 7" in failures(trained)["journal"]


def test_journal_on_a_network_file_system(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_disk, "file_system_type", lambda path, mounts: "nfs4")
    assert "found nfs4" in failures(paths)["journal"]


def test_lost_checkpoints(trained: LinePaths) -> None:
    shutil.rmtree(trained.checkpoints)
    assert "holds no checkpoint" in failures(trained)["journal"]


def test_damaged_newest_checkpoint(trained: LinePaths) -> None:
    path = trained.checkpoint(8) / "exp_avg.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "train the updates since again" in failures(trained)["checkpoint"]
    assert failures(trained, quick=True) == {}, "the quick checks read no large file"


def test_model_of_another_shape(trained: LinePaths) -> None:
    def wider(value: Any) -> None:
        value["model"]["config"]["ffn_width"] = 640
        value["allow_changes"] = ["model"]

    edit(trained.run_json, wider)
    found = failures(trained)
    assert "the model has shape" in found["model"]
    assert "ffn" in found["model"]


MISFIT = {"trace_scan": {"any": {"blocks": {"CHUNK_TOKENS": 64}, "num_warps": 4}}}


@pytest.mark.usefixtures("one_thread")
def test_kernels_that_do_not_fit(paths: LinePaths, trained: LinePaths) -> None:
    """A table that was tuned, and one in a checkpoint; text can still be generated, whose kernels are the package's."""
    import triton_here  # noqa: F401 - kernels that are looked at here are to run in its interpreter elsewhere

    paths.tune.mkdir()
    (paths.tune / "kernels.json").write_text(json.dumps({"format": 1, "basis": {}, "kernels": MISFIT}))
    expected = "kernel 'trace_scan', card 'any': expected the blocks BLOCK_K, CHUNK, STEP, found CHUNK_TOKENS"
    message = failures(paths)["kernels"]
    assert f"{expected}; remove it" in message
    assert "tune/kernels.json: its kernels' launch configurations do not fit" in message
    checkpoint = trained.checkpoint(8)
    entries = json.loads((checkpoint / "hashes.json").read_text())["files"]
    seal_checkpoint(checkpoint, {**read_state(checkpoint), "kernels": MISFIT}, entries)
    found = failures(trained)
    assert set(found) == {"kernels"}
    assert f"{expected}; go on with the nstrain and the model package that wrote it" in found["kernels"]
    assert generate(trained.root, "the neuron", tokens=2).tokens


def test_missing_device(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    edit(paths.run_json, lambda value: value.update(device="cuda"))
    assert set(failures(paths)) == {"device"}


def found(paths: LinePaths, name: str, **options: Any) -> Finding:
    """What one check found."""
    return next(finding for finding in check_line(paths.root, **options) if finding.name == name)


UNREADABLE = {
    "no library": ("echo pip install nvidia-ml-py >&2; exit 2", "pip install nvidia-ml-py"),
    "an error of the driver": ("echo NVML: unknown error >&2; exit 1", "NVML: unknown error"),
    "something else": ("echo hello", "something else than GPUs"),
    "no card": ("""echo '{"format": 1, "gpus": []}'""", "this machine's GPUs are none"),
    "no program": (None, "cannot be started"),
    "no answer": ("exec sleep 600", "gave no answer"),
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_gpu_that_cannot_be_read(how: str, paths: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where the line is to train; a check, which may be made anywhere, says that it cannot tell."""
    from nstrain.gpu import readings

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(readings.read_gpus, "__defaults__", (0.5,))
    script, words = UNREADABLE[how]
    card = FakeCard(tmp_path / "card")
    card.reads(script)
    reader = card.source.reader if script is not None else ("/no/such/reader",)
    monkeypatch.setenv("NSTRAIN_HOST", str(tmp_path / "host.json"))
    (tmp_path / "host.json").write_text(json.dumps({"gpu_reader": reader}))
    assert found(paths, "gpu reader", quick=True) == Finding("gpu reader", True, "not needed by a line on the CPU")
    edit(paths.run_json, lambda value: value.update(device="cuda"))
    assert set(failures(paths, quick=True)) == {"gpu reader"}
    assert words in failures(paths, quick=True)["gpu reader"]
    finding = found(paths, "gpu reader")
    assert finding.ok is None
    assert finding.message.startswith("cannot be read here, and `nstrain run` refuses where it cannot: ")
    assert words in finding.message
    card.reads()
    if script is not None:
        assert failures(paths, quick=True) == {}
        assert found(paths, "gpu reader").message == f"reads made up, {UUID}"


def test_a_program_for_notices_that_cannot_be_run(
    paths: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(program: str) -> None:
        (tmp_path / "host.json").write_text(json.dumps({"notify": program}))

    monkeypatch.setenv("NSTRAIN_HOST", str(tmp_path / "host.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "host.json").write_text("{}")
    assert "nobody is told" in found(paths, "notify", quick=True).message
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\n")
    for wrong in (program, tmp_path / "nothing", tmp_path, "no-such-program"):
        name(str(wrong))
        for quick in (True, False):
            assert set(failures(paths, quick=quick)) == {"notify"}
            assert (
                f"field 'notify': expected a program that this user may run, found '{wrong}'"
                in (failures(paths, quick=quick)["notify"])
            )
    program.chmod(0o755)
    for right in (str(program), "~/tell", "true"):
        name(right)
        assert failures(paths, quick=True) == {}


def test_a_tracker_that_cannot_be_used(paths: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before the start, and not weeks later in a project that is empty. Nobody is asked, nothing is started."""
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert found(paths, "tracker", quick=True).message == "none: the journal stays on this machine"
    tracker = {"service": "wandb", "project": "spikes", "base_url": "http://127.0.0.1:9"}
    edit(paths.run_json, lambda run: run.update(tracker=tracker))
    for quick in (True, False):
        assert set(failures(paths, quick=quick)) == {"tracker"}
        assert "no API key for http://127.0.0.1:9" in failures(paths, quick=quick)["tracker"]
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert failures(paths, quick=True) == {}
    assert found(paths, "tracker", quick=True).message.startswith("project spikes: wandb ")


def test_disk_estimate(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    message = next(found.message for found in check_line(paths.root) if found.name == "disk")
    # One at the start, two rolling ones, the next cycle's end: of 1.9M parameters, 12 bytes each. Later two more ends.
    assert "87.4 MiB more soon (checkpoints of 21.8 MiB and 3 data cycles with opened files)" in message
    assert "checkpoints up to the schedule's end: 131.0 MiB" in message
    settings = load_run(paths.run_json)
    averaged = settings.model_copy(update={"ema": {"horizon_tokens": 1000}})
    assert [check_disk.states_of_a_checkpoint(found) for found in (settings, averaged)] == [3, 4]
    assert "3 data cycles with opened files); the preparer leaves the checkpoints their part;" in message
    usage = shutil.disk_usage(paths.root)
    monkeypatch.setattr(check_disk.shutil, "disk_usage", lambda place: usage._replace(free=100 << 20))
    message = next(found.message for found in check_line(paths.root) if found.name == "disk")
    assert "the schedule's end does NOT fit: its checkpoints take 131.0 MiB, 1 more cycles do" in message
    monkeypatch.setattr(check_disk.shutil, "disk_usage", lambda place: usage._replace(free=80 << 20))
    assert "80.0 MiB are free there" in failures(paths)["disk"]
    monkeypatch.setattr(check_disk.shutil, "disk_usage", lambda place: usage)
    opens = bytes_to_open(DataLine.open(work_of(paths)), 1)
    assert opens > 0
    monkeypatch.setattr(check_disk, "bytes_to_open", lambda line, cycle: (10 << 20) + opens if cycle == 1 else 0)
    assert "97.4 MiB more soon" in next(found.message for found in check_line(paths.root) if found.name == "disk")
    monkeypatch.setattr(check_disk, "bytes_to_open", lambda line, cycle: (10 << 20) * cycle)
    monkeypatch.setattr(check_disk, "cycle_tables_bytes", lambda line, cycle: 1 << 20)
    monkeypatch.setattr(DataLine, "cycle_bytes", lambda line, cycle: 20 << 20)
    monkeypatch.setattr(DataLine, "is_ready", lambda line, cycle: cycle == 1)  # it is on the disk already
    assert "149.4 MiB more soon" in next(found.message for found in check_line(paths.root) if found.name == "disk")


def test_disk_of_a_line_that_is_not_alone_on_its_data_line(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_sized_line(paths.root.with_name("other"), keep_last=1)
    put_sized(other, 0, 1 << 20, kept=True)
    write_consumer(work_of(paths), "other", 1, 0, 0, other.root)
    message = next(found.message for found in check_line(paths.root) if found.name == "disk")
    # Three more of the other's, 1 MiB each, and 32 MiB beside them.
    beside = f"room for the next checkpoints of {other.root})"
    assert f"122.4 MiB more soon (checkpoints of 21.8 MiB and 3 data cycles with opened files and {beside}" in message
    usage = shutil.disk_usage(paths.root)
    monkeypatch.setattr(check_disk.shutil, "disk_usage", lambda place: usage._replace(free=120 << 20))
    assert f"{beside}, 120.0 MiB are free there" in failures(paths)["disk"]
    put_sized(paths, 0, 1 << 20, kept=True)  # its own room is not to be there twice
    line = DataLine.open(work_of(paths))
    message = check_disk.refuse_small_disk(paths, load_run(paths.run_json), line, parameters=1)
    assert f"(checkpoints of 1.0 MiB and 3 data cycles with opened files and {beside}" in message


def test_rates_that_teach_nothing_and_an_average_that_never_begins(paths: LinePaths) -> None:
    def message() -> str:
        return next(found.message for found in check_line(paths.root, quick=True) if found.name == "learning rate")

    assert "0.001 at most, 0.001 at the end (12.3K tokens); no average" in message()
    edit(paths.run_json, lambda value: value.update(ema={"horizon_tokens": 2000, "from_tokens": 4000}))
    assert "an average of the weights over 2,000 tokens from 4,000 on" in message()
    edit(paths.run_json, lambda value: value["ema"].update(from_tokens=50_000))
    assert "NO average: it would begin at 50K tokens, beyond the schedule" in message()
    warm_up = {"from": 0, "to": 2048, "shape": "linear", "start": 0.0, "end": 0.004}
    hold = {"from": 2048, "to": None, "shape": "constant", "start": 0.003, "end": None}
    edit(paths.run_json, lambda value: value.update(learning_rate=[warm_up, hold]))
    assert message().startswith("0.001 next, 0.004 at most, 0.003 at the end"), "the first update has 512 tokens"
    edit(paths.run_json, lambda value: value.update(learning_rate=[{**warm_up, "start": 0.02, "to": 512}, hold]))
    assert message().startswith("0.004 next, 0.004 at most, "), "no update ends earlier"
    ramp = [{"from": a, "to": b, "tokens": n} for a, b, n in ((0, 512, 256), (512, 1024, 512), (1024, None, 512))]
    edit(paths.run_json, lambda value: value.update(tokens_per_update=ramp))
    updates = next(found.message for found in check_line(paths.root, quick=True) if found.name == "updates")
    assert updates.startswith("of 256 from 0 on, 512 from 512 on tokens"), "two pieces of one size are one"
    nothing = [{"from": 0, "to": None, "shape": "constant", "start": 0.0, "end": None}]
    edit(paths.run_json, lambda value: value.update(learning_rate=nothing))
    assert "it is 0 from 0 tokens to the schedule's end" in failures(paths, quick=True)["learning rate"]


def test_line_in_two_directories(paths: LinePaths, tmp_path: Path) -> None:
    shutil.copytree(paths.root, tmp_path / "copy")
    copy = LinePaths(tmp_path / "copy")
    assert "one line in two directories" in failures(copy, quick=True)["consumer"]
    assert failures(paths, quick=True) == {}
    shutil.move(paths.root, tmp_path / "away")
    shutil.move(copy.root, tmp_path / "moved")
    assert failures(LinePaths(tmp_path / "moved"), quick=True) == {}, "a line that was moved is not a copy"
    consumer_path(work_of(LinePaths(tmp_path / "moved")), "small").unlink()
    message = next(f.message for f in check_line(tmp_path / "moved", quick=True) if f.name == "consumer")
    assert "no entry" in message


def test_refuse_failed_lets_the_rest_pass() -> None:
    refuse_failed([Finding("a", True, ""), Finding("b", None, "not checked")])
