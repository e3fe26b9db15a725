"""Fetch a model's config.json from the Hugging Face hub with Python's standard library only.

The environment variables of huggingface_hub apply: HF_ENDPOINT, HF_TOKEN (or the file that `hf auth login` writes),
HF_HUB_OFFLINE, and the variables for the path of the cache. Proxies are taken from the environment, as usual in Python.
"""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 5.0  # for everything: name resolution, connection, redirects and response
LARGEST_BYTES = 1 << 20
_TRUE = {"1", "ON", "YES", "TRUE"}


class Unavailable(ValueError):
    """Raised if the hub did not return the file. The message gives the reason and, if known, a remedy."""


def read_config(hub_id: str) -> bytes:
    """Return the content of a model's config.json from the hub, or from its local cache if the hub fails.

    Raises Unavailable, after at most `TIMEOUT_SECONDS`, if neither has the file. A program that runs in a browser
    (the web page of the planner) never contacts the hub.
    """
    if sys.platform == "emscripten":
        raise Unavailable("in a browser, this program does not contact the hub. Paste the model's config.json instead")
    cached = _cached(hub_id)
    if any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        if cached is None:
            raise Unavailable("HF_HUB_OFFLINE is set, and the config.json is not in the local cache")
        return cached.read_bytes()
    try:
        return _fetch_in_time(hub_id)
    except Unavailable:
        if cached is None:
            raise
        return cached.read_bytes()


def _fetch_in_time(hub_id: str) -> bytes:
    """Return the content of the file from the hub. Raises Unavailable after TIMEOUT_SECONDS.

    The request runs in its own thread, because the time-out of a socket does not include name resolution.
    """
    answer: list[bytes | Exception] = []

    def fetch() -> None:
        try:
            answer.append(_fetch(hub_id))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    if not answer:
        raise Unavailable(f"{_endpoint()} did not answer within {TIMEOUT_SECONDS:g} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]


def _fetch(hub_id: str) -> bytes:
    address = f"{_endpoint()}/{urllib.parse.quote(hub_id)}/resolve/main/config.json"
    request = urllib.request.Request(address, headers={"User-Agent": "zero-study"})
    if token := _token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(_TokenStaysOnItsHost)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            content: bytes = response.read(LARGEST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise Unavailable(_of_status(error.code, hub_id, bool(token))) from None
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"{_endpoint()} cannot be reached ({reason})") from None
    if len(content) > LARGEST_BYTES:
        raise Unavailable(f"its config.json has more than {LARGEST_BYTES:,} bytes")
    return content


class _TokenStaysOnItsHost(urllib.request.HTTPRedirectHandler):
    """Send the token again if the hub redirects to its own host, but not if it redirects to another host."""

    def redirect_request(self, request: urllib.request.Request, *arguments: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(request, *arguments)
        token = request.get_header("Authorization")
        if redirected is not None and token:
            old, new = urllib.parse.urlsplit(request.full_url), urllib.parse.urlsplit(redirected.full_url)
            if (old.scheme, old.netloc) == (new.scheme, new.netloc):
                redirected.add_unredirected_header("Authorization", token)
        return redirected


def _of_status(status: int, hub_id: str, has_token: bool) -> str:
    """Return an explanation of an HTTP status of the hub.

    For an unknown id, the hub answers 401 to users who are not logged in.
    """
    if status in (401, 403):
        token = "the token in use has no access to it" if has_token else "no token is set (HF_TOKEN)"
        return f"the hub refuses access, because the model does not exist, is private or is gated, and {token}"
    if status == 404:
        return "the hub does not have this model, or the model has no config.json"
    return f"{_endpoint()} answered with HTTP status {status}"


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").read_text().strip() or None
    except (OSError, ValueError):
        return None


def _home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def _cached(hub_id: str) -> Path | None:
    """Return the path of the file in the cache of huggingface_hub. None if it is not there.

    It is in the snapshot to which the branch main points.
    """
    folder = Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub") / f"models--{hub_id.replace('/', '--')}"
    try:
        path = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None
