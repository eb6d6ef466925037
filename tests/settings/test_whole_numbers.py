"""Every integer field of the files that people write takes a whole number however it is written, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from run_json import RAMP, changed

from nstrain.base.disk import read_json
from nstrain.base.errors import Refusal
from nstrain.data.init import Recipe
from nstrain.data.line import LineSettings
from nstrain.settings.host import HostSettings
from nstrain.settings.model import Settings, dump, json_schema, validate
from nstrain.settings.run import RunSettings, load_run, save_run

BATCH = changed("tokens_per_update", to=RAMP) | {
    "rows": [{"from_cycle": 1, "row_tokens": 256}],
    "learning_rate": [{"from": 0, "to": 100, "shape": "linear", "start": 0.0, "end": 0.5}],
    "optimizer": {"clip_norm": 1.0, "weight_decay_batch": 1024},
    "ema": {"horizon_tokens": 2_000_000_000, "from_tokens": 0},
    "validation": {"every_updates": 10, "rows_per_source": 2, "probe_rows_per_source": 1},
    "checkpoints": {"every_updates": 5},
    "branch": {"from": "/trunk", "line": "t", "at_cycle": 1, "update": 40, "tokens": 10_240},
}
RECIPE = {
    "format": 1,
    "sources": [
        {"name": "a", "kind": "local", "path": "/a", "include": ["*"], "share": 3,
         "stratum": {"by": "directory", "depth": 2}}
    ],
}  # fmt: skip
LINE = {
    "id": "x", "order_version": 1, "encoding_version": 1, "seed": 7, "eos_id": 1, "unit_tokens": 64, "open_files": 2,
    "tokenizer": {"sha256": "", "vocabulary_size": 100, "canary_sha256": ""}, "calibration_sha256": "",
    "schedule": [{"cycles": 3, "cycle_tokens": 4096, "segment_units": 2, "recipe": {"a": 3, "b": 1}}],
    "sources": [{"settings": {k: v for k, v in RECIPE["sources"][0].items() if k != "share"},
                 "listing_sha256": "", "files": 1, "bytes": 10}],
    "fork": {"line": "y", "cycle": 2, "manifest_sha256": "", "tokens": 8192},
}  # fmt: skip
FILES: list[tuple[type[Settings], dict[str, Any]]] = [
    (RunSettings, BATCH), (RunSettings, changed("tokens_per_update", to=1024)), (Recipe, RECIPE), (LineSettings, LINE)
]  # fmt: skip

Place = tuple[str | int, ...]


def integers(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of the integers in a JSON value; the model's configuration is the model package's to read."""
    if place[:2] == ("model", "config"):
        return
    if isinstance(value, int) and not isinstance(value, bool):
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from integers(inner, (*place, key))


def replaced(value: Any, place: Place, new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = new
    return value


@pytest.mark.parametrize(("kind", "value"), FILES)
def test_a_whole_float_is_the_integer_everywhere(kind: type[Settings], value: dict[str, Any]) -> None:
    full = json.loads(json.dumps(dump(validate(kind, value, "f"))))
    places = list(integers(full))
    assert len(places) >= 3
    for place in places:
        number = full
        for part in place:
            number = number[part]
        read = validate(kind, replaced(full, place, float(number)), "f")
        assert json.dumps(dump(read)) == json.dumps(full), f"{place}: what is saved is the int"


@pytest.mark.parametrize(("kind", "value"), FILES)
@pytest.mark.parametrize("wrong", [1.5, True, "2", 1e300, 2.0**53 + 2])
def test_anything_else_is_refused_by_the_fields_name(kind: type[Settings], value: dict[str, Any], wrong: Any) -> None:
    full = json.loads(json.dumps(dump(validate(kind, value, "f"))))
    for place in integers(full):
        if place == ("format",) and wrong is True:
            continue  # 1 or nothing: pydantic takes True for it
        with pytest.raises(Refusal) as caught:
            validate(kind, replaced(full, place, wrong), "f")
        told = str(caught.value)
        if place[-1] == "depth":  # of a union, every kind of which says what is wrong
            assert ".depth': input should be a valid integer" in told
            continue
        assert f"field {'.'.join(map(str, place))!r}: input should be" in told, told
        assert "; " not in told, "one problem, told once"


def test_a_file_with_exponents_is_saved_with_integers(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    value = {**BATCH, "ema": {"horizon_tokens": 2e9, "from_tokens": 1e3}}
    value["tokens_per_update"] = [
        {"from": 0, "to": 4.7e9, "tokens": 1.024e3},
        {"from": 4.7e9, "to": None, "tokens": 2048.0},
    ]
    path.write_text(json.dumps(value))
    settings = load_run(path)
    assert settings.batch_tokens_at(4_700_000_000) == 2048
    save_run(path, settings)
    saved = read_json(path)
    assert saved["ema"] == {"horizon_tokens": 2_000_000_000, "from_tokens": 1000}
    assert saved["tokens_per_update"][0] == {"from": 0, "to": 4_700_000_000, "tokens": 1024}
    assert "4700000000," in path.read_text()


@pytest.mark.parametrize("kind", [RunSettings, Recipe, HostSettings, LineSettings])
def test_the_schema_says_integer_with_its_bounds(kind: type[Settings]) -> None:
    """Draft 2020-12 takes 2e9 for an integer, so a field's schema has no word of floats or functions."""

    def look(part: Any) -> None:
        if isinstance(part, dict):
            unknown = {"gt", "ge", "lt", "le"} & part.keys()
            assert not unknown or "properties" in part, f"a bound that JSON schema does not know: {part}"
            for inner in part.values():
                look(inner)
        elif isinstance(part, list):
            for inner in part:
                look(inner)

    look(json_schema(kind))
    if kind is RunSettings:
        definitions = json_schema(kind)["$defs"]
        integer = {"type": "integer", "exclusiveMinimum": 0}
        assert definitions["CheckpointSettings"]["properties"]["every_updates"]["anyOf"][0] == integer
        assert definitions["EmaSettings"]["properties"]["horizon_tokens"].items() >= integer.items()
        assert json_schema(kind)["properties"]["tokens_per_update"]["anyOf"][0] == integer
        assert json_schema(kind)["properties"]["seed"].items() >= {"minimum": 0, "exclusiveMaximum": 2**63}.items()


def test_no_field_is_a_bare_int() -> None:
    """A field that is added later is of the shared type as well."""

    def bare(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            if schema.get("type") == "int":
                yield "int"
            if schema.get("type") == "function-before":
                return
            for inner in schema.values():
                yield from bare(inner)
        elif isinstance(schema, (list, tuple)):
            for inner in schema:
                yield from bare(inner)

    for kind in (RunSettings, Recipe, HostSettings, LineSettings):
        assert isinstance(kind, type(pydantic.BaseModel))
        assert list(bare(kind.__pydantic_core_schema__)) == [], kind.__name__
