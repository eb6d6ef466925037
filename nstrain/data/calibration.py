"""Calibration: how many tokens a stratum's bytes give, from a sample, before anything is opened.

`data init` makes it once and pins it (its hash stands in line.json), since shares follow from it as long as a stratum
has unopened files. It is kept in state.json, where another line of the same sources may take it from
(`calibration_from` in host.json): sampling a corpus of hundreds of strata is worth doing once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pydantic

from nstrain.base.disk import canonical_json, read_json, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.encode import Encoder
from nstrain.data.opening import Rate
from nstrain.data.readers import estimate
from nstrain.data.sources import ColumnStrata, Listing, PinnedFile, SourceSettings, resolve_inside
from nstrain.data.supply import SuppliedSource
from nstrain.settings.model import Settings, validate

SAMPLE_BYTES = 1 << 18
"""Text that is sampled of a stratum."""
COLUMN_SAMPLE_BYTES = 4 << 20
"""Text that is sampled of a source with strata by column."""


MORE_FILES = 64
"""Files of a source that are looked into for any text at all, if there is none in the samples."""


class StratumCalibration(Settings):
    """What a sample of a stratum gave."""

    tokens: int = pydantic.Field(ge=0)
    """Tokens of the sampled documents, an EOS each included."""
    bytes: int = pydantic.Field(ge=0)
    """Pinned bytes that they stand for."""


class SourceCalibration(Settings):
    """The calibration of one source."""

    identity: str
    """Of the source; another source's numbers are not taken."""
    strata: dict[str, StratumCalibration]
    """By stratum's name; a stratum that is not here is taken to be like the whole source."""


class Calibration(Settings):
    """state.json's `calibration`."""

    tokenizer_sha256: str
    """Tokens are of this tokenizer."""
    tokens_per_s: float = pydantic.Field(gt=0)
    """What one process encoded in a second when the sample was taken; for estimates of time, never for the order."""
    sources: dict[str, SourceCalibration]

    def digest(self) -> str:
        """Hash of what the order depends on."""
        pinned = self.model_dump(mode="json", exclude={"tokens_per_s"})
        return sha256_bytes(canonical_json(pinned))

    def rates(self, source: SourceSettings, listing: Listing) -> tuple[Rate, ...]:
        """Expected trainable tokens of each stratum's bytes (what is held out is not trained)."""
        strata = self.sources[source.name].strata
        trained = 1 - Fraction(repr(source.held_out))
        sampled = [strata.get(name, StratumCalibration(tokens=0, bytes=0)) for name in listing.strata]
        return tuple(Rate(sample.tokens * trained, sample.bytes) for sample in sampled)


def calibrate(
    sources: list[tuple[SuppliedSource, Listing]],
    encoder: Encoder,
    known: Calibration | None = None,
    progress: Callable[[str, float], None] = lambda source, share: None,
) -> Calibration:
    """Sample every stratum of every source, except the sources whose numbers are `known`.

    Raises `Refusal` if known numbers are of another tokenizer.
    """
    if known is not None and known.tokenizer_sha256 != encoder.sha256:
        raise Refusal(
            f"the calibration is of the tokenizer with sha256 {known.tokenizer_sha256}, this line's has "
            f"{encoder.sha256}; leave calibration_from out of host.json, or name a line with the same tokenizer"
        )
    calibrated: dict[str, SourceCalibration] = {}
    tokens, seconds = 0, 0.0
    for supplied, listing in sources:
        source = supplied.settings
        identity = source.identity.hex()
        reused = known.sources.get(source.name) if known is not None else None
        if reused is not None and reused.identity == identity and _fits(reused, listing):
            calibrated[source.name] = reused
            continue
        supplied.supply.fetch([files[0] for files in listing.files])  # they stay until the first cycle opens them
        began = time.perf_counter()
        sample = _SourceSample(supplied, encoder)
        strata = sample.by_column(listing) if isinstance(source.stratum, ColumnStrata) else sample.by_stratum(listing)
        seconds += time.perf_counter() - began
        tokens += sample.tokens
        if sample.tokens == 0 and not sample.finds_text(listing):
            raise Refusal(
                f"source {source.name}: its reader ({source.reader}) finds no text in {sample.describe()}. "
                f"Correct reader, text_column or globs in the recipe"
            )
        progress(source.name, (len(calibrated) + 1) / len(sources))
        calibrated[source.name] = SourceCalibration(identity=identity, strata=strata)
    if tokens and seconds:
        speed = tokens / seconds
    else:
        speed = known.tokens_per_s if known is not None else 1.0
    return Calibration(tokenizer_sha256=encoder.sha256, tokens_per_s=speed, sources=calibrated)


def _fits(known: SourceCalibration, listing: Listing) -> bool:
    """Whether known numbers are of the strata that a list has, at least in part."""
    return any(stratum.bytes for name, stratum in known.strata.items() if name in listing.strata)


class _SourceSample:
    """Samples of one source, each of the first files in their order, and what they came to."""

    def __init__(self, supplied: SuppliedSource, encoder: Encoder) -> None:
        self.source, self._supply, self._encoder = supplied.settings, supplied.supply, encoder
        self._markers = encoder.marker_ids(self.source.markers, self.source.name)
        self.tokens = 0
        self.text_bytes = 0
        self.paths: list[str] = []
        """Of the files that were read."""

    def by_stratum(self, listing: Listing) -> dict[str, StratumCalibration]:
        """A sample of every stratum; a file's bytes count."""
        return {name: self._of(listing.files[index], SAMPLE_BYTES) for index, name in enumerate(listing.strata)}

    def by_column(self, listing: Listing) -> dict[str, StratumCalibration]:
        """One sample for all strata, since a file holds many; bytes of text count."""
        files = {file.path: file for stratum in listing.files for file in stratum}
        self._of([files[path] for path in sorted(files)], COLUMN_SAMPLE_BYTES)
        whole = StratumCalibration(tokens=self.tokens, bytes=self.text_bytes)
        return dict.fromkeys(listing.strata, whole)

    def _of(self, files: Sequence[PinnedFile], limit_bytes: int) -> StratumCalibration:
        tokens = size = 0
        before = self.text_bytes
        for file in files:
            # Of compressed files few bytes stand for much text: with the text alone there is enough of them.
            sampled = max(size, self.text_bytes - before)
            if sampled >= limit_bytes:
                break
            self._supply.fetch([file])
            self.paths.append(file.path)
            path = resolve_inside(self.source.root, file.path)
            found = estimate(self.source.rows, path, self._count, limit_bytes - sampled)
            tokens, size = tokens + found.tokens, size + found.file_bytes
        return StratumCalibration(tokens=tokens, bytes=size)

    def finds_text(self, listing: Listing) -> bool:
        """Whether there is text in one of the next files, though there is none where the samples are taken."""
        read = set(self.paths)
        files = (file for files in listing.files for file in files if file.path not in read)
        for file in itertools.islice(files, MORE_FILES):
            self._of([file], SAMPLE_BYTES)
            if self.tokens:
                return True
        return False

    def describe(self) -> str:
        """The files that were read, in words."""
        more = f" and {len(self.paths) - 3:,} more files" if len(self.paths) > 3 else ""
        return ", ".join(sorted(self.paths)[:3]) + more

    def _count(self, texts: list[str]) -> int:
        tokens = sum(len(ids) + 1 for ids in self._encoder.encode(texts, self._markers))
        self.tokens += tokens
        self.text_bytes += sum(len(text.encode()) for text in texts)
        return tokens


def load_calibration(path: Path) -> Calibration:
    """The calibration in a line's state.json. Raises `Refusal` if there is none."""
    if not path.exists():
        raise Refusal(
            f"{path}: no such file, but calibration_from in host.json names it; name the state.json of a data line "
            "that is there, or leave calibration_from out of host.json"
        )
    state: Any = read_json(path)
    if not isinstance(state, dict) or "calibration" not in state:
        raise Refusal(f"{path}: holds no calibration; name the state.json of a data line")
    return validate(Calibration, state["calibration"], f"{path}: calibration")
