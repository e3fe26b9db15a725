"""A model's config.json is fetched from the hub as huggingface_hub's variables say, and never waited for long."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from zero_study.theory import shapes
from zero_study.theory.shapes import hub

GPT = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 24, "n_head": 4, "n_layer": 2,
    "n_positions": 32, "vocab_size": 64,
}  # fmt: skip
VARIABLES = (
    "HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY",
)  # fmt: skip


class Hub:
    """A hub on this machine: what it answers by path, and what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes | str]] = {}  # status, and content or where to go instead
        self.asked: list[tuple[str, str | None]] = []  # path, and the token
        self.released = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append((self.path, self.headers.get("Authorization")))
                status, content = hub.answers.get(self.path, (404, b""))
                if status == 0:  # never
                    hub.released.wait(30)
                    return
                self.send_response(status)
                if isinstance(content, str):
                    self.send_header("Location", content)
                    content = b""
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", f"{server.address}/")
    yield server
    server.close()


PATH = "/somebody/Some-GPT/resolve/main/config.json"


def keep_in_cache(home: Path) -> None:
    folder = home / "hub" / "models--somebody--Some-GPT"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(GPT))


def test_an_unknown_id_is_asked_of_the_hub(server):
    server.answers[PATH] = (200, json.dumps(GPT).encode())
    assert shapes.find("somebody/Some-GPT").hidden == 24
    assert server.asked == [(PATH, None)]


def test_a_known_id_is_not(server):
    assert shapes.find("openai-community/gpt2").name == "gpt2"
    assert server.asked == []


@pytest.mark.parametrize("kept_in", ["the variable", "the file of hf auth login"])
def test_a_token_goes_to_the_hub_and_to_no_other_host(kept_in, server, home, monkeypatch):
    if kept_in == "the variable":
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
    else:
        (home / "token").write_text("hf_secret\n")
    other = Hub()
    try:
        server.answers[PATH] = (307, "/moved/config.json")
        server.answers["/moved/config.json"] = (302, f"{other.address}/elsewhere")
        other.answers["/elsewhere"] = (200, json.dumps(GPT).encode())
        assert shapes.find("somebody/Some-GPT").hidden == 24
        assert server.asked == [(PATH, "Bearer hf_secret"), ("/moved/config.json", "Bearer hf_secret")]
        assert other.asked == [("/elsewhere", None)]
    finally:
        other.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, b""), "HF_TOKEN"),
        ((403, b""), "HF_TOKEN"),
        ((404, b""), "the hub does not have this model"),
        ((500, b""), "HTTP status 500"),
        ((200, b"<html>"), "not JSON"),
        ((200, b"[]"), "does not contain a JSON object"),
        ((200, b" " * (hub.LARGEST_BYTES + 1)), "bytes"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_in_one_line(answer, says, server):
    server.answers[PATH] = answer
    with pytest.raises(ValueError, match=says) as refused:
        shapes.find("somebody/Some-GPT")
    assert "\n" not in str(refused.value)


def test_a_hub_that_does_not_answer_is_given_up_and_known_names_are_proposed(server, monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.3)
    server.answers["/meta/Llama-9-8B/resolve/main/config.json"] = (0, b"")
    with pytest.raises(ValueError, match=r"did not answer within|timed out") as refused:
        shapes.find("meta/Llama-9-8B")
    assert "llama-3-8b" in str(refused.value)


def test_a_name_that_is_resolved_for_ever_is_given_up(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(hub, "_fetch", lambda hub_id: released.wait(30))
    with pytest.raises(hub.Unavailable, match="did not answer"):
        hub.read_config("a/b")
    released.set()


@pytest.mark.parametrize("why", ["HF_HUB_OFFLINE", "no network"])
def test_the_local_cache_answers_if_the_hub_is_not_asked_or_cannot_be(why, server, home, monkeypatch):
    if why == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set|cannot be reached"):
        shapes.find("somebody/Some-GPT")
    keep_in_cache(home)
    assert shapes.find("somebody/Some-GPT").hidden == 24
    assert server.asked == []
