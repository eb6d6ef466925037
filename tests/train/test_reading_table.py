"""The table of readings against the documentation, the requirement's list, and the journal of a real line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from readings_line import CONFIG, LONG_TOKENS, ROW_TOKENS, make_readings_line, train
from real_line import make_data_line, prepare

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION
from nstrain.train.probe_readings import RULES
from nstrain.train.reading_table import CONDITIONS, READINGS

METRICS = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()


def section(title: str, of: str = METRICS) -> str:
    """The text under a heading, up to the next one of its level."""
    level, _, name = title.partition(" ")
    found = re.search(rf"^{re.escape(level)} {re.escape(name)}$\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", of, re.M | re.S)
    assert found, title
    return found[1]


def table(text: str) -> list[list[str]]:
    """The rows of a section's tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {index - 1 for index, row in enumerate(cells) if set(row[0]) == {"-"}}
    return [row for index, row in enumerate(cells) if index not in heads and set(row[0]) != {"-"}]


# --- the documentation -------------------------------------------------------------------------------------------


def test_conditions_are_those_of_the_documentation() -> None:
    head = METRICS[: METRICS.index("## Training")]
    assert dict(table(head)) == dict(CONDITIONS)


@pytest.mark.parametrize("title", ["Training", "Losses", "Optimizer", "Time"])
def test_readings_are_those_of_the_documentation(title: str) -> None:
    documented = {(row[0].strip("`"), row[1], tuple(row[2].split("; "))) for row in table(section(f"## {title}"))}
    assert documented == {(r.pattern, r.unit, r.present) for r in READINGS if r.formula == title}


STATISTICS = {"mean": "", "sum, over the model": "", "one number, over the model": "", "p50, without suffix": ""}
"""What stands for a reading without a suffix."""


@pytest.mark.parametrize("kind", ["dendritic", "hippocampal"])
def test_probes_are_those_of_the_documentation(kind: str) -> None:
    text = section(f"### `val_<L>/{kind}/`", section("## Probes"))
    documented = set()
    for name, statistics, unit, present, _ in table(text):
        also = tuple(filter(None, present.split("; ")))
        for length, when in (("<L>", "validated"), ("<P>", "long rows")):
            if "long rows" in also and length == "<L>":
                continue
            conditions = (when, "layers", *(c for c in also if c != "long rows"))
            whole = "over the model" in statistics
            scopes = [f"val_{length}/{kind}/"] + ([] if whole else [f"val_{length}/{kind}/layer<NN>/"])
            for statistic in [statistics] if statistics in STATISTICS else statistics.split(", "):
                suffix = STATISTICS.get(statistic, f"_{statistic}")
                for scope in scopes[-1:] if statistic == "head" else scopes:
                    end = "_head<h>" if statistic == "head" else suffix
                    of = "share" if suffix.startswith("_frac") else unit
                    documented.add((f"{scope}{name.strip('`')}{end}", of, conditions))
    assert documented == {
        (r.pattern, r.unit, r.present) for r in READINGS if r.formula == "Probes" and f"/{kind}/" in r.pattern
    }


def test_patterns_are_all_different() -> None:
    assert len({reading.pattern for reading in READINGS}) == len(READINGS)
    assert {reading.probe for reading in READINGS} - {None} == set(RULES)


# --- a real line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 3, short_documents=True)
    prepare(line.work, 3)
    return line


@pytest.fixture(scope="module")
def paths(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    paths = make_readings_line(tmp_path_factory.mktemp("line") / "run", data)
    assert train(paths, 28) == ExitCode.STOPPED
    return paths


def names_of(paths: LinePaths) -> list[set[str]]:
    """The names of every row's readings."""
    with Journal.open_for_reading(paths.journal) as journal:
        return [set(row) - {"update", "generation"} for row in journal.rows()]


WORDS = {
    "<source>": "(books|code)", "<group>": "(matrix|embedding|memory|neuron|norm)", "<part>": "(embedding|norm)",
    "<term>": "ce", "<NN>": r"\d\d", "<k>": r"\d+", "<h>": r"\d+", "<L>": str(ROW_TOKENS), "<P>": str(LONG_TOKENS),
}  # fmt: skip


def is_of(name: str, pattern: str) -> bool:
    pieces = re.split(r"(<\w+>)", pattern)
    return re.fullmatch("".join(WORDS.get(piece) or re.escape(piece) for piece in pieces), name) is not None


def test_every_name_is_of_the_table_and_every_pattern_occurs(paths: LinePaths) -> None:
    names = set().union(*names_of(paths))
    for name in names:
        assert len([r for r in READINGS if is_of(name, r.pattern)]) == 1, name
    assert [r.pattern for r in READINGS if not any(is_of(name, r.pattern) for name in names)] == []


def test_a_row_has_a_reading_exactly_if_its_conditions_hold(paths: LinePaths) -> None:
    """Validated every 4th update and at a cycle's end, the average from update 2 on, the loss window from 26 on."""
    for update, names in enumerate(names_of(paths)):
        validated = update % 4 == 0 or update in (13, 26)
        holds = {
            "always": True,
            "trained": update > 0,
            "loss window": update > 25,
            "validated": validated,
            "long rows": validated,
            "average": validated and update >= 2,
        }
        for reading in READINGS:
            there = any(is_of(name, reading.pattern) for name in names)
            assert there == all(holds.get(condition, True) for condition in reading.present), (update, reading)


REQUIRED = """
val_<L>/<source> val_<L>/mix val_<L>/mean val_<L>/docpos/bin<k> val_<L>/docpos/tokens_frac
ema/val_<L>/<source> ema/val_<L>/mix ema/val_<L>/mean ema/val_<P>/<source> ema/val_<P>/mix ema/val_<P>/mean
val_<P>/<source> val_<P>/mix val_<P>/mean val_<P>/pos/seg<k> val_<P>/pos/last_over_first
opt/<group>/param_norm opt/<group>/m_norm opt/<group>/grad_rms opt/<group>/update_norm opt/<group>/update_ratio
opt/layer<NN>/param_norm opt/layer<NN>/update_norm opt/layer<NN>/update_ratio
train/grad_norm/layer<NN> train/grad_norm/embedding train/grad_norm/norm train/grad_norm/group/<group>
train/loss train/learning_rate
"""
REQUIRED_OF_DENDRITIC = """
retention_p50 retention_frac_gt_0.9 retention_max retention_frac_gt_0.5 retention32k_frac_gt_0.5 tau_p50 tau_p90 tau_max
firing boundary_retention_p50 boundary_retention_max boundary_step_ratio_p50 boundary_step_ratio_max
"""
REQUIRED_OF_LONG_DENDRITIC = "retention_seg<k>_p50 retention_seg<k>_max firing_seg<k>"
REQUIRED_OF_HIPPOCAMPAL = """
decay_tau_p50 decay_tau_p90 decay_tau_max clock_tau_p50 clock_tau_max clock_boundary_step_ratio write_p50 write_max
gate_firing ffn_in_firing ffn_gate_firing ffn_up_firing copy_pi novelty read_gain pkm_entropy pkm_slots_used pkm_gate
rope_ext_q_p50 rope_ext_q_max rope_ext_k_p50 rope_ext_k_max attn_dist_bin<k> attn_beyond_train_p50 attn_beyond_train_max
attn_mean_log2_p50 attn_mean_log2_max attn_entropy_p50 attn_entropy_max
"""
REQUIRED_OF_HEADS = "clock_tau write rope_ext_q rope_ext_k attn_beyond_train attn_mean_log2 attn_entropy"


def required() -> list[str]:
    """The names that the requirement gives, as patterns of this table."""
    names = REQUIRED.split()
    for length in ("<L>", "<P>"):
        dendritic = REQUIRED_OF_DENDRITIC.split() + (REQUIRED_OF_LONG_DENDRITIC.split() if length == "<P>" else [])
        for scope in ("", "layer<NN>/"):
            names += [f"val_{length}/dendritic/{scope}{name}" for name in dendritic]
            names += [f"val_{length}/hippocampal/{scope}{name}" for name in REQUIRED_OF_HIPPOCAMPAL.split()]
        names += [f"val_{length}/hippocampal/layer<NN>/{name}_head<h>" for name in REQUIRED_OF_HEADS.split()]
        names += [f"val_{length}/dendritic/boundaries", f"val_{length}/hippocampal/rope_ext_pairs_frac"]
    return names


def test_every_required_name_is_in_the_table_and_in_the_journal(paths: LinePaths) -> None:
    names = set().union(*names_of(paths))
    assert [pattern for pattern in required() if not any(is_of(name, pattern) for name in names)] == []
    patterns = {reading.pattern for reading in READINGS} | {f"train/grad_norm/{part}" for part in ("embedding", "norm")}
    assert [pattern for pattern in required() if pattern not in patterns] == []


def test_numbers_of_segments_bins_heads_and_layers(paths: LinePaths) -> None:
    validated = names_of(paths)[8]
    segments = {name for name in validated if re.search(r"_seg\d+(_|$)|/seg\d+$", name)}
    assert {re.findall(r"seg(\d+)", name)[0] for name in segments} == {"0", "1"}, "rows of 32 in segments of 16"
    for length, bins in ((ROW_TOKENS, 5), (LONG_TOKENS, 6)):
        found = {name for name in validated if name.startswith(f"val_{length}/hippocampal/layer01/attn_dist_bin")}
        assert len(found) == bins
    heads = {name for name in validated if name.startswith("val_16/hippocampal/layer02/write_head")}
    assert len(heads) == CONFIG["width"] // CONFIG["pool_head_width"]
    assert {name.split("/")[2] for name in validated if "pkm" in name and name.count("/") == 3} == {"layer02"}


# --- what is refused ---------------------------------------------------------------------------------------------


def assert_nothing_began(paths: LinePaths) -> None:
    assert paths.checkpoint_updates() == []
    assert names_of(paths) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: found["layer01"].pop("hippocampal/write"), r"8 are missing \(.*layer01/write_head0"),
        (lambda found: found.pop("layer00"), "are missing"),
        (lambda found: found["layer01"].update({"dendritic/tau": found["layer00"]["dendritic/tau"]}), "have no place"),
    ],
)
def test_a_probe_with_other_readings_refuses_the_start(
    spoil: Any, message: str, data: DataLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import neuronspark.probe

    probe = neuronspark.probe.probe

    def spoiled(*arguments: Any, **options: Any) -> Any:
        found = probe(*arguments, **options)
        spoil(found)
        return found

    monkeypatch.setattr("neuronspark.probe.probe", spoiled)
    paths = make_readings_line(tmp_path / "run", data)
    with pytest.raises(Refusal, match=message):
        train(paths, 3)
    assert_nothing_began(paths)


def test_a_line_that_has_trained_is_told_and_goes_on(
    data: DataLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import neuronspark.probe

    probe, paths = neuronspark.probe.probe, make_readings_line(tmp_path / "run", data)
    assert train(paths, 5) == ExitCode.STOPPED

    def less(*arguments: Any, **options: Any) -> Any:
        found = probe(*arguments, **options)
        found["layer00"].pop("dendritic/tau")
        return found

    monkeypatch.setattr("neuronspark.probe.probe", less)
    capsys.readouterr()
    assert train(paths, 9) == ExitCode.STOPPED
    assert len(re.findall(r"ALARM of a validation's readings 12 are missing", capsys.readouterr().out)) == 1
    assert len(names_of(paths)[4] - names_of(paths)[8]) == 12, "recorded as it is"


def test_a_reading_must_be_given_or_said_to_be_absent(
    data: DataLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_readings_line(
        tmp_path / "run", data, model={"preset": "tiny-32k", "config": CONFIG | {"layers": "DDD", "memory_layers": []}}
    )
    monkeypatch.setattr("neuronspark.probe.absent_readings", lambda _: {})
    with pytest.raises(Refusal, match=r"does not give 'hippocampal/decay_tau', and its absent_readings\(\)"):
        train(paths, 3)
    monkeypatch.undo()
    assert train(paths, 1) == ExitCode.STOPPED
    assert not any("hippocampal" in name for names in names_of(paths) for name in names)
    assert any("dendritic/layer02" in name for name in names_of(paths)[0])


def test_another_set_of_readings_does_not_start(data: DataLine, tmp_path: Path) -> None:
    paths = make_readings_line(tmp_path / "run", data, metrics=METRICS_VERSION - 1)
    with pytest.raises(
        Refusal, match=f"'metrics' is {METRICS_VERSION - 1}, this nstrain records version {METRICS_VERSION}"
    ):
        train(paths, 1)
    assert not paths.checkpoints.exists()
