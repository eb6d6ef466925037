"""`nstrain new`: a training line's directory, whole or absent, with every setting visible in its run.json.

Order of the two writes: the directory first (by rename), then the line's entry among the consumers of its data line. A
kill between them leaves a line without an entry. That is harmless and heals: until the line is run nobody needs the
entry, and `nstrain run` writes a missing one before it starts the preparer (`enter_consumer`); if another line's
progress had cycles deleted meanwhile, the preparer makes them again, to the same bytes. The other order could leave an
entry that no line will ever move: it would hold every cycle on disk for ever, and nothing would tell that it may be
removed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nstrain.base.commands import typed
from nstrain.base.disk import directory_by_rename, refuse_existing
from nstrain.base.errors import DiskFull, NstrainError, Refusal
from nstrain.data.consumers import consumer_path
from nstrain.data.line import DataLine
from nstrain.data.order import refuse_row_length
from nstrain.data.val import ValidationRows
from nstrain.line.paths import LinePaths
from nstrain.ops.consumer import enter_consumer
from nstrain.record.local_disk import refuse_network_file_system
from nstrain.settings.model import validate
from nstrain.settings.run import METRICS_VERSION, RUN_FORMAT, RunSettings, save_run

LONGEST_DEFAULT_ROW = 4096
"""Tokens of a row at most, unless a length is asked for."""

MICRO_BATCH_TOKENS = 4096
"""Tokens of one forward and backward pass, unless `micro_rows` is given: fits a CPU and any GPU."""

BATCH_UPDATES, SMALLEST_BATCH_ROWS, LARGEST_BATCH_TOKENS = 1000, 8, 1 << 20
"""Bounds of an update's size, unless it is given: so many updates in the schedule, rows and tokens."""

WARMUP_SHARE = 0.02
"""Share of the schedule that is warm-up."""

WARMUP_UPDATES = 2000
"""Warm-up takes no more updates than this."""

VALIDATIONS = 25
"""Validations of a line, spread evenly."""

OPEN_ENDED_CYCLES = 100
"""For these defaults an open-ended schedule counts as this many cycles."""

_LINE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

Ramp = Sequence[Mapping[str, int | None]]
"""Pieces of a batch ramp as run.json has them: from, to (null in the last), tokens."""


def new_line(
    run: Path,
    preset: str,
    work: Path,
    peak_lr: float,
    tokens_per_update: int | Ramp | None = None,
    *,
    row_tokens: int | None = None,
    micro_rows: int | None = None,
    recompute: str = "none",
    warmup_tokens: int | None = None,
    decay_tokens: int | None = None,
    decay_shape: str | None = None,
    final_lr: float | None = None,
    ema_horizon_tokens: int | None = None,
    ema_from_tokens: int | None = None,
    optimizer: Mapping[str, Any] | None = None,
    validation: Mapping[str, Any] | None = None,
    checkpoints: Mapping[str, Any] | None = None,
    seed: int = 0,
    threads: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    ahead_cycles: int = 1,
    print_every: int = 10,
    tracker: Mapping[str, Any] | None = None,
    line_id: str | None = None,
) -> RunSettings:
    """Make a training line in `run` on the data line in `work`; returns its settings.

    `row_tokens` defaults to the longest divisor of the unit up to 4096 that the model reads; `tokens_per_update` to a
    power of two of rows, 8 at least, that leaves 1000 updates, at most 2**20 tokens. `decay_tokens` is the
    length of the rate's way down to `final_lr`, which ends with the schedule (None: the rate stays).
    `ema_horizon_tokens` asks for a moving average of the weights, which begins at `ema_from_tokens`, or one horizon in.
    `optimizer`, `validation` and `checkpoints` hold fields of those parts of run.json; what they leave out has a
    default. `device` defaults to a CUDA device if this machine has one. `tracker` is run.json's part of that name.

    Raises `Refusal` before anything is written: a directory that is not empty, no data line or one without held-out
    rows, lengths that do not fit each other, the unit or the model, a value out of range. Raises `DiskFull` or
    `NstrainError` if it cannot be written.
    """
    refuse_existing(run)
    line = DataLine.open(work.resolve())
    refuse_network_file_system(LinePaths(run).journal)
    config = _model_config(preset, line)
    row_tokens = _default_row_tokens(line, config) if row_tokens is None else row_tokens
    refuse_row_length(row_tokens, line.unit_tokens)
    planned_tokens = line.total_tokens or OPEN_ENDED_CYCLES * line.cycle_plan(1).tokens
    batch = _default_batch(planned_tokens, row_tokens) if tokens_per_update is None else tokens_per_update
    ramp = _ramp(batch, row_tokens)
    if micro_rows is None:
        micro_rows = _default_micro_rows(row_tokens, ramp)
    computes_on = device or _default_device()
    fields = {
        "format": RUN_FORMAT,
        "id": _free_id(line, line_id),
        "metrics": METRICS_VERSION,
        "data": {"work": str(line.work), "ahead_cycles": ahead_cycles},
        "model": {"preset": preset, "config": config},
        "seed": seed,
        "threads": len(os.sched_getaffinity(0)) if threads is None else threads,
        "device": computes_on,
        "tokens_per_update": batch if isinstance(batch, int) else ramp,
        "rows": [{"from_cycle": 1, "row_tokens": row_tokens}],
        "lengths": {str(row_tokens): {"micro_rows": micro_rows, "recompute": recompute}},
        "learning_rate": _rates(
            peak_lr,
            _default_warmup(planned_tokens, ramp) if warmup_tokens is None else warmup_tokens,
            _decay(line, decay_tokens, decay_shape, peak_lr, final_lr),
        ),
        "ema": _average(ema_horizon_tokens, ema_from_tokens),
        "optimizer": {"clip_norm": 1.0, **(optimizer or {})},
        "validation": {**_default_validation(planned_tokens, ramp, computes_on), **(validation or {})},
        "checkpoints": dict(checkpoints or {}),
        "print_every": print_every,
        "tracker": None if tracker is None else dict(tracker),
    }
    settings = validate(RunSettings, fields, f"{run}: the new line's settings")
    _refuse_unfit(settings, line, row_tokens)
    _write(run, line, settings)
    return settings


def _model_config(preset: str, line: DataLine) -> dict[str, Any]:
    """The preset's configuration for the line's vocabulary."""
    from nstrain.train.model import preset_config  # torch stands behind it

    config = preset_config(preset, line.vocab_size)
    found = config.get("vocab_size")
    if isinstance(found, int) and found < line.vocab_size:
        raise Refusal(
            f"preset {preset!r} has {found:,} rows in its vocabulary, the data line {line.work} has "
            f"{line.vocab_size:,} token ids; use a preset with a larger vocabulary, or a data line "
            "with a smaller tokenizer"
        )
    return config


def _default_row_tokens(line: DataLine, config: Mapping[str, Any]) -> int:
    """The longest divisor of the unit that is at most 4096 and that the model reads."""
    longest = min(LONGEST_DEFAULT_ROW, line.unit_tokens, int(config.get("rope_max_seq_len", LONGEST_DEFAULT_ROW)))
    return next(length for length in range(longest, 0, -1) if line.unit_tokens % length == 0)


def _default_batch(planned_tokens: int, row_tokens: int) -> int:
    """A power of two of rows that leaves BATCH_UPDATES updates, within the bounds."""
    rows = min(planned_tokens // BATCH_UPDATES, LARGEST_BATCH_TOKENS) // row_tokens
    return max(SMALLEST_BATCH_ROWS, 1 << max(0, rows.bit_length() - 1)) * row_tokens


def _ramp(tokens_per_update: int | Ramp, row_tokens: int) -> list[dict[str, int | None]]:
    """A ramp's pieces, also of a single number. How they follow each other is for `RunSettings` to check."""
    if isinstance(tokens_per_update, int):
        pieces: Ramp = [{"from": 0, "to": None, "tokens": tokens_per_update}]
    else:
        pieces = tokens_per_update
    for piece in pieces:
        tokens = piece.get("tokens")
        if tokens is None or tokens <= 0 or tokens % row_tokens:
            raise Refusal(
                f"tokens_per_update: expected a positive multiple of the row length, {row_tokens:,} tokens, found "
                f"{tokens if tokens is None else format(tokens, ',')}"
            )
    if not pieces:
        raise Refusal("tokens_per_update: expected a number of tokens, or at least one piece of a ramp; found none")
    return [dict(piece) for piece in pieces]


def _default_micro_rows(row_tokens: int, ramp: Sequence[Mapping[str, int | None]]) -> int:
    rows_of_update = max(piece["tokens"] or 0 for piece in ramp) // row_tokens
    return max(1, min(MICRO_BATCH_TOKENS // row_tokens, rows_of_update))


def _default_warmup(planned_tokens: int, ramp: Sequence[Mapping[str, int | None]]) -> int:
    """2 % of the schedule in whole updates of the ramp's first batch, at least one and at most 2000."""
    batch_tokens = ramp[0]["tokens"] or 0
    updates = round(WARMUP_SHARE * planned_tokens / batch_tokens)
    return max(1, min(WARMUP_UPDATES, updates)) * batch_tokens


def _default_validation(planned_tokens: int, ramp: Sequence[Mapping[str, int | None]], device: str) -> dict[str, int]:
    """VALIDATIONS of them in the schedule, by the ramp's last batch, at most 1000 updates apart; 16 rows a source.

    On a CPU one long row a source: at 32,768 tokens each takes most of a minute there even of the smallest preset.
    """
    updates = planned_tokens // (ramp[-1]["tokens"] or 0)
    found = {"every_updates": max(1, min(1000, updates // VALIDATIONS)), "rows_per_source": 16}
    return {**found, "long_rows_per_source": 1} if device == "cpu" else found


def _default_device() -> str:
    from nstrain.train.device import has_cuda  # torch stands behind it

    return "cuda" if has_cuda() else "cpu"


def _rates(peak: float, warmup_tokens: int, decay: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The learning rate's pieces: warm-up, constant, decay; those that have no length are left out."""
    if not peak > 0:
        raise Refusal(f"the learning rate after warm-up must be greater than 0, found {peak:g}")
    pieces: list[dict[str, Any]] = []
    if warmup_tokens:
        pieces.append({"from": 0, "to": warmup_tokens, "shape": "linear", "start": 0.0, "end": peak})
    if decay is not None and decay["from"] < warmup_tokens:
        raise Refusal(
            f"the decay begins at {decay['from']:,} tokens, inside the warm-up of {warmup_tokens:,}; make one "
            "of them shorter"
        )
    if decay is None or decay["from"] > warmup_tokens:
        pieces.append({"from": warmup_tokens, "shape": "constant", "start": peak})
    return pieces if decay is None else [*pieces, decay]


def _average(horizon_tokens: int | None, from_tokens: int | None) -> dict[str, int] | None:
    if horizon_tokens is None:
        if from_tokens is not None:
            raise Refusal("say over how many tokens the weights are averaged (ema_horizon_tokens), not only from where")
        return None
    return {"horizon_tokens": horizon_tokens, "from_tokens": horizon_tokens if from_tokens is None else from_tokens}


def _decay(
    line: DataLine, tokens: int | None, shape: str | None, peak: float, final: float | None
) -> dict[str, Any] | None:
    if tokens is None:
        if shape is not None or final is not None:
            raise Refusal(
                "the rate's way down has no length: say over how many tokens (decay_tokens), or leave its shape "
                "and its end out"
            )
        return None
    shape, final = shape or "linear", final or 0.0
    if line.total_tokens is None:
        raise Refusal(
            "the learning rate cannot fall towards the end of an open-ended schedule; leave the decay out, or make the "
            "data line with a number of cycles"
        )
    if not 0 < tokens <= line.total_tokens:
        raise Refusal(
            f"a decay of {tokens:,} tokens does not fit the schedule of {line.total_tokens:,}; ask for 1 to as many"
        )
    if final > peak:
        raise Refusal(f"the rate cannot fall from {peak:g} to {final:g}; a decay ends at or below the peak")
    return {
        "from": line.total_tokens - tokens,
        "to": line.total_tokens,
        "shape": shape,
        "start": peak,
        "end": final,
    }


def _free_id(line: DataLine, line_id: str | None) -> str:
    """The line's name among the consumers: the one asked for, if nobody has it, or a new one."""
    if line_id is None:
        return secrets.token_hex(8)
    if not _LINE_ID.fullmatch(line_id):
        raise Refusal(
            f"id {line_id!r}: expected 1 to 64 of a-z, 0-9, '_' and '-', the first a letter or a digit: it names a file"
        )
    entry = consumer_path(line.work, line_id)
    if entry.exists():
        raise Refusal(f"id {line_id!r} is taken: {entry} is another line's; choose another id, or leave it out")
    return line_id


def _refuse_unfit(settings: RunSettings, line: DataLine, row_tokens: int) -> None:
    """Refuse what `RunSettings` cannot see: rows that the model does not read, held-out rows that are missing."""
    from nstrain.train.model import refuse_long_rows

    refuse_long_rows(settings)
    ValidationRows.open(line, row_tokens, settings.validation.rows_per_source)


def _write(run: Path, line: DataLine, settings: RunSettings) -> None:
    try:
        with directory_by_rename(run) as directory:
            paths = LinePaths(directory)
            paths.checkpoints.mkdir()
            paths.supervisor_lock.parent.mkdir()
            save_run(paths.run_json, settings)
    except OSError as error:
        raise Refusal(f"{run} cannot be made ({error}); name a directory in a place that you may write to") from error
    try:
        enter_consumer(LinePaths(run.resolve()), settings)
    except (DiskFull, OSError) as error:
        raise NstrainError(
            f"{run} was made, but its entry in {line.work / 'consumers'} could not be written ({error}); "
            f"`{typed('nstrain', 'run', run)}` writes it once there is room"
        ) from error
