"""The hub's client library, imported when it is needed; what its users set - HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE, HF_HUB_DISABLE_IMPLICIT_TOKEN - means here what it means there.

HF_HUB_DISABLE_XET=1 unless the user set it: transfers over Xet are known to stall, and are not what we fetch by.
The library's own requests have no timeout, and it reads an answer whatever its size; both limits are put in by hooks of
its HTTP client, which also hear the server's refusals, for the library waits and tries again without saying so.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

from nstrain import __version__
from nstrain.data.hub.errors import AccessDenied, HubRefusal, UntrustedListing
from nstrain.data.hub.patience import asked_wait_s, patience

MOST_ANSWER_BYTES = 64 << 20
"""Of an answer to one of the library's requests; a page of a listing has less than 1 MiB."""


@dataclasses.dataclass
class ApiSigns:
    """Signs of life of the library's requests, for whoever watches them."""

    last_s: float = 0.0
    """Monotonic time of the last request or answer."""
    quiet_until_s: float = 0.0
    """Until then the library may be waiting because the server asked it to."""
    trouble: str | None = None
    """The last refusal that it will try again after."""


SIGNS = ApiSigns()


@functools.cache
def library() -> ModuleType:
    """huggingface_hub, with timeouts and without Xet."""
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # read when it is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    from huggingface_hub.utils import logging
    from huggingface_hub.utils._http import default_client_factory

    def before(request: Any) -> None:
        limits = patience()
        seconds = {"connect": limits.connect_s, "read": limits.read_s, "write": limits.read_s, "pool": limits.read_s}
        request.extensions["timeout"] = seconds
        SIGNS.last_s = time.monotonic()

    def after(response: Any) -> None:
        SIGNS.last_s = time.monotonic()
        SIGNS.trouble = None
        if response.status_code in (408, 429) or response.status_code >= 500:
            SIGNS.trouble = f"{response.request.url.host}: HTTP {response.status_code}"
            SIGNS.quiet_until_s = time.monotonic() + (asked_wait_s(response.headers) or 0.0) + 1.0
        _read_bounded(response)

    def factory() -> Any:
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {"request": [*hooks["request"], before], "response": [*hooks["response"], after]}
        return client

    huggingface_hub.set_client_factory(factory)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it would warn of is told by our own notices
    return huggingface_hub


def _read_bounded(response: Any) -> None:
    """Read an answer's body as the library would, unpacked, but not beyond MOST_ANSWER_BYTES."""
    parts: list[bytes] = []
    size = 0
    for part in response.iter_bytes():
        size += len(part)
        if size > MOST_ANSWER_BYTES:
            raise UntrustedListing(f"{response.request.url}: an answer of more than {MOST_ANSWER_BYTES:,} bytes")
        parts.append(part)
    response._content = b"".join(parts)  # where its `read` puts it


def api() -> Any:
    """The library's API at the user's endpoint, with the user's token. Raises what they do."""
    hub_headers()
    return library().HfApi(endpoint(), library_name="nstrain", library_version=__version__)


def endpoint() -> str:
    """The hub's address, without a slash at its end. Raises `HubRefusal` if HF_ENDPOINT is none."""
    library()
    from huggingface_hub import constants

    found = str(constants.ENDPOINT).rstrip("/")
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", found):
        raise HubRefusal(f"HF_ENDPOINT: expected the hub's address, https://HOST, found {found!r}; correct or unset it")
    return found


def is_offline() -> bool:
    """Whether the user asked for no connections (HF_HUB_OFFLINE)."""
    library()
    from huggingface_hub import constants

    return bool(constants.is_offline_mode()) if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE


def hub_headers() -> dict[str, str]:
    """Headers of a request to the hub itself: who we are, and the user's token if there is one.

    Raises `AccessDenied` for a token that cannot be sent.
    """
    library()
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = dict(build_hf_headers(library_name="nstrain", library_version=__version__))
    if not re.fullmatch(r"Bearer [!-~]+", headers.get("authorization", "Bearer none")):
        raise AccessDenied("HF_TOKEN, or the stored token, has characters that no token has; set it anew")
    return headers


def file_url(base: str, repo: str, revision: str, path: str) -> str:
    """Where a hub at `base` gives a file of a dataset repository."""
    return f"{base}/datasets/{quote(repo)}/resolve/{quote(revision, safe='')}/{quote(path)}"


def cached_file(repo: str, revision: str, path: str) -> Path | None:
    """The file in the library's own cache (below HF_HOME), if its user fetched it at that revision before."""
    found = library().try_to_load_from_cache(repo, path, revision=revision, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None
