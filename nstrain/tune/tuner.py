"""`nstrain tune`: find each row length's fastest shape by trying, and write it into run.json.

A shape is (micro_rows, recompute). Neither changes what is trained: an update takes exactly its rows (workload.py).
Per row length of the schedule:

    for each mode, from the one that keeps all activations to the one that keeps least:
        grow the micro-batch, from the smallest size - in later modes from the fastest size so far - until one does not
        fit, by the estimate (memory.py) or in fact, or two in a row bring nothing
    -> of all that fit with the margin, the one that trains most tokens a second over the schedule, padding deducted

Later modes begin where the one before was fastest, since recomputing costs time and pays by the room it makes for more
rows. Every trial is a process (child.py) and is written to trials.json when it ends; a call that was killed is made
again and goes on from there. run.json is replaced once, at the end, and only while the line has no update: later,
other sums would round its updates otherwise than those before."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nstrain.base.disk import FileLock, read_json
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.base.units import human_bytes
from nstrain.data.line import DataLine
from nstrain.data.order import refuse_row_length
from nstrain.gpu.borrowed import borrowed_gpu
from nstrain.gpu.lease import refuse_other_gpu
from nstrain.gpu.readings import gpu_on
from nstrain.line.checkpoint import read_latest
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import load_settings, refuse_no_line
from nstrain.record.journal import Journal
from nstrain.settings.model import dump, validate
from nstrain.settings.run import RunSettings, save_run
from nstrain.tune.child import TRIAL_COMMAND, TrialFailed, run_trial
from nstrain.tune.memory import MemoryModel, margin_bytes, persistent_bytes
from nstrain.tune.records import MODES, Choice, Measurement, Mode, Shape, Trial, TuneFiles
from nstrain.tune.workload import Workload, workload

TRIAL_MICRO_BATCHES = 4
"""Micro-batches of a timed update, unless a line's smallest whole update has fewer."""

FRUITLESS_TRIALS = 2
"""So many trials in a row that fail or are not faster end a mode's growth."""

COMPUTED_WITH = ("model", "optimizer", "ema", "device", "threads")
"""Fields of run.json that a trial's numbers depend on."""


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """How to tune."""

    measure_only: bool = False
    """Leave run.json as it is; allowed on a line that has trained."""
    again: bool = False
    """Use no trial of an earlier call."""
    seconds: float = 5.0
    """How long a shape is timed at least."""
    limit_s: float = 900.0
    """A trial that takes longer has failed; the first one compiles the model's kernels."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What came out."""

    device: str
    chosen: dict[int, Choice]
    """By row length."""
    trials: list[Trial]
    written: bool
    """Whether run.json was replaced."""
    notices: list[str]
    """What the reader should know."""


def tune(
    run: Path,
    options: TuneOptions | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    command: Sequence[str] = TRIAL_COMMAND,
) -> Tuned:
    """Tune the line in `run`. `on_trial` gets each trial as it begins, goes on and ends.

    Raises `Refusal` for no line, one that has trained, settings that cannot be trained, or a run.json that was changed
    meanwhile; `GpuTaken` if the GPU is in use, `NstrainError` if the line is, or if no shape of a length fits.
    """
    options = options or TuneOptions()
    paths = LinePaths(run.resolve())
    refuse_no_line(run)
    with contextlib.ExitStack() as held:
        for lock, what in ((paths.supervisor_lock, "supervisor"), (paths.trainer_lock, "trainer")):
            held.enter_context(FileLock(lock).acquire(f"the {what} of {paths.root}"))
        settings = load_settings(paths)
        if not options.measure_only:
            refuse_trained(paths, 0 if settings.branch is None else settings.branch.update)
        data = DataLine.open(Path(settings.data.work))
        workloads = _workloads(settings, data)
        files = TuneFiles(paths)
        files.make()
        job = {"settings": dump(settings), "vocabulary": data.vocab_size, "kernels": line_kernels(paths)}
        gpu = held.enter_context(borrowed_gpu(gpu_on(settings.device)))  # before a trial touches it
        machine = run_trial(job, files.log, options.limit_s, command=command)["machine"]
        if gpu is not None:
            refuse_other_gpu(gpu.uuid, machine["uuid"])
        tuner = _Tuner(files, settings, job, machine, options, on_trial, command)
        chosen = {load.row_tokens: tuner.choose(load) for load in workloads}
        tuner.record(chosen)
        if not options.measure_only:
            _write_lengths(paths, settings, chosen)
            kill_point("tune:run.json written")
        return Tuned(machine["device"], chosen, tuner.trials, not options.measure_only, tuner.notices)


def refuse_trained(paths: LinePaths, begins: int) -> None:
    """Raise `Refusal` if a line has made an update, by its checkpoints or its journal.

    `begins` is the update that it began at: 0, or that of a branch's fork.
    """
    updates = [*paths.checkpoint_updates(), read_latest(paths) or 0]
    if paths.journal.exists():
        with Journal.open_for_reading(paths.journal) as journal:
            updates.append(journal.last_update() or 0)
    if max(updates) > begins:
        raise Refusal(
            f"{paths.root} has trained up to update {max(updates)}: another shape would round its next updates in "
            "another way than those before, so tune leaves it alone. --measure-only shows what would be faster; "
            "'lengths' is not among the fields that allow_changes guards: edit it in run.json by hand if that is meant"
        )


def line_kernels(paths: LinePaths) -> dict[str, Any]:
    """The kernels' launch configurations that a line has been trained with; empty for one that has not begun."""
    newest = read_latest(paths)
    state = None if newest is None else paths.checkpoint(newest) / "state.json"
    if state is None or not state.exists():
        return {}
    return dict(read_json(state).get("kernels", {}))


def _workloads(settings: RunSettings, data: DataLine) -> list[Workload]:
    lengths = dict.fromkeys(piece.row_tokens for piece in settings.rows)
    for row_tokens in lengths:
        refuse_row_length(row_tokens, data.unit_tokens)
    return [workload(settings, row_tokens, data.cycle_plan, data.cycle_count) for row_tokens in lengths]


def _write_lengths(paths: LinePaths, measured: RunSettings, chosen: Mapping[int, Choice]) -> None:
    """Put the choices into run.json, if it still says what was measured; lengths not measured keep their entries."""
    now = load_settings(paths)
    if now != measured:
        raise Refusal(
            f"{paths.run_json} was edited while it was tuned, and is left as it is; run `nstrain tune` again (what was "
            "measured is used again where it still holds)"
        )
    fields = dump(now)
    for row_tokens, choice in chosen.items():
        fields["lengths"][str(row_tokens)] = {"micro_rows": choice.micro_rows, "recompute": choice.recompute}
    save_run(paths.run_json, validate(RunSettings, fields, str(paths.run_json)))


class _Tuner:
    """The trials of one call, and what they have shown so far."""

    def __init__(
        self,
        files: TuneFiles,
        settings: RunSettings,
        job: Mapping[str, Any],
        machine: Mapping[str, Any],
        options: TuneOptions,
        on_trial: Callable[[Trial], None],
        command: Sequence[str],
    ) -> None:
        self._files, self._settings, self._job, self._options = files, settings, job, options
        self._show, self._command = on_trial, command
        self._device = settings.device
        self._memory = MemoryModel()
        self._machine = machine
        self.notices: list[str] = []
        self._refuse_large_model()
        fields = dump(settings)
        self._basis = {
            "settings": {name: fields[name] for name in COMPUTED_WITH},
            "vocabulary": job["vocabulary"],
            "kernels": job["kernels"],
            "long_rows": settings.validation.long_rows_per_source > 0,
            "machine": {name: machine[name] for name in ("device", "uuid", "memory_bytes", "versions", "code")},
        }
        self._known, differences = ({}, []) if options.again else files.read_trials(self._basis)
        if differences:
            self.notices.append("earlier trials are not used: " + "; ".join(differences))
        self._trials: dict[Shape, Trial] = {}

    @property
    def trials(self) -> list[Trial]:
        """All of this call, in their order."""
        return list(self._trials.values())

    def _refuse_large_model(self) -> None:
        """Refuse a model whose weights, gradients and moments alone are more than the device has."""
        has_ema, total = self._settings.ema is not None, self._machine["memory_bytes"]
        needed = persistent_bytes(self._machine["parameters"], self._device, has_ema)
        if needed > total:
            raise Refusal(
                f"{self._machine['parameters']:,} parameters take {human_bytes(needed)} with gradients and moments"
                f"{' and their moving average' if has_ema else ''}; "
                f"{self._machine['device']} has {human_bytes(total)}: use a smaller model or a larger device"
            )
        free = self._machine.get("free_bytes", total)
        if total - free > total // 20:
            self.notices.append(
                f"{human_bytes(total - free)} of the GPU's {human_bytes(total)} were in use when tuning began: what is "
                "chosen fits beside that, and may be too small once the GPU is free"
            )

    def record(self, chosen: Mapping[int, Choice] | None = None) -> None:
        """Write trials.json; earlier trials of the same basis that this call did not come to stay in it."""
        finished = {**self._known, **{shape: t for shape, t in self._trials.items() if t.outcome != "running"}}
        self._files.write_trials(self._basis, finished.values(), chosen)

    # ---- one row length --------------------------------------------------------------------------------------------

    def choose(self, load: Workload) -> Choice:
        """The fastest shape of a length that fits. Raises `NstrainError` if none does."""
        sizes = load.sizes()
        best: Trial | None = None
        for mode in MODES:
            start = 0 if best is None else sizes.index(best.shape.micro_rows)
            for trial in self._grow(load, mode, sizes[start:]):
                best = _faster(best, trial)
        if best is None or best.tokens_per_s is None or best.padding is None:
            self.record()
            tried = [t for t in self.trials if t.shape.row_tokens == load.row_tokens and t.outcome != "running"]
            reasons = "".join(f"\n  {trial.shape}: {trial.reason}" for trial in tried)
            raise NstrainError(
                f"no shape of rows of {load.row_tokens:,} tokens can be trained on {self._machine['device']} "
                f"(log: {self._files.log}):{reasons}"
            )
        return Choice(best.shape.micro_rows, best.shape.recompute, best.tokens_per_s, best.padding)

    def _grow(self, load: Workload, mode: Mode, sizes: Sequence[int]) -> list[Trial]:
        """Trials of one mode."""
        trials: list[Trial] = []
        fastest: Trial | None = None
        fruitless = 0
        for micro_rows in sizes:
            trial = self._try(load, Shape(load.row_tokens, micro_rows, mode))
            trials.append(trial)
            before, fastest = fastest, _faster(fastest, trial)
            fruitless = 0 if fastest is not before else fruitless + 1
            full = trial.outcome == "pruned" or trial.out_of_memory
            if full or (trial.measured and not trial.measured.fits) or fruitless == FRUITLESS_TRIALS:
                break
        return trials

    # ---- one trial -------------------------------------------------------------------------------------------------

    def _try(self, load: Workload, shape: Shape) -> Trial:
        """A trial, unless an earlier call made it or the estimate rules it out."""
        place = (shape.recompute, shape.row_tokens, shape.micro_rows)
        estimate, too_large = self._memory.estimate(*place), self._memory.rules_out(*place)
        trial = self._known.get(shape)
        if trial is None and too_large is not None:
            reason = f"would take about {human_bytes(too_large)} of {human_bytes(self._memory.room_bytes or 0)}"
            trial = Trial(shape, "pruned", reason, estimated_bytes=estimate)
        if trial is None:
            trial = self._run(load, shape, estimate)
        if trial.measured is not None:
            measured = trial.measured
            self._memory.saw(*place, measured.transient_bytes, measured.room_bytes)
            rate = load.tokens_per_s(shape.micro_rows, measured.micro_batch_s, measured.finish_s)
            trial = dataclasses.replace(trial, tokens_per_s=rate, padding=load.padding(shape.micro_rows))
            if not measured.fits:
                margin = human_bytes(margin_bytes(measured.room_bytes))
                trial = dataclasses.replace(trial, reason=f"leaves less than the margin of {margin}")
        self._trials[shape] = trial
        self.record()
        kill_point("tune:trial recorded")
        self._show(trial)
        return trial

    def _run(self, load: Workload, shape: Shape, estimate: int | None) -> Trial:
        running = Trial(shape, "running", "starting", estimated_bytes=estimate)
        self._show(running)
        batches = max(1, min(TRIAL_MICRO_BATCHES, load.batch_rows[0] // shape.micro_rows))
        job = {
            **self._job,
            "shape": dataclasses.asdict(shape),
            "micro_batches": batches,
            "seconds": self._options.seconds,
        }
        try:
            answer = run_trial(
                job,
                self._files.log,
                self._options.limit_s,
                lambda stage: self._show(dataclasses.replace(running, reason=stage)),
                self._command,
            )
        except TrialFailed as failure:
            return dataclasses.replace(
                running, outcome="failed", reason=str(failure), out_of_memory=failure.out_of_memory
            )
        self._files.add_kernels(self._basis, answer["kernels"])
        return dataclasses.replace(running, outcome="measured", reason=None, measured=Measurement(**answer["measured"]))


def _faster(best: Trial | None, trial: Trial) -> Trial | None:
    """The faster of two that may be used; the earlier one if they are equal."""
    if not trial.usable:
        return best
    if best is None or (trial.tokens_per_s or 0) > (best.tokens_per_s or 0):
        return trial
    return best
