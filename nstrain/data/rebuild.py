"""`nstrain data rebuild`: a cycle's token files again, from its manifest alone.

On the line's own machine the manifest lies in the line; elsewhere the manifest, the tokenizer and the sources' files
are enough. Every file is checked against the hash that the manifest pins before it is read, and the result against the
hashes of the token files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nstrain.base.disk import canonical_json, directory_by_rename, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.cycles import SourceJob, Stream, write_stream
from nstrain.data.encode import ENCODING_VERSION, Encoder, load_encoder
from nstrain.data.line import DataLine
from nstrain.data.manifest import drawing_from, files_taken, load_manifest, opening_of
from nstrain.data.opened import OpenedFiles
from nstrain.data.opener_pool import OpenerPool, default_workers
from nstrain.data.order import ORDER_VERSION
from nstrain.data.sources import PinnedFile, SourceSettings
from nstrain.data.supply import DOWNLOADS, OnDownload, SuppliedSource, fetched_nothing, supplied
from nstrain.settings.model import validate


@dataclasses.dataclass(frozen=True)
class ManifestFiles:
    """The files of a source that a manifest names: the part of a pinned list that drawing its cycle needs."""

    strata: tuple[str, ...]
    source: Mapping[str, Any]
    """The source's part of the manifest."""

    @functools.cached_property
    def _files(self) -> dict[tuple[int, int], PinnedFile]:
        named = [(i, file) for i, stratum in enumerate(self.source["opened"]) for file in stratum["open"]]
        if (tail := self.source["tail_in"]) is not None:
            named.append((tail["stratum"], tail))
        return {
            (i, file["order"]): PinnedFile(file["path"], file["size"], file["sha256"], i, file["order"], file["size"])
            for i, file in named
        }

    def file(self, stratum: int, order: int) -> PinnedFile:
        """A stratum's file by its place in the opening order."""
        return self._files[stratum, order]


def rebuild_cycle(
    manifest_path: Path,
    tokenizer: Path,
    places: Mapping[str, Path],
    out: Path,
    progress: Callable[[float], None] = lambda share: None,
    mirrors: Mapping[str, Sequence[str]] = MappingProxyType({}),
    on_download: OnDownload = fetched_nothing,
    workers: int | None = None,
) -> str:
    """Make a cycle's directory `out` from its manifest; returns the manifest's SHA-256.

    `places` says where each local source lies; a hub's files are fetched ahead of the processes that open them (see
    `Preparer` for `workers`), `mirrors` being more places of a source's. What was fetched and opened of a hub's source
    is kept after a failure for the next try. Raises `Refusal` for another tokenizer, other versions, a file that is not
    as pinned, or token files that do not come out with the manifest's hashes.
    """
    manifest = load_manifest(manifest_path)
    _refuse_other_versions(manifest_path, manifest)
    encoder = _encoder_of(manifest, tokenizer)
    with drawing_from(manifest_path):
        hub = {name for name in manifest["order"] if manifest["sources"][name]["settings"]["kind"] == "hub"}
    missing = [name for name in manifest["order"] if name not in places and name not in hub]
    if missing:
        raise Refusal(f"say where source {missing[0]} lies: --source {missing[0]}=DIRECTORY")
    cache, downloads = out.with_name(f".{out.name}.open"), out.with_name(f".{out.name}.{DOWNLOADS}")

    def told_from(first: int) -> Callable[[int], None]:
        """Tells the progress of a source before which so many tokens were written."""
        return lambda written: progress((first + written) / manifest["cycle_tokens"])

    try:
        with (
            directory_by_rename(out) as directory,
            drawing_from(manifest_path),
            OpenerPool(encoder, default_workers() if workers is None else workers) as pool,
        ):
            written = 0
            for name in manifest["order"]:
                source, tell = manifest["sources"][name], told_from(written)
                here = (
                    {"mirrors": list(mirrors.get(name, ()))} if name in hub else {"path": str(places[name].resolve())}
                )
                settings = validate(SourceSettings, {**source["settings"], **here}, f"{manifest_path}: {name}")
                ready = supplied(settings, downloads, on_download)
                job = _job(source, ready, cache / name, encoder, pool, functools.partial(tell, 0))
                stream = write_stream(job, manifest, directory, tell)
                _refuse_other_stream(manifest_path, source, stream, name)
                written += source["targets"]
            sha256 = sha256_bytes(manifest_path.read_bytes())
            (directory / "READY").write_bytes(canonical_json({"manifest_sha256": sha256}))
    except BaseException:
        if not hub:
            shutil.rmtree(cache, ignore_errors=True)
        raise
    for of_this_try in (cache, downloads):
        shutil.rmtree(of_this_try, ignore_errors=True)
    return sha256


def _refuse_other_versions(manifest_path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest of code that draws or encodes in another way."""
    for name, theirs, ours in (
        ("ORDER_VERSION", manifest["order_version"], ORDER_VERSION),
        ("ENCODING_VERSION", manifest["encoding_version"], ENCODING_VERSION),
    ):
        if theirs != ours:
            raise Refusal(f"{manifest_path}: made with {name} {theirs}, this nstrain has {ours}")


def _encoder_of(manifest: Mapping[str, Any], tokenizer: Path) -> Encoder:
    """The encoder that made the cycle. Raises `Refusal` for another tokenizer."""
    encoder = load_encoder(tokenizer, manifest["eos_id"])
    if encoder.sha256 != manifest["tokenizer_sha256"]:
        raise Refusal(
            f"{tokenizer}: has sha256 {encoder.sha256}, the cycle was made with {manifest['tokenizer_sha256']}"
        )
    return encoder


def _job(
    source: dict[str, Any],
    ready: SuppliedSource,
    cache: Path,
    encoder: Encoder,
    pool: OpenerPool,
    on_open: Callable[[], None],
) -> SourceJob:
    """What a source's stream is drawn from, by its part of the manifest; the files that it takes are on their way."""
    strata = tuple(source["strata"])
    files = OpenedFiles(cache, ready.settings, ManifestFiles(strata, source), encoder, on_open, pool, ready.supply)
    files.prefetch(files_taken(source))
    return SourceJob(ready.settings, source["listing_sha256"], strata, files, opening_of(source))


def _refuse_other_stream(manifest_path: Path, source: dict[str, Any], stream: Stream, name: str) -> None:
    """Refuse a stream of which the manifest says something else."""
    record = json.loads(canonical_json(stream.record))
    if record != source:
        wrong = next(key for key in source if record.get(key) != source[key])
        raise Refusal(
            f"{manifest_path}: source {name} comes out with other {wrong} than the manifest says; the "
            "manifest or this nstrain is not what made the cycle"
        )


def rebuild_in_line(
    line: DataLine,
    cycle: int,
    out: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
    on_download: OnDownload = fetched_nothing,
    workers: int | None = None,
) -> Path:
    """Rebuild a cycle of a line from its manifest, in its own place or in `out`; returns the directory.

    The caller holds the preparer's lock: what lies in the cycle's place without a READY is no cycle, and is replaced.
    """
    directory = out or line.cycle_directory(cycle)
    if out is None and directory.is_dir() and not line.is_ready(cycle):
        shutil.rmtree(directory)
    settings = [source.settings for source in line.settings.sources]
    places = {source.name: source.root for source in settings if source.kind == "local"}
    mirrors = {source.name: source.mirrors for source in settings}
    tokenizer = line.work / "tokenizer.json"
    rebuild_cycle(line.manifest_path(cycle), tokenizer, places, directory, progress, mirrors, on_download, workers)
    return directory
