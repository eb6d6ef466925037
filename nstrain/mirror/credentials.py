"""What must be on this machine for a line to be copied to W&B: the client's package, and a key for the service.

Found out without the network and without starting the client, so that `nstrain check` can say it before a line begins.
Where a key may stand is the client's own rule (wandb 0.28 to 0.31): the environment, netrc, the client's settings file.
"""

from __future__ import annotations

import configparser
import dataclasses
import importlib.metadata
import netrc
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from nstrain.mirror.contract import ServiceRefuses
from nstrain.settings.run import TrackerSettings

PACKAGE = "wandb"
INSTALL = "pip install 'wandb>=0.28.1,<0.32'"
OLDEST = (0, 28, 1)
"""What stands below has lost rows, or has hung (docs/decisions/0002-dependencies.md)."""
TESTED_BELOW = (0, 32)
"""What is newer has not been seen to work; it is used all the same, as everything is read back."""

KEY_LENGTH = 40
"""Characters that a key has at least."""

_OWN_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
"""W&B's own, from wandb 0.31 on and before; the client takes the second one's entry in netrc for the first as well."""


@dataclasses.dataclass(frozen=True)
class _Key:
    source: str
    """Where it was found, for people."""
    key: str | None
    """None: a file from which the client gets one."""


def refuse_unusable(settings: TrackerSettings) -> None:
    """Raise `ServiceRefuses`, with the remedy, if the package is missing or too old, or there is no key that fits."""
    _refuse_package()
    found = _key_for(address_of(settings))
    if found is None:
        raise ServiceRefuses(
            f"no API key for {address_for_people(settings)}: found none in WANDB_API_KEY, {_netrc_path()} and "
            f"{_settings_path()}. Make one on your settings page there, then `wandb login`, or set WANDB_API_KEY where "
            "the line is started"
        )
    if found.key is not None and len(found.key.split("-", 1)[-1]) < KEY_LENGTH and "." not in found.key:
        raise ServiceRefuses(
            f"{found.source}: expected an API key of at least {KEY_LENGTH} characters, found {len(found.key)}; "
            "copy it again from your settings page there"
        )


def describe(settings: TrackerSettings) -> str:
    """What would be used, in a line. Raises `ServiceRefuses` as `refuse_unusable` does."""
    refuse_unusable(settings)
    version = importlib.metadata.version(PACKAGE)
    newer = " (newer than what nstrain was tested with)" if _numbers(version) >= TESTED_BELOW else ""
    found = _key_for(address_of(settings))
    source = found.source if found is not None else "nowhere"
    return f"{PACKAGE} {version}{newer}, {address_for_people(settings)}, key from {source}"


def address_of(settings: TrackerSettings) -> str | None:
    """The service's address: run.json's, otherwise the one that this user's client is set to; None: W&B's own."""
    configured = settings.base_url or os.environ.get("WANDB_BASE_URL") or _client_settings().get("base_url")
    return configured.rstrip("/") if configured else None


def address_for_people(settings: TrackerSettings) -> str:
    """The service by its address, or by its name."""
    return address_of(settings) or "W&B"


def _refuse_package() -> None:
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ServiceRefuses(f"copying a line to W&B needs the package {PACKAGE}: {INSTALL}") from None
    if _numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ServiceRefuses(f"{PACKAGE} {version} is installed, at least {oldest} is needed: {INSTALL}")


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def _key_for(address: str | None) -> _Key | None:
    if key := os.environ.get("WANDB_API_KEY"):
        return _Key("WANDB_API_KEY", key)
    if token := os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return _Key(f"the identity token {token}", None)
    if password := _netrc_password(address):
        return _Key(str(_netrc_path()), password)
    configured = _client_settings()
    if configured.get("identity_token_file"):
        return _Key(f"the identity token {configured['identity_token_file']}", None)
    key = configured.get("api_key")
    return _Key(str(_settings_path()), key) if key else None


def _netrc_password(address: str | None) -> str | None:
    host = urlsplit(address).netloc if address is not None else _OWN_HOSTS[0]
    try:
        entries = netrc.netrc(_netrc_path())
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    for name in _OWN_HOSTS if host in _OWN_HOSTS else (host,):
        entry = entries.authenticators(name)
        if entry is not None and entry[2]:
            return entry[2]
    return None


def _netrc_path() -> Path:
    if named := os.environ.get("NETRC"):
        return Path(named).expanduser()
    usual, other = Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()
    return other if other.exists() and not usual.exists() else usual


def _settings_path() -> Path:
    """The client's settings file of this user, which `wandb login --host` writes."""
    return Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings"


def _client_settings() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(_settings_path(), encoding="utf-8")
        return dict(parser["default"]) if parser.has_section("default") else {}
    except (configparser.Error, OSError, UnicodeDecodeError):
        return {}
