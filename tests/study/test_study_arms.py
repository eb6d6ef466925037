"""Every arm is the model it says it is, trains, and leaves nothing of its swaps behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import neuronspark
from benchmarks.study import training
from benchmarks.study.arms import ARMS, DEFAULT, SIZES, shallow
from benchmarks.study.data import StudyData
from benchmarks.study.training import Job
from neuronspark import dendritic, hippocampal, memory
from neuronspark.hippocampal import HippocampalLayer

TOY = SIZES["toy"]
ROW_TOKENS = 24
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(1, 128, (2, ROW_TOKENS + 1)))


def loss_of(arm: str, tokens: Tensor = TOKENS) -> float:
    with ARMS[arm].in_force():
        model = ARMS[arm].build(ARMS[arm].configure(TOY), "cpu", 0)
        return float(model.loss(tokens, torch.ones(()))[0].detach())


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_learns_and_is_read(arm: str, data: StudyData) -> None:
    found, is_clean = training.run(Job(arm, "toy", 1e-2, 0, "toy"), data, "cpu")
    assert is_clean
    assert found["updates"] == 4
    assert found["val"] < np.log(128) - 0.05
    assert found["val"] == pytest.approx(np.mean(list(found["val_by_source"].values())))
    assert found["gradient"]["skipped"] == 0
    assert set(found["long_rows"]) == {"64"}
    assert bool(found.get("health")) == ARMS[arm].is_probed


@pytest.mark.parametrize("arm", ["default", "no-spikes", "everywhere", "llama-conv", "mamba-attention"])
def test_a_run_gives_the_same_numbers_again(arm: str, data: StudyData) -> None:
    def numbers() -> dict[str, object]:
        found, _ = training.run(Job(arm, "toy", 1e-2, 0, "toy"), data, "cpu")
        return {name: value for name, value in found.items() if name not in ("seconds", "tokens_per_s")}

    assert numbers() == numbers()


def test_seed_changes_weights_and_order(data: StudyData) -> None:
    first, second = (next(data.updates(32, 8, seed, 1)) for seed in (0, 1))
    assert (first != second).any()
    assert sorted(map(tuple, np.concatenate(list(data.updates(32, 8, 0, 1))))) == sorted(
        map(tuple, np.concatenate(list(data.updates(32, 8, 1, 1))))
    )


SWAPPED_NAMES = [
    (dendritic, "signed_of_gated_norm"),
    (dendritic, "project"),
    (dendritic, "starting_leaks"),
    (dendritic, "STEP_STD"),
    (dendritic, "LARGEST_INPUT_GAIN"),
    (hippocampal, "project"),
    (hippocampal, "addresses"),
    (hippocampal, "arbitrate"),
    (hippocampal, "excitatory_times"),
    (hippocampal, "excitatory_times_signed"),
    (hippocampal, "signed_of_norm"),
    (memory, "project"),
    (HippocampalLayer, "events"),
    (HippocampalLayer, "_trace"),
    (neuronspark.model, "parameter_specs"),
    (neuronspark.NeuronSpark, "__init__"),
]


@pytest.mark.parametrize("arm", [name for name, arm in ARMS.items() if arm.package is neuronspark])
def test_an_arm_differs_from_the_default_and_nothing_stays_swapped(arm: str) -> None:
    before = [getattr(place, name) for place, name in SWAPPED_NAMES]
    found = loss_of(arm)
    assert [getattr(place, name) for place, name in SWAPPED_NAMES] == before
    if arm not in ("default", "everywhere-fixed"):  # that one differs in its gradients alone
        assert found != loss_of(DEFAULT.name) or ARMS[arm].configure(TOY) != TOY.default


def gradients(arm: str) -> dict[str, Tensor | None]:
    with ARMS[arm].in_force():
        model = ARMS[arm].build(ARMS[arm].configure(TOY), "cpu", 0)
        model.loss(TOKENS, torch.ones(()))[0].backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("arm", "unused"),
    [
        ("no-match", "match_gain"),
        ("no-match", "w_p"),
        ("no-clock", "clock_bias"),
        ("no-tag", "write_bias"),
        ("no-trace", "w_trace"),
        ("no-arbitration", "novelty_weight"),
        ("no-spikes", "log_threshold"),
        ("everywhere-fixed", "input_log_threshold"),
    ],
)
def test_a_mechanism_that_is_left_out_has_no_gradient(arm: str, unused: str) -> None:
    named = {name: grad for name, grad in gradients(arm).items() if name.endswith(unused)}
    assert named
    assert all(grad is None or not grad.any() for grad in named.values())
    if unused != "input_log_threshold":
        assert any(grad is not None and grad.any() for n, grad in gradients("default").items() if n.endswith(unused))


def projection_inputs(arm: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor]]:
    """(the weight's name, the input) of every projection of a forward, by the parameters' names."""
    seen: list[tuple[int, Tensor]] = []

    def watched(project):  # type: ignore[no-untyped-def]
        def watching(x_TC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            seen.extend((id(weight), x_TC.detach()) for weight in weights)
            return project(x_TC, *weights)

        return watching

    for module in (dendritic, hippocampal, memory):
        monkeypatch.setattr(module, "project", watched(module.project))
    with ARMS[arm].in_force():
        model = ARMS[arm].build(ARMS[arm].configure(TOY), "cpu", 0)
        model.token_losses(TOKENS)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(names[key], x_TC) for key, x_TC in seen]


def are_quanta(x_TC: Tensor, most: int) -> bool:
    """Whether every channel holds whole multiples of the starting threshold."""
    quanta = x_TC.double() / TOY.default.threshold_init
    return bool((quanta - quanta.round()).abs().max() < 1e-4) and bool(quanta.abs().max() <= most + 1e-4)


def test_everywhere_every_projection_reads_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = projection_inputs("everywhere", monkeypatch)
    assert {"layer00.w_z", "layer00.w_dt", "layer01.w_q", "layer01.w_memory_query"} <= {name for name, _ in inputs}
    assert all(are_quanta(x_TC, TOY.default.spike_levels) for _, x_TC in inputs)
    with monkeypatch.context() as undone:
        plain = projection_inputs("default", undone)
    assert not all(are_quanta(x_TC, TOY.default.spike_levels) for _, x_TC in plain)


def test_controls_can_see_the_input_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = dict(projection_inputs("everywhere-controls", monkeypatch))
    controls = {"layer00.w_dt", "layer01.w_decay", "layer01.w_control", "layer01.w_memory_gate"}
    assert all(are_quanta(x_TC, TOY.default.spike_levels) == (name not in controls) for name, x_TC in by_name.items())


def test_baselines_and_default_are_of_one_size() -> None:
    for size in ("50M", "150M"):
        counts = [
            ARMS[a].configure(SIZES[size]).parameter_count()
            for a in ("default", "llama", "llama-conv", "mamba-attention")
        ]
        assert max(counts) < 1.09 * min(counts)


def test_a_shallow_model_has_every_shape_of_its_letter() -> None:
    config = ARMS["default"].configure(SIZES["50M"])
    for letter in "DH":
        shallow_config = shallow(config, letter)
        assert shallow_config.layers == letter
        wanted = {
            (name.partition(".")[2], spec.shape)
            for name, spec in neuronspark.model.parameter_specs(config).items()
            if name.startswith("layer") and config.layers[int(name[5:7])] == letter
        }
        found = {
            (n.partition(".")[2], spec.shape) for n, spec in neuronspark.model.parameter_specs(shallow_config).items()
        }
        assert wanted <= found


@pytest.mark.parametrize("arm", ["default", "everywhere", "llama", "mamba-attention"])
def test_kernels_are_compiled_by_what_a_run_does(arm: str, data: StudyData, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes that a warm-up's one layer is called with are all those of a run."""

    def shapes_of(work: Callable[[], object]) -> set[tuple[int, ...]]:
        seen = set()
        package = type(ARMS[arm].build(ARMS[arm].configure(TOY), "cpu", 0))
        with monkeypatch.context() as watched, ARMS[arm].in_force():
            hidden = package._final_hidden
            watched.setattr(
                package, "_final_hidden", lambda self, tokens: seen.add(tuple(tokens.shape)) or hidden(self, tokens)
            )
            work()
        return seen

    job = Job(arm, "toy", 1e-2, 0, "toy")
    letters = set(ARMS[arm].configure(TOY).layers)
    ran = shapes_of(lambda: training.run(job, data, "cpu"))
    for letter in letters:
        assert shapes_of(lambda letter=letter: training.warm_up(job, letter, data, "cpu")) >= ran


def test_the_short_convolution_is_torchs() -> None:
    from baselines.operators import convolved, convolved_silu

    torch.manual_seed(0)
    x, weight, bias, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 9, 5), (5, 4), (5,), (2, 9, 5)))
    for ours, after in ((convolved, lambda sums: sums), (convolved_silu, functional.silu)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        ours(*leaves).backward(dy)
        theirs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        padded = functional.pad(theirs[0].transpose(1, 2), (3, 0))
        y = after(functional.conv1d(padded, theirs[1][:, None], theirs[2], groups=5).transpose(1, 2))
        torch.testing.assert_close(ours(x, weight, bias), y.detach())
        y.backward(dy)
        for mine, other in zip(leaves, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
