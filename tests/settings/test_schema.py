"""`nstrain schema`: a JSON schema of each settings file, every field with its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from nstrain.cli.main import app
from nstrain.data.init import Recipe
from nstrain.settings.host import HostSettings
from nstrain.settings.run import RunSettings


def printed(kind: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["schema", kind])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a schema and of the parts it refers to."""
    for name, part in [("", schema), *schema.get("$defs", {}).items()]:
        for field, value in part.get("properties", {}).items():
            yield f"{name}.{field}", value


@pytest.mark.parametrize(("kind", "settings"), [("run", RunSettings), ("host", HostSettings), ("recipe", Recipe)])
def test_every_field_is_there(kind: str, settings: Any) -> None:
    schema = printed(kind)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["properties"]) == {field.alias or name for name, field in settings.model_fields.items()}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("kind", ["run", "host", "recipe"])
def test_every_field_says_what_it_means(kind: str) -> None:
    silent = [
        place
        for place, value in fields(printed(kind))
        # A part whose class says what it is, and fields that tell one kind of part from another, need no more words.
        if "description" not in value and "$ref" not in value and "const" not in value and "enum" not in value
    ]
    assert silent == []


def test_bounds_and_defaults_are_told() -> None:
    found = dict(fields(printed("run")))
    assert found["OptimizerSettings.beta2"]["default"] == 0.95
    assert found["CheckpointSettings.keep_last"]["exclusiveMinimum"] == 0
    assert found["RatePiece.shape"]["enum"] == ["constant", "linear", "cosine", "sqrt"]
    assert found["BatchPiece.from"]["minimum"] == 0


def test_another_file_is_refused() -> None:
    assert CliRunner().invoke(app, ["schema", "walk"]).exit_code == 2
