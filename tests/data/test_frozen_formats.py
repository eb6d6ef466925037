"""The bytes of a whole small line, frozen: a token that moves, or a field that changes, shows here.

If this fails, existing lines would be continued otherwise than they were begun. Undo the change, or raise
ORDER_VERSION, ENCODING_VERSION or MANIFEST_FORMAT with it; only then write the new values here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_helpers import manifest_of, prepare, source, stream_of, write_tree
from tokenizers import pre_tokenizers

from nstrain.base.disk import sha256_bytes, sha256_file
from nstrain.data.calibration import Calibration, SourceCalibration, StratumCalibration
from nstrain.data.encode import ENCODING_VERSION, Encoder
from nstrain.data.line import LINE_FORMAT, DataLine, Exclusion, Fork
from nstrain.data.manifest import MANIFEST_FORMAT
from nstrain.data.opening import SHARE_ONE
from nstrain.data.order import ORDER_VERSION
from nstrain.data.rows import CycleRows
from nstrain.data.sources import SourceSettings
from nstrain.data.val import collect_held_out

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def bytes_tokenizer() -> bytes:
    """A tokenizer.json written by hand: id 0 is `</s>`, id 1 `<think>`, the others are single bytes."""
    added = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": s,
        }
        for i, (t, s) in enumerate([("</s>", True), ("<think>", False)])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {token: i for i, token in enumerate(["</s>", "<think>", *BYTES])}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model |= {"vocab": vocabulary, "merges": []}
    definition: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    definition |= {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level}
    return json.dumps({**definition, "model": model}, sort_keys=True).encode()


def text(n: int) -> str:
    return f"Document {n}: " + "; ".join(f"Wert {n * k % 97} → <think>" for k in range(1 + n * 7 % 5))


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    base = tmp_path_factory.mktemp("frozen")
    (base / "tokenizer.json").write_bytes(bytes_tokenizer())
    tree = {f"{'ab'[n % 3 == 0]}/{n:03d}.txt": text(n) for n in range(90)} | {"a/empty.txt": ""}
    write_tree(base / "x", tree)
    write_tree(base / "y", {f"{n:03d}.txt": text(1000 + n) for n in range(60)})
    sources = [source("x", base / "x", 3, held_out=0.2), source("y", base / "y", 2, held_out=0.2, markers=["<think>"])]
    return _made(base, sources)


def _made(base: Path, sources: list[dict[str, Any]]) -> DataLine:
    from nstrain.data.init import init_line, load_recipe

    (base / "recipe.json").write_text(json.dumps({"format": 1, "sources": sources}))
    recipe = load_recipe(base / "recipe.json")
    line = init_line(base / "line", recipe, base / "tokenizer.json", 0, 640, 2, unit_tokens=32, seed=5)
    collect_held_out(line)
    prepare(line)
    return line


def test_versions_and_formats() -> None:
    assert (ORDER_VERSION, ENCODING_VERSION, MANIFEST_FORMAT, LINE_FORMAT, SHARE_ONE) == (2, 1, 1, 1, 2**28)


def test_the_pinned_inputs(line: DataLine) -> None:
    assert line.settings.tokenizer.canary_sha256 == CANARY
    assert {n: line.listing(n).digest for n in line.source_names} == LISTINGS
    assert line.source("x").identity.hex() == IDENTITY
    assert line.settings.calibration_sha256 == CALIBRATION
    assert line.id == LINE_ID


def test_the_token_files(line: DataLine) -> None:
    found = {f"{k}/{n}": sha256_file(line.cycle_directory(k) / f"{n}.bin") for k in (1, 2) for n in line.source_names}
    assert found == TOKENS
    assert {n: sha256_file(line.work / "val" / f"{n}.bin") for n in line.source_names} == HELD_OUT


def test_the_manifests_and_the_order(line: DataLine) -> None:
    assert [sha256_bytes(line.manifest_path(k).read_bytes()) for k in (1, 2)] == MANIFESTS
    assert [CycleRows.open(line, k, n).order_digest for k in (1, 2) for n in (8, 32)] == ORDERS


def test_the_first_rows(line: DataLine) -> None:
    rows = CycleRows.open(line, 1, 16)
    decoder = {i + 2: token for i, token in enumerate(BYTES)} | {0: "</s>", 1: "<think>"}
    assert rows.sources_of(0, 10).tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0]
    assert ["".join(decoder[i] for i in row) for row in rows.read(0, 3).tolist()] == FIRST_ROWS
    assert stream_of(line, 2, "y")[0] == stream_of(line, 1, "y")[-1]
    assert not np.any(stream_of(line, 1, "x") == 1)
    assert np.any(stream_of(line, 1, "y") == 1)


def test_the_manifests_fields(line: DataLine) -> None:
    """docs/reference/manifest.md describes exactly these."""
    manifest = manifest_of(line, 2)
    assert set(manifest) == {
        "format", "line", "cycle", "order_version", "encoding_version", "seed", "eos_id", "tokenizer_sha256",
        "token_dtype", "unit_tokens", "open_files", "recipe", "order", "piece", "first_token", "cycle_tokens",
        "segment_units", "segments", "previous", "sources", "after",
    }  # fmt: skip
    assert set(manifest["sources"]["x"]) == {
        "identity", "settings", "listing_sha256", "targets", "strata", "shares", "opened", "opened_counts", "tail_in",
        "segments", "documents", "files",
    }  # fmt: skip
    assert set(manifest["after"]["x"]) == {"strata", "tail", "counts"}
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "manifest.md").read_text()
    for field in [*manifest, *manifest["sources"]["x"], *manifest["after"]["x"], *manifest["after"]["x"]["counts"]]:
        assert f"`{field}`" in documented, field
    stratum = manifest["after"]["x"]["strata"][0]
    for field in [*manifest["after"]["x"]["tail"], *stratum, *stratum["open"][0]]:
        assert f"`{field}`" in documented, field


def test_every_field_of_a_recipe_and_a_line_is_documented(line: DataLine) -> None:
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "data-line.md").read_text()
    fields = [*type(line.settings).model_fields, *SourceSettings.model_fields]
    fields += [*type(line.settings.schedule[0]).model_fields, *type(line.settings.tokenizer).model_fields]
    fields += [*type(line.settings.sources[0]).model_fields, *Fork.model_fields, *Exclusion.model_fields]
    fields += [*Calibration.model_fields, *SourceCalibration.model_fields, *StratumCalibration.model_fields]
    fields += [*pq.read_table(line.work / "sources" / "x" / "files.parquet").column_names]
    for field in fields:
        assert f"`{field}`" in documented, field


def test_the_tokenizer_written_by_hand_is_one(line: DataLine) -> None:
    encoder = Encoder(bytes_tokenizer(), 0, "bytes")
    ids = encoder.encode(["<think> é"], {})[0]
    assert encoder.decode(ids) == "<think> é"
    assert len(ids) == 10
    assert encoder.encode(["<think> é"], encoder.marker_ids(["<think>"], "y"))[0].tolist() == [1, *ids[7:]]


CANARY = "f4c0be0c2ab38c13b761e342874e5966b589aab5409257b26f77752c7f587408"
LISTINGS = {
    "x": "f01b0d9766d31cacac83b4326b3c58659596bc4cf8ec88680de230dddb26b80a",
    "y": "bd39c03be025fb4b64a24d57f6fac0c6e5f98f7a1c2cc91add4eb8cd997dd0d2",
}
IDENTITY = "0fd432c448bf18e1fb62971aa4d070129d10f6e85b4f4b210dcced4bc1e909a7"
CALIBRATION = "d76f68a963ea2e70d7d5dbb5a42f5d4f192f42c092973fba6b19b9cd720f79d2"
LINE_ID = "3a2803b6c403de9f"
TOKENS = {
    "1/x": "869fd2662121b7db810ec4fdff104ada0cc390ea0f79afd93191971fbc2b032d",
    "1/y": "7acd46075f3599aef14647bb18bf02bd22d4e97a26ee609993b108e230f9e26a",
    "2/x": "87e8945989df90c27f1ca53ad8b84b9116ae353f6d9c724fea5a66f713b57ada",
    "2/y": "aa80c460be6b21be92435d053835d6da8f3839bc14aa695abbcda8bdd1ff0790",
}
HELD_OUT = {
    "x": "ff7d32b79836323eb860abadabd5ee770cf965832d2e7eb9d853e96096b90fc3",
    "y": "f75b795394ecbe981a3668685e563cb3308cf6673eab0ee39af4db7e79160b64",
}
MANIFESTS = [
    "ae1b4590750b4eb2cd75774d34fa8a01b3036f7245dac136f1a24e0aba4a7cef",
    "c15f1272e5cedad815335b4cf7eb09eb6a96e6f660a1552329afbc2c7fb99489",
]
ORDERS = [
    "0e052e8d1b8a5263ae545d095fc2d1d7f96f7e7770596105dcd417c185004c03",
    "b56542c0990335aba11c83100d8ac9a3d9af6feb9393c031edf42fdcda243f1c",
    "30a2e09a1727ab6a4a043e5586d90ab5015f08233f35ae18d8f21911d5e4fe98",
    "3e8b7cf229c965e150d8f6d5a491c60ce12f6c9766c3a488e70e8f93f72db64b",
]
FIRST_ROWS = ["ĠWertĠ31ĠâĨĴĠ<thi", "tĠ78ĠâĨĴĠ<think></s>Docume", "ntĠ63:ĠWertĠ0ĠâĨĴ"]
