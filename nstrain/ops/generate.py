"""`nstrain generate`: a prompt continued by trained weights, with the tokenizer they were trained on.

A smoke test: does what was saved load, and does it write what it was trained on? The prompt stands where documents
stand in training, after an end-of-document token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nstrain.base.commands import typed
from nstrain.base.errors import Refusal
from nstrain.data.encode import Encoder
from nstrain.data.line import DataLine
from nstrain.gpu.borrowed import borrowed_gpu
from nstrain.gpu.lease import refuse_other_gpu, this_gpu
from nstrain.gpu.readings import gpu_on
from nstrain.line.checkpoint import newest_good, read_state, verify_checkpoint
from nstrain.line.paths import LinePaths

WEIGHTS_SUFFIX = ".safetensors"


@dataclasses.dataclass(frozen=True)
class FoundWeights:
    """Weights to generate with, and what is known beside them."""

    weights: Path
    """The safetensors file."""
    config: dict[str, Any] | None = None
    """The model's configuration, if the file does not hold it itself."""
    work: Path | None = None
    """The data line that they were trained on."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """A continued prompt."""

    weights: str
    prompt_tokens: list[int]
    """The end-of-document token and the prompt's own."""
    tokens: list[int]
    """The continuation."""
    log_probabilities: list[float]
    """Of each token of the continuation, in nats, as the model gives it: before temperature and top-k."""
    text: str
    """The continuation as text, without an end-of-document token."""
    ended: Literal["end_of_document", "length"]
    """Why it ends."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return dataclasses.asdict(self)


def find_weights(place: Path) -> FoundWeights:
    """The weights of a line (its newest good checkpoint), of one checkpoint, or in a file; a checkpoint is verified.

    Raises `Refusal` if there are none, or if a checkpoint is damaged.
    """
    if place.is_file() and place.suffix == WEIGHTS_SUFFIX:
        return FoundWeights(place)
    checkpoint = place
    if LinePaths(place).run_json.exists():
        newest = newest_good(LinePaths(place))
        if newest is None:
            run = typed("nstrain", "run", place)
            raise Refusal(f"{place}: the line has no checkpoint yet; `{run}` writes one when it starts")
        checkpoint = newest
    elif not (place / "hashes.json").exists():
        raise Refusal(
            f"{place}: expected a training line, one of its checkpoints or a file of weights ({WEIGHTS_SUFFIX}), found "
            + ("something else" if place.exists() else "nothing")
        )
    else:
        verify_checkpoint(checkpoint)
    settings = read_state(checkpoint)["settings"]
    try:
        config, work = settings["model"]["config"], Path(settings["data"]["work"])
    except (KeyError, TypeError) as error:
        raise Refusal(f"{checkpoint / 'state.json'}: its settings are not a line's ({error!r} is missing)") from None
    return FoundWeights(checkpoint / f"weights{WEIGHTS_SUFFIX}", config, work)


def generate(
    place: Path,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    data: Path | None = None,
    on_token: Callable[[int], None] = lambda done: None,
) -> Generation:
    """Continue a prompt by up to `tokens` tokens, or to the document's end; see `find_weights` for `place`.

    `data` is the data line whose tokenizer is used (default: the one that the weights were trained on). At temperature
    0 each token is the most probable one; else it is drawn, keyed by the seed, from the `top_k` most probable ones.
    `on_token(done)` is called after each. A GPU is borrowed meanwhile. Raises `Refusal` for weights, a tokenizer, a
    prompt or a length that do not give a continuation, `GpuTaken` if somebody is on the GPU, and `OutOfMemory`.
    """
    from nstrain.train.generation import Sampling, continue_tokens  # torch stands behind these
    from nstrain.train.memory_errors import memory_told
    from nstrain.train.model import load_model, refuse_no_cuda

    sampling = Sampling(temperature, top_k, seed)
    if tokens < 1:
        raise Refusal(f"{tokens} tokens: expected at least 1")
    if not prompt:
        raise Refusal("the prompt is empty; give it some text")
    found = find_weights(place)
    encoder = _encoder(found, data)
    prompt_tokens = [encoder.eos_id, *map(int, encoder.encode([prompt], {})[0])]
    refuse_no_cuda(device)
    chosen = []
    less = "Use a shorter prompt" if device == "cpu" else "Use a shorter prompt, or --device cpu"
    # The GPU before torch touches it: a trainer stops that sees another there.
    with borrowed_gpu(gpu_on(device)) as gpu, memory_told(f"generating with {found.weights}", less):
        if gpu is not None:
            refuse_other_gpu(gpu.uuid, this_gpu())
        model = load_model(found.weights, found.config, device)
        if model.config.vocab_size < encoder.vocabulary.size:
            raise Refusal(
                f"{encoder.where}: has {encoder.vocabulary.size:,} token ids, the model of {found.weights} "
                f"{model.config.vocab_size:,}: it is not the tokenizer that this model was trained with"
            )
        for token in continue_tokens(model, prompt_tokens, tokens, sampling, encoder.vocabulary.size, encoder.eos_id):
            chosen.append(token)
            on_token(len(chosen))
    ids = [token.id for token in chosen]
    at_end = ids[-1] == encoder.eos_id
    return Generation(
        weights=str(found.weights),
        prompt_tokens=prompt_tokens,
        tokens=ids,
        log_probabilities=[token.log_probability for token in chosen],
        text=_text_after(encoder, prompt_tokens, ids[:-1] if at_end else ids),
        ended="end_of_document" if at_end else "length",
    )


def _encoder(found: FoundWeights, data: Path | None) -> Encoder:
    """The tokenizer of the data line given, or else of the weights' own."""
    work = data or found.work
    if work is None:
        raise Refusal(
            f"{found.weights}: a file of weights names no tokenizer; name a data line that has it with --data"
        )
    try:
        return DataLine.open(work).encoder()
    except Refusal as error:
        hint = "" if data else f" {found.weights} was trained on that data line; name another place of it with --data."
        raise Refusal(f"no tokenizer: {error}.{hint}") from None


def _text_after(encoder: Encoder, before: list[int], ids: list[int]) -> str:
    """The text that the ids add. Decoded together with what is before: some tokenizers drop a text's first space."""
    start, whole = encoder.decode(np.array(before)), encoder.decode(np.array([*before, *ids]))
    return whole.removeprefix(start) if whole.startswith(start) else encoder.decode(np.array(ids))
