"""`nstrain check`: everything that a start would refuse, found before it, all at once and without occupying a device.

A check either says what it found or raises the `Refusal` that a start would raise. One that stands on another which
failed is not carried out and says so. The quick ones read no large file and load no torch; the supervisor runs them
once, before it goes to the background. What is changed later is refused by the trainer, which looks at all of this in
its own way at each launch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nstrain.base.disk import sha256_file
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.host_memory import available_host_bytes
from nstrain.base.units import human_bytes, human_count
from nstrain.data.consumers import read_consumers
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.manifest import cycle_manifest, last_manifest, last_prepared, parent_manifest, refuse_edited_pasts
from nstrain.data.order import refuse_row_length
from nstrain.data.plan import shortages
from nstrain.data.rows import read_cycle
from nstrain.data.sources import PinnedFile, resolve_inside
from nstrain.data.val import held_out_digest, load_index
from nstrain.gpu.readings import gpu_of, read_gpus, visible_gpu
from nstrain.line.abandoned import refuse_abandoned
from nstrain.line.checkpoint import (
    newest_good,
    newest_state,
    read_state,
    refuse_lost_checkpoints,
    refuse_lost_rows,
)
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import load_settings, refuse_no_line
from nstrain.ops.check_disk import refuse_small_disk, states_of_a_checkpoint
from nstrain.ops.consumer import refuse_shared_entry
from nstrain.ops.schedule_notes import schedule_notes
from nstrain.ops.writable import refuse_unwritable
from nstrain.record.alarms import WINDOW_UPDATES
from nstrain.record.journal import Journal
from nstrain.record.local_disk import refuse_network_file_system
from nstrain.settings.changes import Changes, settle_changes
from nstrain.settings.host import load_host
from nstrain.settings.host_file import host_file
from nstrain.settings.run import METRICS_VERSION, RunSettings
from nstrain.train.plan import Position, plan_update
from nstrain.train.schedule import learning_rate


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    """What was looked at."""
    ok: bool | None
    """Whether it is in order; None if it was not looked at, because a check that it stands on failed, or because only
    the machine that trains the line can tell."""
    message: str
    """What was found; of a failure also what was expected and how to mend it."""


def check_line(
    run: Path,
    *,
    quick: bool = False,
    deep: bool = False,
    on_file: Callable[[str, int], None] = lambda source, size: None,
) -> list[Finding]:
    """Run the start checks of a line, in order; nothing is written.

    `quick` are the checks of a start: those that read large files or load torch are left out, and what cannot be told
    here is a failure, since it is here that the line is to train. `deep` hashes every file of the sources instead of
    comparing sizes; `on_file(source, bytes)` is called for each. Raises `Refusal` only if `run` is not a line at all.
    """
    paths = LinePaths(run.resolve())
    refuse_no_line(run)
    checks = _Checks(paths, quick, deep, on_file)
    findings: dict[str, Finding] = {}
    for check in CHECKS:
        if quick and not check.quick:
            continue
        missing = [name for name in check.needs if name in findings and not findings[name].ok]
        if missing:
            message = f"not checked: it needs {' and '.join(missing)} to be in order"
            findings[check.name] = Finding(check.name, None, message)
            continue
        try:
            findings[check.name] = Finding(check.name, True, check.function(checks))
        except _CannotTellError as error:
            findings[check.name] = Finding(check.name, None, str(error))
        except (NstrainError, OSError) as error:
            findings[check.name] = Finding(check.name, False, str(error))
    return list(findings.values())


def refuse_failed(findings: list[Finding]) -> None:
    """Raise one `Refusal` with every failure among findings, if there is one."""
    failures = [f"{finding.name}: {finding.message}" for finding in findings if finding.ok is False]
    if failures:
        raise Refusal("\n".join(failures))


class _CannotTellError(Exception):
    """What is to be looked at is not on this machine, which need not be the one that trains the line."""


class _Checks:
    """The checks of one line; each leaves what those that stand on it need."""

    def __init__(self, paths: LinePaths, starts: bool, deep: bool, on_file: Callable[[str, int], None]) -> None:
        """`starts`: the line is to train on this very machine."""
        self.paths, self.starts, self.deep, self.on_file = paths, starts, deep, on_file
        self.settings: RunSettings
        self.line: DataLine
        self.newest: Path | None = None
        self.parameters: int | None = None

    def run_json(self) -> str:
        self.settings = settings = load_settings(self.paths)
        if settings.metrics != METRICS_VERSION:
            raise Refusal(
                f"{self.paths.run_json}: field 'metrics' is {settings.metrics}, this nstrain records version "
                f"{METRICS_VERSION}; go on with the nstrain that began the line, or make a new line"
            )
        return f"{settings.model.preset} on {settings.device}, line {settings.id}"

    def unchanged(self) -> str:
        found = self._newest_state
        if found is None:
            return "no checkpoint yet: every field may still be edited"
        path, state = found
        latest = state["update"]
        where, branch = str(self.paths.run_json), self.settings.branch
        if state["id"] != self.settings.id:
            raise Refusal(
                f"{path}: belongs to line {state['id']!r}, run.json is of "
                f"{self.settings.id!r}; put the line's own checkpoints back"
            )
        changes = settle_changes(state, self.settings, where, self._held_out())
        meant = [change.describe() for change in changes.applied[len(Changes.from_state(state).applied) :]]
        text = f"as trained up to update {latest}"
        if branch is not None and latest == branch.update:
            text = (
                f"as branched at update {latest}: it has no update of its own yet, but begins with a checkpoint, so "
                "that fields kept for life change with allow_changes alone"
            )
        return f"{text}, but changed on purpose: {'; '.join(meant)}" if meant else text

    @functools.cached_property
    def _newest_state(self) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint that the line goes on from, as far as small files tell, and its state.json."""
        return newest_state(self.paths, warn=lambda message: None)

    def _held_out(self) -> str | None:
        """The held-out index's hash; None if it cannot be read, which has a check of its own."""
        try:
            return held_out_digest(DataLine.open(Path(self.settings.data.work)))
        except (NstrainError, OSError):
            return None

    def data_line(self) -> str:
        self.line = line = DataLine.open(Path(self.settings.data.work))
        cycles = "an open-ended schedule" if line.cycle_count is None else f"{line.cycle_count} cycles"
        tokens = "" if line.total_tokens is None else f", {human_count(line.total_tokens)} tokens"
        return f"{line.work}: {cycles}{tokens} of {', '.join(line.source_names)}"

    def directories(self) -> str:
        return refuse_unwritable(self.paths, self.line.work)

    def row_lengths(self) -> str:
        for piece in self.settings.rows:
            refuse_row_length(piece.row_tokens, self.line.unit_tokens)
            count = self.line.cycle_count
            if count is not None and piece.from_cycle > count:
                raise Refusal(
                    f"run.json: field 'rows': a piece begins at cycle {piece.from_cycle}, but the schedule has "
                    f"{count}; remove the piece, or extend the schedule first"
                )
        return "rows of " + ", ".join(
            f"{piece.row_tokens:,} tokens from cycle {piece.from_cycle}" for piece in self.settings.rows
        )

    def updates(self) -> str:
        pieces = [next(of_size) for _, of_size in itertools.groupby(self.settings.batch_pieces, lambda p: p.tokens)]
        sizes = [f"{piece.tokens:,} from {human_count(piece.from_tokens)} on" for piece in pieces]
        text = f"of {', '.join(sizes) if len(sizes) > 1 else format(pieces[0].tokens, ',')} tokens"
        return "; NOTE: ".join([text, *schedule_notes(self.settings, self.line.schedule)])

    def consumer(self) -> str:
        read_consumers(self.line.work)  # the preparer goes by all of them
        entry = refuse_shared_entry(self.paths, self.settings)
        if entry is None:
            return "no entry among the data line's consumers yet; `nstrain run` writes it"
        return f"stands at cycle {entry.cycle}, row {entry.row:,}"

    def held_out_index(self) -> str:
        return f"held-out rows of {len(load_index(self.line)['sources'])} sources"

    def data_cycles(self) -> str:
        """What the preparer and the trainer refuse of what is prepared, before any token is hashed."""
        line = self.line
        line.calibration()
        if line.settings.fork is not None:
            parent_manifest(line, line.settings.fork)
        refuse_edited_pasts(line)
        found = self._newest_state
        first = 1 if found is None else found[1]["position"]["cycle"]
        trained = None if found is None else found[1]["position"].get("previous")
        if trained is not None:
            cycle_manifest(line, trained["cycle"], trained["manifest_sha256"])
        ready = [cycle for cycle in cycles_on_disk(line) if cycle >= first]
        for cycle in ready:
            read_cycle(line, cycle)
        lost = [cycle for cycle in range(1, last_prepared(line)) if not line.manifest_path(cycle).exists()]
        again = f"; the preparer makes {', '.join(map(str, lost))} again, whose manifest is lost" if lost else ""
        text = ", ".join(map(str, ready)) or "none"
        return f"ready from cycle {first} on: {text}; {last_manifest(line):,} prepared in all{again}"

    def journal(self) -> str:
        refuse_network_file_system(self.paths.journal)
        newest, last = self._newest_state, None
        if self.paths.journal.exists():
            with Journal.open_for_reading(self.paths.journal) as journal:
                if journal.metrics_version != self.settings.metrics:
                    raise Refusal(
                        f"{self.paths.journal}: holds readings of metrics version {journal.metrics_version}, run.json "
                        f"says {self.settings.metrics}; put the line's own journal back"
                    )
                last = journal.last_update()
                position = 0 if newest is None else newest[1]["update"]
                list(journal.rows(from_update=max(0, position - WINDOW_UPDATES)))  # the trainer reads these too
                if newest is not None and last is not None and position <= last:
                    refuse_abandoned(self.paths, newest[1], journal.generation_at)
        refuse_lost_checkpoints(self.paths, None if newest is None else newest[0], last)
        refuse_lost_rows(self.paths, None if newest is None else newest[0], last)
        return "empty, on a local disk" if last is None else f"up to update {last}, on a local disk"

    def rates(self) -> str:
        """Refuses a new line on whose schedule nothing would be learnt; tells where rate and average lead."""
        settings, end, found = self.settings, self.line.total_tokens, self._newest_state
        start: dict[str, Any] = {"update": 0, "tokens": 0, "position": {"cycle": 1, "row": 0}}
        state = start if found is None else found[1]
        begins, next_end = state["tokens"], None
        if end is None or begins < end:
            stands = Position(state["update"], state["position"]["cycle"], state["position"]["row"])
            next_end = plan_update(settings, self.line.cycle_plan(stands.cycle), stands).tokens_after
        edges = [piece.to_tokens for piece in settings.learning_rate if piece.to_tokens is not None]
        edges += [piece.from_tokens + 1 for piece in settings.learning_rate]
        ahead = [edge for edge in edges if edge > (next_end or begins) and (end is None or edge <= end)]
        ends = [tokens for tokens in (next_end, *ahead, end) if tokens is not None]
        rates = [learning_rate(settings.learning_rate, tokens) for tokens in ends]
        first = 0 if settings.branch is None else settings.branch.tokens
        if begins == first and not any(rates):  # one that has trained may have come to the end of its decay
            raise Refusal(
                f"{self.paths.run_json}: field 'learning_rate': it is 0 from {begins:,} tokens to the schedule's end: "
                "nothing would be learnt; give it another piece"
            )
        text = "no update is left" if next_end is None else f"{rates[0]:.3g} next, {max(rates):.3g} at most"
        text += "" if end is None else f", {rates[-1]:.3g} at the end ({human_count(end)} tokens)"
        if settings.ema is None:
            return text + "; no average of the weights"
        average = settings.ema
        if end is not None and average.from_tokens >= end:
            text += f"; NO average: it would begin at {human_count(average.from_tokens)} tokens, beyond the schedule"
            return text
        return text + (
            f"; an average of the weights over {human_count(average.horizon_tokens)} tokens from "
            f"{human_count(average.from_tokens)} on"
        )

    def gpu_reader(self) -> str:
        """Whether other processes on the line's GPU can be seen, without which it never counts as free."""
        source = gpu_of(self.settings)
        if source is None:
            return "not needed by a line on the CPU"
        try:
            gpu = visible_gpu(read_gpus(source.reader))
        except NstrainError as error:
            if self.starts:
                raise
            raise _CannotTellError(f"cannot be read here, and `nstrain run` refuses where it cannot: {error}") from None
        return f"reads {gpu.name}, {gpu.uuid}"

    def notify(self) -> str:
        program = load_host().notify
        if program is None:
            return "no program (host.json's `notify`): nobody is told when the line ends or waits"
        if shutil.which(os.path.expanduser(program)) is None:
            raise Refusal(
                f"{host_file()}: field 'notify': expected a program that this user may run, found {program!r}; nobody "
                "would be told of anything (docs/reference/notices.md)"
            )
        return program

    def tracker(self) -> str:
        tracker = self.settings.tracker
        if tracker is None:
            return "none: the journal stays on this machine"
        from nstrain.mirror.credentials import describe

        return f"project {tracker.project}: {describe(tracker)}"

    def tokenizer(self) -> str:
        encoder = self.line.encoder()
        return f"{encoder.vocabulary.size:,} tokens; control tokens in a text stay text"

    def held_out_rows(self) -> str:
        from nstrain.train.held_out import HeldOut

        counts = {}
        for length in sorted({piece.row_tokens for piece in self.settings.rows}):
            held_out = HeldOut.open(self.line, self.settings, length)
            for rows in (held_out.losses, held_out.long):
                if rows is not None:
                    counts[rows.row_tokens] = len(rows.sources)
        return "intact; rows: " + ", ".join(f"{count} of {length:,} tokens" for length, count in sorted(counts.items()))

    def sources(self) -> str:
        problems: list[str] = []
        files = 0
        for name in self.line.source_names:
            source = self.line.source(name)
            if source.kind == "hub":  # its files are fetched, and verified, when they are needed
                continue
            root = source.root
            left_out = {file.path for file in self.line.settings.excluded if file.source == name}
            listed = (file for stratum in self.line.listing(name).files for file in stratum)
            for file in (file for file in listed if file.path not in left_out):
                files += 1
                if problem := self._file_problem(root, file):
                    problems.append(f"source {name}: {problem}")
                self.on_file(name, file.size)
        if problems:
            more = f" (and {len(problems) - 5:,} more)" if len(problems) > 5 else ""
            raise Refusal("; ".join(problems[:5]) + more + "; put the original files back")
        text = f"{files:,} files " + ("with the hashes" if self.deep else "of the sizes") + " that were pinned"
        return "; NOTE: ".join([text, *shortages(self.line)])

    def _file_problem(self, root: Path, file: PinnedFile) -> str | None:
        path = resolve_inside(root, file.path)
        try:
            size = path.stat().st_size
            if size != file.size:
                return f"{path} had {file.size:,} bytes and has {size:,}"
            if self.deep and sha256_file(path) != file.sha256:
                return f"{path} has other content than was pinned"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        return None

    def checkpoint(self) -> str:
        passed_over: list[str] = []
        self.newest = newest_good(self.paths, warn=passed_over.append)
        if passed_over:
            raise Refusal("; ".join(passed_over) + ". A start would go on from there and train the updates since again")
        if self.newest is None:
            return "none yet: the line begins"
        return f"{self.newest.name}, every byte verified"

    def resume(self) -> str:
        from nstrain.train.checkpointing import LineState, changed_libraries, refuse_other_line, refuse_other_manifest

        if self.newest is None:
            return "nothing to resume yet"
        state = read_state(self.newest)
        refuse_other_line(state, self.settings, str(self.newest), self._held_out())
        refuse_other_manifest(LineState.from_json(state), self.line)
        changes = changed_libraries(state)
        if changes:
            return f"goes on from {self.newest.name}; its libraries changed, its bits may: {', '.join(changes)}"
        return f"goes on from {self.newest.name} with the libraries that wrote it"

    def model(self) -> str:
        from nstrain.train.model import build, parameter_places, refuse_long_rows

        refuse_long_rows(self.settings)
        model = build(self.settings.model, self.line.vocab_size, "meta", self.settings.seed)
        shapes = {place.name: tuple(place.parameter.shape) for place in parameter_places(model)}
        self.parameters = sum(place.parameter.numel() for place in parameter_places(model))
        if self.newest is not None:
            for file in sorted(self.newest.glob("*.safetensors")):
                _refuse_other_shapes(shapes, file)
        return f"{human_count(self.parameters)} parameters" + ("" if self.newest is None else ", as in the checkpoint")

    def kernels(self) -> str:
        from nstrain.train.tuned_kernels import use_line_kernels

        return use_line_kernels(self.paths, self.newest)

    def device(self) -> str:
        from nstrain.train.device import refuse_missing_device

        refuse_missing_device(self.settings)
        return self.settings.device

    def host_memory(self) -> str:
        """Whether checkpoints can be copied to the host while a GPU trains on; a CPU line's copy is ordinary memory."""
        from nstrain.train.host_copy import host_copy_bytes, refusal_of_pinned

        assert self.parameters is not None
        needed_bytes = host_copy_bytes(self.parameters, states_of_a_checkpoint(self.settings))
        free_bytes = available_host_bytes()
        if self.settings.device == "cpu":
            return f"{human_bytes(needed_bytes)} for the copy of a checkpoint, {human_bytes(free_bytes)} free"
        slow = refusal_of_pinned(needed_bytes)
        if slow is not None:
            return f"checkpoints will stop the line while they are written: {slow}"
        return f"{human_bytes(needed_bytes)} are pinned for checkpoints, {human_bytes(free_bytes)} free"

    def disk(self) -> str:
        assert self.parameters is not None
        return refuse_small_disk(self.paths, self.settings, self.line, self.parameters)


def _refuse_other_shapes(shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Refuse a tensor file whose names or shapes are not the model's; only its header is read."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    for name in sorted(shapes.keys() | stored.keys()):
        if shapes.get(name) != stored.get(name):
            raise Refusal(
                f"{path}: parameter {name!r}: the model has shape {shapes.get(name, 'none')}, the checkpoint "
                f"{stored.get(name, 'none')}; put back the model package and the configuration that wrote it"
            )


@dataclasses.dataclass(frozen=True)
class _Check:
    name: str
    function: Callable[[_Checks], str]
    quick: bool
    needs: tuple[str, ...] = ()


CHECKS = (
    _Check("run.json", _Checks.run_json, True),
    _Check("settings", _Checks.unchanged, True, ("run.json",)),
    _Check("data line", _Checks.data_line, True, ("run.json",)),
    _Check("directories", _Checks.directories, True, ("data line",)),
    _Check("row lengths", _Checks.row_lengths, True, ("data line",)),
    _Check("updates", _Checks.updates, True, ("data line",)),
    _Check("consumer", _Checks.consumer, True, ("data line",)),
    _Check("data cycles", _Checks.data_cycles, True, ("settings", "data line")),
    _Check("held-out text", _Checks.held_out_index, True, ("data line",)),
    _Check("journal", _Checks.journal, True, ("settings",)),
    _Check("learning rate", _Checks.rates, True, ("settings", "data line", "row lengths")),
    _Check("gpu reader", _Checks.gpu_reader, True, ("run.json",)),
    _Check("notify", _Checks.notify, True),
    _Check("tracker", _Checks.tracker, True, ("run.json",)),
    _Check("tokenizer", _Checks.tokenizer, False, ("data line",)),
    _Check("held-out rows", _Checks.held_out_rows, False, ("held-out text", "row lengths")),
    _Check("sources", _Checks.sources, False, ("data line",)),
    _Check("checkpoint", _Checks.checkpoint, False),
    _Check("resume", _Checks.resume, False, ("settings", "data line", "checkpoint")),
    _Check("model", _Checks.model, False, ("data line",)),
    _Check("kernels", _Checks.kernels, False, ("checkpoint",)),
    _Check("device", _Checks.device, False, ("run.json",)),
    _Check("host memory", _Checks.host_memory, False, ("model",)),
    _Check("disk", _Checks.disk, False, ("data cycles", "model")),
)
"""In the order in which they are shown; `needs` names checks before them."""
