"""What run.log prints of a row, and which alarms are told again."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from train_helpers import run_settings

from nstrain.line.paths import LinePaths
from nstrain.record.alarms import SHOWN_ALARMS
from nstrain.train.alarming import Alarming
from nstrain.train.run_log import printed, validation_lines

TRAINED = {
    "tokens": 163_840,
    "cycle": 1,
    "smaller": 0,
    "skipped": 0,
    "train/loss": 5.12345,
    "train/grad_norm": 1.5,
    "train/learning_rate": 3e-3,
    "perf/tokens_per_s": 12_345.0,
}
VALIDATED = {
    "val_16/books": 4.0,
    "val_16/code": 5.0,
    "val_16/mix": 4.25,
    "val_16/mean": 4.5,
    "val_16/docpos/bin0": 4.0,
    "val_16/dendritic/tau_p50": 44.444,
    "val_16/dendritic/tau_max": math.inf,
    "val_16/dendritic/layer00/firing": 0.5,
    "val_64/mix": 3.75,
    "val_64/pos/last_over_first": 0.9876,
    "ema/val_16/mix": 4.0,
    "opt/matrix/update_ratio": 0.0123,
    "opt/layer00/update_ratio": 0.9,
    "opt/part/norm/update_ratio": 0.8,
    "time/validation_s": 3.21,
    "time/validation_probe_s": 1.0,
    "time/validation_long_s": 0.5,
}


def test_a_trained_row_is_one_line() -> None:
    assert printed(80, TRAINED) == (
        "u80  164K tokens  cycle 1  loss 5.1235  grad norm 1.5000  rate 0.003  12.3K tokens/s"
    )
    odd = printed(80, TRAINED | {"skipped": 1, "smaller": 1, "train/loss": math.nan})
    assert "loss nan" in odd
    assert "SKIPPED" in odd
    assert "smaller" in odd


def test_a_validation_is_a_block_of_few_lines() -> None:
    lines = printed(80, TRAINED | VALIDATED).splitlines()
    text = "\n".join(lines[1:])
    assert lines[1] == "  16-token rows         mix 4.2500  mean 4.5000  books 4.0000  code 5.0000"
    assert "16-token average      mix 4.0000" in text
    assert "tau p50 44.4  tau max inf" in text
    assert "64-token rows         mix 3.7500  last/first segment 0.988" in text
    assert "step / weights        matrix 0.012\n" in text
    assert "3.2 s (probes 1.0, long rows 0.5), 14 readings" in text
    assert len(lines) == 7
    assert validation_lines(TRAINED) == []


def test_alarms_end_a_row_and_are_cut_short() -> None:
    lines = printed(80, TRAINED, [f"a{number}" for number in range(SHOWN_ALARMS + 2)]).splitlines()
    assert lines[1] == "  ALARM a0"
    assert lines[-1] == "  ALARM and 2 more"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notify program that appends each notice to a file."""
    out, program = tmp_path / "told.jsonl", tmp_path / "notify"
    program.write_text(
        f"#!{sys.executable}\nimport sys, json\n"
        f"open({str(out)!r}, 'a').write(json.dumps(json.load(sys.stdin)) + '\\n')\n"
    )
    program.chmod(0o755)
    host = tmp_path / "host.json"
    host.write_text(json.dumps({"notify": str(program)}))
    monkeypatch.setenv("NSTRAIN_HOST", str(host))
    return out


def test_only_new_alarms_are_notices(told: Path, tmp_path: Path) -> None:
    alarming = Alarming(LinePaths(tmp_path / "run"), run_settings())
    dead, quiet = {"val_8/dendritic/firing": 0.0}, {"val_8/dendritic/firing": 0.5}
    jump = {"train/loss": 9.0, "train/loss_jump": 12.0, "skipped": 0}
    rows = [dead, jump, dead, jump, quiet, dead, {}, jump | {"update": 150}]
    for update, row in enumerate(rows, 1):
        at = int(row.get("update", update))
        found = alarming.alarms(at, {"tokens": 64 * at} | row, ["odd names"] if not row else [])
        assert len(found) == (row != quiet), "run.log has each"
    alarming.close()
    notices = [json.loads(line) for line in told.read_text().splitlines()]
    assert {notice["event"] for notice in notices} == {"alarm"}
    texts = {notice["update"]: notice["text"] for notice in notices}
    assert sorted(texts) == [1, 2, 6, 7, 150]
    assert "nearly dead" in texts[1]
    assert "jumped to 9.0000" in texts[2]
    assert texts[7] == "odd names"
    assert next(notice for notice in notices if notice["update"] == 6)["tokens"] == 384
