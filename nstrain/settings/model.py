"""The base of every settings model: frozen, strict, and helpful about what it refuses."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import pydantic

from nstrain.base.errors import Refusal


class Settings(pydantic.BaseModel):
    """A part of a settings file. Unknown fields and wrong types are errors, and a value never changes once read."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


LARGEST_FLOAT = 2**53
"""Up to here a float holds every whole number, so that what was written is what is read."""


def _as_whole(value: Any) -> Any:
    """A whole number written as a float (2e9, 4.7e9) as the integer that it is; anything else as it came."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_FLOAT:
        return int(value)
    return value


WholeNumber = pydantic.BeforeValidator(_as_whole)
"""Marks an integer that people write: 2e9 is 2000000000. 1.5 and true are still no integers."""

Whole = Annotated[int, WholeNumber]
Natural = Annotated[int, pydantic.Field(ge=0), WholeNumber]
Positive = Annotated[int, pydantic.Field(gt=0), WholeNumber]

S = TypeVar("S", bound=Settings)


def validate(kind: type[S], value: Any, where: str) -> S:
    """A settings object from plain JSON values.

    Raises `Refusal` listing every wrong field at once: its place, what is wrong, and for an unknown name the nearest
    valid one.
    """
    try:
        # JSON mode: a file's arrays may become tuples, while a number never becomes a string. json.dumps keeps an
        # infinity (1e999) what it is, for the field to refuse; pydantic's own writer would make it null.
        return kind.model_validate_json(json.dumps(value))
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)
        fitting = [problem for problem in found if not (_of_other_branch(problem) or _follows(problem, found))] or found
        problems = [_explain(kind, problem) for problem in fitting]
        raise Refusal(f"{where}: " + "; ".join(problems)) from None


def load(kind: type[S], path: Path) -> S:
    """A settings file, validated. Raises `Refusal` if it is missing, is not JSON, or does not validate."""
    from nstrain.base.disk import read_json

    return validate(kind, read_json(path), str(path))


def dump(settings: Settings) -> dict[str, Any]:
    """A settings object as plain JSON values, every field present."""
    return settings.model_dump(mode="json", by_alias=True)


def json_schema(kind: type[Settings]) -> dict[str, Any]:
    """The JSON schema of a settings file, each field with its meaning."""
    schema = kind.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_UNION_TAG = re.compile(r"function-before\[.*int\]|tuple\[.*\]")
"""What pydantic puts into a place to say which side of a number-or-list field it tried."""


def _of_other_branch(problem: Any) -> bool:
    """Whether a problem is only that a list is no number, or a number no list, where the field may be either."""
    tag = str(problem["loc"][-1]) if problem["loc"] else ""
    if not _UNION_TAG.fullmatch(tag):
        return False
    return tag.startswith("tuple") != isinstance(problem["input"], list)


def _follows(problem: Any, found: Sequence[Any]) -> bool:
    """Whether a list is too short only because the wrong items in it, which are named themselves, were not counted."""
    place = problem["loc"]
    return problem["type"] == "too_short" and any(
        other["loc"][: len(place)] == place for other in found if other is not problem
    )


def _explain(kind: type[Settings], problem: Any) -> str:
    location = tuple(str(part) for part in problem["loc"] if not _UNION_TAG.fullmatch(str(part)))
    place = ".".join(location)
    if problem["type"] == "extra_forbidden":
        names = _fields_at(kind, location[:-1])
        near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid fields here: {', '.join(sorted(names))}"
        return f"unknown field {place!r} ({hint})"
    if problem["type"] == "missing":
        return f"field {place!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "too_short":  # pydantic's words are of tuples and of validation
        message = f"expected at least {problem['ctx']['min_length']} of them"
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):  # of several fields, which it names
        return f"{place}: {message}" if place else message
    return f"{f'field {place!r}: ' if place else ''}{message}, found {problem['input']!r}"


def _fields_at(kind: Any, location: tuple[str, ...]) -> list[str]:
    """The valid field names at a place inside nested settings (through lists, mappings and unions)."""
    kinds = [kind]
    for part in location:
        following: list[Any] = []
        for candidate in kinds:
            if isinstance(candidate, type) and issubclass(candidate, Settings):
                if part in candidate.model_fields:
                    following += _settings_in(candidate.model_fields[part].annotation)
                else:
                    following.append(candidate)  # a list index or a union tag: stay where we are
        kinds = following
    return sorted({field.alias or name for candidate in kinds for name, field in candidate.model_fields.items()})


def _settings_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _settings_in(argument)]
