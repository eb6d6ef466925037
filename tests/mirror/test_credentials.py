"""What a machine lacks for a line to be copied is said before it begins, without the network."""

from __future__ import annotations

import importlib.metadata
import re
import socket
from pathlib import Path

import pytest

from nstrain.mirror import credentials
from nstrain.mirror.contract import ServiceRefuses
from nstrain.mirror.credentials import INSTALL, OLDEST, TESTED_BELOW, address_of, describe, refuse_unusable
from nstrain.settings.run import TrackerSettings

KEY = "0123456789" * 4
CLOUD = TrackerSettings(service="wandb", project="brains")
OWN = TrackerSettings(service="wandb", project="brains", base_url="http://wandb.example.org:8080/")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home without any account, on a machine without a network."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def no_network(*_: object) -> None:
        raise AssertionError("it asks the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return tmp_path


def netrc(path: Path, host: str, key: str = KEY) -> None:
    path.write_text(f"machine {host}\n  login user\n  password {key}\n")


def test_a_key_is_found_where_the_client_finds_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceRefuses, match=r"no API key for W&B: found none in WANDB_API_KEY, .*/\.netrc"):
        refuse_unusable(CLOUD)
    netrc(home / ".netrc", "wandb.example.org:8080")
    with pytest.raises(ServiceRefuses, match="no API key for W&B"):
        refuse_unusable(CLOUD)
    assert describe(OWN).endswith(f"http://wandb.example.org:8080, key from {home / '.netrc'}")
    for host in ("api.wandb.ai", "api.forge.coreweave.com"):
        netrc(home / "mine", host)
        monkeypatch.setenv("NETRC", str(home / "mine"))
        assert describe(CLOUD).endswith(f"W&B, key from {home / 'mine'}")
        with pytest.raises(ServiceRefuses, match="no API key for http://wandb.example.org:8080"):
            refuse_unusable(OWN)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert describe(OWN).endswith("key from WANDB_API_KEY")


def test_the_clients_own_settings_name_the_service(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb login --host` writes them."""
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://w.example.org\nentity = somebody\n")
    assert address_of(CLOUD) == "https://w.example.org"
    netrc(home / ".netrc", "w.example.org")
    refuse_unusable(CLOUD)
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.org/")
    assert address_of(CLOUD) == "https://other.example.org"
    assert address_of(OWN) == "http://wandb.example.org:8080"
    settings.write_text("no settings\x00at all")
    monkeypatch.delenv("WANDB_BASE_URL")
    assert address_of(CLOUD) is None


@pytest.mark.parametrize("key", ["short", "local-" + "a" * 39, "a" * 39])
def test_a_key_that_cannot_be_one_is_named_and_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(ServiceRefuses, match=r"^WANDB_API_KEY: expected an API key of at least 40 characters") as told:
        refuse_unusable(CLOUD)
    assert key not in str(told.value)


@pytest.mark.parametrize("key", [KEY, "local-" + KEY, "wandb_v1_" + KEY + "_" + KEY, "head.body.tail"])
def test_all_kinds_of_keys_are_taken(home: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    refuse_unusable(CLOUD)


def test_the_package_is_named_with_the_line_that_installs_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)

    def version_is(version: str | None) -> None:
        def found(_: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError
            return version

        monkeypatch.setattr(credentials.importlib.metadata, "version", found)

    version_is(None)
    with pytest.raises(ServiceRefuses, match=r"needs the package wandb: pip install 'wandb>=0\.28\.1,<0\.32'"):
        refuse_unusable(CLOUD)
    version_is("0.28.0")
    with pytest.raises(ServiceRefuses, match=r"wandb 0\.28\.0 is installed, at least 0\.28\.1 is needed"):
        refuse_unusable(CLOUD)
    version_is("0.31.0")
    assert describe(CLOUD) == "wandb 0.31.0, W&B, key from WANDB_API_KEY"
    version_is("0.32.0rc1")
    assert "newer than what nstrain was tested with" in describe(CLOUD)


def test_the_extra_names_the_versions_that_the_code_takes() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extra = f'"wandb>={".".join(map(str, OLDEST))},<{".".join(map(str, TESTED_BELOW))}"'
    assert text.count(extra) == 2, "the extras wandb and dev"
    assert re.search(r"^wandb = \[", text, re.MULTILINE)
    assert INSTALL.removeprefix("pip install ").strip("'") in extra
