"""`nstrain generate` on a line that was really trained: what it finds, prints and refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_card import UUID, put_in_place
from typer.testing import CliRunner

import neuronspark
from neuronspark import ModelConfig, NeuronSpark, load_weights, save_weights
from nstrain.base.errors import GpuTaken, Refusal
from nstrain.cli.main import app
from nstrain.data.line import DataLine
from nstrain.gpu.lease import gpu_lease
from nstrain.line.checkpoint import newest_good
from nstrain.line.paths import LinePaths
from nstrain.ops.generate import Generation, find_weights, generate
from nstrain.settings.run import load_run
from nstrain.train.memory_errors import OutOfMemory
from nstrain.train.model import load_model, model_cost

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "the neuron releases quanta when"


def newest(paths: LinePaths) -> Path:
    """The line's newest checkpoint."""
    found = newest_good(paths)
    assert found is not None
    return found


def work_of(paths: LinePaths) -> Path:
    """Its data line."""
    return Path(load_run(paths.run_json).data.work)


def loaded(paths: LinePaths, checkpoint: Path) -> NeuronSpark:
    """The model of a checkpoint."""
    config = ModelConfig.from_dict(load_run(paths.run_json).model.config)
    return load_weights(checkpoint / "weights.safetensors", config=config)


def printed(*arguments: object) -> str:
    """What the command prints."""
    ran = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


# --- what is generated ---------------------------------------------------------------------------------------


def test_greedy_is_what_the_parallel_form_finds_most_probable(trained: LinePaths) -> None:
    made = generate(trained.root, PROMPT, tokens=12)
    model = loaded(trained, newest(trained))
    row = torch.tensor([[*made.prompt_tokens, *made.tokens]])
    losses = model.token_losses(row)[0, len(made.prompt_tokens) - 1 :]
    assert torch.allclose(torch.tensor(made.log_probabilities), -losses, atol=1e-4)
    logits, _ = model.prefill(torch.tensor([made.prompt_tokens]))
    assert made.tokens[0] == int(logits[0].argmax())
    assert (len(made.tokens), made.ended) == (12, "length")


def test_it_writes_what_it_was_trained_on(trained: LinePaths) -> None:
    """After a cycle of training the words come from the sources, not from everywhere in the vocabulary."""
    encoder = DataLine.open(work_of(trained)).encoder()
    made = generate(trained.root, PROMPT, tokens=20, temperature=1.0, seed=3)
    assert made.prompt_tokens == [encoder.eos_id, *encoder.encode([PROMPT], {})[0].tolist()]
    assert made.text == encoder.decode(np.array(made.tokens))
    before = newest(trained).with_name("u00000000")
    untrained = generate(before, PROMPT, tokens=20, temperature=1.0, seed=3)
    assert sum(made.log_probabilities) > sum(untrained.log_probabilities) + 10


def test_one_seed_one_text(trained: LinePaths) -> None:
    made = [generate(trained.root, PROMPT, tokens=12, temperature=1.5, top_k=50, seed=seed) for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert made[0].tokens != made[2].tokens


def test_a_line_a_checkpoint_its_file_and_a_saved_file_are_one_model(trained: LinePaths, tmp_path: Path) -> None:
    checkpoint = newest(trained)
    save_weights(loaded(trained, checkpoint), tmp_path / "model.safetensors")
    line, one, saved = (
        generate(place, PROMPT, tokens=8, data=data)
        for place, data in (
            (trained.root, None),
            (checkpoint, None),
            (tmp_path / "model.safetensors", work_of(trained)),
        )
    )
    assert line == one
    assert (saved.tokens, saved.log_probabilities) == (line.tokens, line.log_probabilities)
    assert line.weights == str(checkpoint / "weights.safetensors")


def test_an_older_checkpoint_is_another_model(trained: LinePaths) -> None:
    older = newest(trained).with_name("u00000000")
    assert (
        generate(older, PROMPT, tokens=8).log_probabilities
        != generate(trained.root, PROMPT, tokens=8).log_probabilities
    )


# --- the command ---------------------------------------------------------------------------------------------


def test_command(trained: LinePaths) -> None:
    made = generate(trained.root, PROMPT, tokens=8)
    command = ("generate", trained.root, "--prompt", PROMPT, "--tokens", 8)
    assert printed(*command) == made.text + "\n"
    value = json.loads(printed(*command, "--json"))
    assert Generation(**value) == made
    drawn = json.loads(printed(*command, "--json", "--temperature", 1.5, "--top-k", 50, "--seed", 1))
    assert Generation(**drawn) == generate(trained.root, PROMPT, tokens=8, temperature=1.5, top_k=50, seed=1)


# --- on a GPU ------------------------------------------------------------------------------------------------


def test_a_gpu_is_borrowed_and_left_alone_where_somebody_is_on_it(
    trained: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a made-up card; the model that is said to run there runs on the CPU."""
    card = put_in_place(tmp_path, monkeypatch)
    monkeypatch.setattr("nstrain.ops.generate.this_gpu", lambda: UUID)
    seen: list[tuple[str, bool]] = []

    def on_cpu(weights: Path, config: Any, device: str) -> Any:
        seen.append((device, gpu_lease(UUID).held_elsewhere()))
        return load_model(weights, config, "cpu")

    monkeypatch.setattr("nstrain.train.model.load_model", on_cpu)
    command = ("generate", trained.root, "--prompt", PROMPT, "--tokens", 2, "--device", "cuda")
    assert printed(*command) == generate(trained.root, PROMPT, tokens=2).text + "\n"
    assert seen == [("cuda", True), ("cpu", False)]
    card.put(os.getppid())
    ran = CliRunner().invoke(app, [*map(str, command)])
    assert isinstance(ran.exception, GpuTaken)
    assert f"process {os.getppid()} " in str(ran.exception)
    card.put()
    monkeypatch.setattr("nstrain.ops.generate.this_gpu", lambda: "another")
    with pytest.raises(Refusal, match=f"torch uses GPU another, but .* the lease of {UUID} was taken"):
        generate(trained.root, PROMPT, device="cuda")
    assert len(seen) == 2
    assert not gpu_lease(UUID).held_elsewhere()


# --- refusals ------------------------------------------------------------------------------------------------


def test_prompts_and_lengths_that_are_refused(trained: LinePaths) -> None:
    with pytest.raises(Refusal, match="the prompt is empty"):
        generate(trained.root, "")
    with pytest.raises(Refusal, match="0 tokens: expected at least 1"):
        generate(trained.root, PROMPT, tokens=0)
    with pytest.raises(Refusal, match=r"are more than the model reads: its longest row has 32,768 tokens"):
        generate(trained.root, PROMPT, tokens=32768)


def test_places_without_weights(trained: LinePaths, paths: LinePaths, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"the line has no checkpoint yet; `nstrain run"):
        find_weights(paths.root)
    with pytest.raises(Refusal, match=r"expected a training line, one of its checkpoints or .* found nothing"):
        find_weights(tmp_path / "nowhere")
    with pytest.raises(Refusal, match="found something else"):
        find_weights(work_of(trained))
    (tmp_path / "text.safetensors").write_text("no tensors at all, only text")
    with pytest.raises(Refusal, match="expected tensors in the safetensors format"):
        generate(tmp_path / "text.safetensors", PROMPT, data=work_of(trained))


def test_damaged_checkpoint(trained: LinePaths) -> None:
    """Named itself it is refused; as a line's newest it is passed over for the one before."""
    checkpoint = newest(trained)
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    with pytest.raises(Refusal, match=r"weights\.safetensors: damaged"):
        generate(checkpoint, PROMPT)
    assert find_weights(trained.root).weights.parent != checkpoint


def test_no_tokenizer(trained: LinePaths, tmp_path: Path) -> None:
    work = work_of(trained)
    save_weights(loaded(trained, newest(trained)), tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match="names no tokenizer; name a data line that has it with --data"):
        generate(tmp_path / "model.safetensors", PROMPT)
    shutil.copytree(work, tmp_path / "moved")
    (work / "tokenizer.json").unlink()
    with pytest.raises(Refusal, match=r"no tokenizer: .*tokenizer\.json: missing.*with --data"):
        generate(trained.root, PROMPT)
    assert generate(trained.root, PROMPT, tokens=2, data=tmp_path / "moved").tokens


def test_a_tokenizer_of_another_model(trained: LinePaths, tmp_path: Path) -> None:
    config = ModelConfig.from_dict({**load_run(trained.run_json).model.config, "vocab_size": 128})
    save_weights(NeuronSpark(config, seed=0), tmp_path / "small.safetensors")
    with pytest.raises(Refusal, match=r"has 362 token ids, the model of .*small\.safetensors 128"):
        generate(tmp_path / "small.safetensors", PROMPT, data=work_of(trained))


def test_weights_of_another_model(trained: LinePaths) -> None:
    """A state.json whose configuration is not the weights' own is noticed, whatever its hash says."""
    checkpoint = newest(trained)
    config = {**load_run(trained.run_json).model.config, "ffn_width": 64}
    with pytest.raises(Refusal, match=r"weights\.safetensors: its tensors are not those .*w_ffn_gate has shape"):
        load_model(checkpoint / "weights.safetensors", config, "cpu")


def test_a_model_package_that_cannot_do_it(trained: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package may stand in for the model's; it can be trained without these."""
    monkeypatch.delattr(neuronspark, "load_weights")
    with pytest.raises(Refusal, match="has no 'load_weights', which this needs"):
        generate(trained.root, PROMPT)
    monkeypatch.delattr(ModelConfig, "flops_by_part")
    with pytest.raises(Refusal, match="does not say what its models cost"):
        model_cost("tiny-32k", 64)


def test_want_of_memory_is_told(trained: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")

    monkeypatch.setattr("nstrain.train.model.load_model", fail)
    with pytest.raises(OutOfMemory, match="^generating with .* 4096 bytes. Use a shorter prompt$"):
        generate(trained.root, "x = 1")


def test_a_device_that_is_not_there(trained: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refusal, match="device 'cuda': torch finds no CUDA device here"):
        generate(trained.root, PROMPT, device="cuda")
