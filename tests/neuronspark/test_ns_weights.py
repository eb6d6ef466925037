"""Files of weights: the same model comes back, and whatever is not one is refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuronspark import ModelConfig, NeuronSpark, WeightsError, load_weights, save_weights

CONFIG = ModelConfig.from_dict(
    {
        "vocab_size": 64,
        "width": 32,
        "layers": "DH",
        "memory_layers": [1],
        "memory_keys": 8,
        "memory_top_k": 4,
        "memory_query_width": 16,
        "memory_value_width": 16,
        "rope_max_seq_len": 100,
        "ffn_width": 48,
        "dendritic_head_width": 8,
        "state_width": 8,
        "pool_head_width": 16,
        "trace_width": 8,
        "match_width": 8,
    }
)


def build(dtype: torch.dtype = torch.float32, seed: int = 3) -> NeuronSpark:
    return NeuronSpark(CONFIG, "cpu", seed=seed, compute_dtype=dtype)


def values(model: NeuronSpark) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of weights, and the tensors in it."""
    save_weights(build(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def rewrite(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """The file with other tensors and, unless others are given, its own metadata."""
    with safe_open(path, framework="pt") as file:
        own = file.metadata()
    save_file(tensors, path, own if metadata is None else metadata)


# --- there and back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_model_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build(dtype)
    save_weights(model, tmp_path / "m.safetensors")
    loaded = load_weights(tmp_path / "m.safetensors", dtype=dtype)
    assert loaded.config == CONFIG
    assert loaded.compute_dtype == dtype
    ours, theirs = values(loaded), values(model)
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name
    tokens = torch.randint(0, 64, (2, 41), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.token_losses(tokens), model.token_losses(tokens))


def test_the_compute_dtype_is_the_readers(saved: Path) -> None:
    loaded, model = load_weights(saved, dtype=torch.bfloat16), build()
    assert loaded.embedding.dtype == torch.bfloat16
    assert loaded.norm.dtype == torch.float32
    assert torch.equal(loaded.embedding, model.embedding.to(torch.bfloat16))


def test_parameters_that_share_a_buffer(tmp_path: Path) -> None:
    """As a trainer lays them out: views of one buffer, one of them not contiguous."""
    model, expected = build(), values(build())
    buffer = torch.cat([p.flatten() for p in expected.values()])
    offset = 0
    for p in model.parameters():
        count, first = p.numel(), offset
        p.data = buffer[first : first + count].view_as(p)
        offset += count
    gate = model.get_parameter("layer01.w_gate")
    gate.data = gate.data.t().contiguous().t()
    save_weights(model, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_file_without_a_configuration_needs_one(saved: Path) -> None:
    rewrite(saved, load_file(saved), metadata={})
    with pytest.raises(WeightsError, match=r"has no 'config'; give the model's configuration"):
        load_weights(saved)
    loaded = load_weights(saved, config=CONFIG)
    assert all(torch.equal(p, build().get_parameter(name)) for name, p in values(loaded).items())


def test_weights_are_not_drawn_before_they_are_loaded(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting values of billions of parameters take minutes."""
    monkeypatch.setattr("neuronspark.parameters.seeded_generator", lambda *_: pytest.fail("drew starting values"))
    load_weights(saved)


# --- refusals ------------------------------------------------------------------------------------------------


def test_missing_unknown_and_misshaped_tensors_are_named_together(saved: Path) -> None:
    tensors = load_file(saved)
    del tensors["layer00.w_z"]
    tensors["layer07.w_z"] = torch.zeros(2)
    tensors["layer01.w_q"] = tensors["layer01.w_q"][:, :-1].contiguous()
    tensors["norm"] = torch.ones(32, dtype=torch.int32)
    rewrite(saved, tensors)
    with pytest.raises(WeightsError) as refused:
        load_weights(saved)
    message = str(refused.value)
    for part in (
        str(saved), "missing: layer00.w_z", "not this model's: layer07.w_z",
        "layer01.w_q has shape [32, 39], expected [32, 40]", "norm holds I32",
    ):  # fmt: skip
        assert part in message


def test_many_wrong_tensors_are_counted(saved: Path) -> None:
    tensors = {name: t for name, t in load_file(saved).items() if not name.startswith("layer01")}
    rewrite(saved, tensors)
    with pytest.raises(WeightsError, match=r"missing: layer01\.norm, .* and \d+ more"):
        load_weights(saved)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "configuration in its metadata is not a model's"),
        ("[]", "configuration in its metadata is not a model's"),
        (json.dumps({**CONFIG.to_dict(), "widht": 3}), "did you mean 'width'"),
        (json.dumps({**CONFIG.to_dict(), "layers": "DHX"}), "layers is 'DHX'"),
    ],
)
def test_a_wrong_configuration_is_refused(saved: Path, config: str, message: str) -> None:
    rewrite(saved, load_file(saved), metadata={"config": config})
    with pytest.raises(WeightsError, match=message):
        load_weights(saved)


def test_another_configuration_than_expected_is_refused(saved: Path) -> None:
    changed = ModelConfig.from_dict({**CONFIG.to_dict(), "rope_base": 1e4})
    with pytest.raises(WeightsError, match=r"rope_base 1000000\.0, not 10000\.0"):
        load_weights(saved, config=changed)


@pytest.mark.parametrize("kind", ["missing", "directory", "text", "cut"])
def test_what_is_no_weights_file_is_refused(saved: Path, kind: str) -> None:
    path = saved.with_name(kind)
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"not tensors" * 9 if kind == "text" else saved.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=str(path)):
        load_weights(path)


# --- whole or not at all -------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match=r"cannot be written \(.*No space left"):
        save_weights(build(seed=4), saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be written"):
        save_weights(build(), tmp_path / "nowhere" / "m.safetensors")


def test_killed_while_writing_it_leaves_what_was_there(saved: Path) -> None:
    """kill -9 when the new bytes are written and not yet in place."""
    before = saved.read_bytes()
    program = f"""
        import os, signal, sys
        from pathlib import Path
        from neuronspark import load_weights, save_weights
        model = load_weights(Path({str(saved)!r}))
        model.norm.data += 1
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        save_weights(model, Path({str(saved)!r}))
    """
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "PYTHONPATH": str(root)}, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL
    assert saved.read_bytes() == before
    save_weights(build(seed=4), saved)
    assert torch.equal(load_weights(saved).embedding, build(seed=4).embedding)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
