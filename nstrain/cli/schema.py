"""`nstrain schema`: what the settings files may hold, for editors and scripts."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("schema")(schema)


def schema(
    kind: Annotated[
        Literal["run", "host", "recipe"],
        typer.Argument(help="run: a line's run.json; host: host.json; recipe: what `data init` reads."),
    ],
) -> None:
    """Print the JSON schema of a settings file: every field with its type, bounds, default and meaning."""
    from nstrain.settings.model import json_schema

    if kind == "run":
        from nstrain.settings.run import RunSettings as Settings
    elif kind == "host":
        from nstrain.settings.host import HostSettings as Settings  # type: ignore[assignment]
    else:
        from nstrain.data.init import Recipe as Settings  # type: ignore[assignment]
    print(json.dumps(json_schema(Settings), indent=2))
