"""Bad input, to the server and to the command: each case is answered in full, and what runs goes on running."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import START_S, Server, free_port, serve_command
from toy_gguf import write_gguf

from octavo.hub.files import ModelFiles

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
KINDS = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError", 413: "RequestTooLargeError"}
LONG = [{"role": "user", "content": "word " * 3000}]

# What the request changes; the field at fault; what the message must say, the remedy included.
FIELDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"messages": []}, "messages", ["messages must not be empty"]),
    (
        {"messages": LONG},
        "messages",
        ["maximum context length is 2048 tokens", "resulted in 30", "reduce the length of the messages"],
    ),
    (
        {"max_tokens": 2048},
        "max_tokens",
        ["maximum context length is 2048 tokens", "2048 in the completion", "reduce the length of the messages or"],
    ),
    ({"temperature": -1}, "temperature", ["temperature must be non-negative, got -1.0"]),
    ({"top_p": 0}, "top_p", ["top_p must be in (0, 1], got 0.0"]),
    ({"max_tokens": 0}, "max_tokens", ["max_tokens must be at least 1, got 0"]),
    ({"n": 0}, "n", ["n must be at least 1, got 0"]),
    ({"n": 2, "temperature": 0}, "n", ["greedy", "got 2", "Set a temperature above 0"]),
    ({"max_tokens": "10"}, "max_tokens", ["max_tokens must be an integer, got a string", "value='10'"]),
    ({"temperature": [1]}, "temperature", ["temperature must be a number, got a list"]),
    ({"stream": "yes"}, "stream", ["stream must be true or false, got a string"]),
    ({"messages": "Hi"}, "messages", ["messages must be a list, got a string"]),
    ({"messages": [{"role": 5, "content": "a"}]}, "messages.0.role", ["role must be", "got a number"]),
    ({"messages": [{"content": "a"}]}, "messages.0.role", ["messages.0.role is required; add it"]),
    ({"stop": [str(i) for i in range(100)]}, "stop", ["at most 4 strings, got 100", "--max-stop-strings"]),
    ({"logit_bias": {"999999": 1}}, "logit_bias", ["token_id 999999 in logit_bias", "ids go from 0 to 49151"]),
    ({"logit_bias": {"the": 1}}, "logit_bias", ["logit_bias must have token ids", "'the'"]),
]
BODIES: dict[str, tuple[bytes, int, list[str]]] = {
    "cut": (b'{"messages": [', 400, ["not valid JSON", "ends after 14 bytes"]),
    "comma": (b'{"messages": [],}', 400, ["not valid JSON", "trailing comma", "byte 16"]),
    "utf8": (b'{"user": "\xff"}', 400, ["not valid UTF-8", "Encode its text as UTF-8"]),
    "nothing": (b"", 400, ["empty", "send a JSON object"]),
    "list": (b"[1]", 400, ["must be a JSON object, got an array"]),
    "50MB": (b'{"user": "' + b"x" * 50_000_000 + b'"}', 413, ["50,000,012 bytes", "33,554,432", "--max-body-bytes"]),
}


@pytest.fixture
def serves_on(server: Server) -> Callable[[], None]:
    def check() -> None:
        answer = server.http.post(CHAT, json=GOOD)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    return check


def check_error(answer: Any, status: int, param: str | None, says: list[str]) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert (error["type"], error["param"], error["code"]) == (KINDS[status], param, status)
    assert set(error) == {"message", "type", "param", "code"}
    for part in says:
        assert part in error["message"]


@pytest.mark.parametrize(("change", "param", "says"), FIELDS, ids=[json.dumps(c)[:30] for c, _, _ in FIELDS])
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_can_not_be(
    server: Server,
    serves_on: Callable[[], None],
    change: dict[str, Any],
    param: str,
    says: list[str],
    stream: bool,
) -> None:
    answer = server.http.post(CHAT, json=GOOD | {"stream": stream} | change)
    check_error(answer, 400, param, says)
    says_no_value = ("is required", "resulted in")  # there is none, or the text has the numbers
    tail = ")" if any(part in " ".join(says) for part in says_no_value) else ", value="
    assert f"(parameter={param}{tail}" in answer.json()["error"]["message"]
    serves_on()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_can_not_be_read(server: Server, serves_on: Callable[[], None], name: str) -> None:
    content, status, says = BODIES[name]
    answer = server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    check_error(answer, status, None, says)
    serves_on()


def test_a_model_that_is_not_served(server: Server, serves_on: Callable[[], None]) -> None:
    answer = server.http.post(CHAT, json=GOOD | {"model": "gpt-9"})
    check_error(answer, 404, "model", ["The model `gpt-9` does not exist.", "`smollm2`; ask for that"])
    serves_on()


def test_a_route_or_method_that_is_not_there(server: Server, serves_on: Callable[[], None]) -> None:
    check_error(server.http.get("/v1/nothing/at/all"), 404, None, ["GET /v1/nothing/at/all", "/openapi.json"])
    check_error(server.http.post("/chat/completions", json=GOOD), 404, None, ["did you mean /v1/chat/completions?"])
    check_error(server.http.get(CHAT), 405, None, ["does not answer GET; it answers POST"])
    serves_on()


# Models that can't be served: what is made of the real file or in the folder, and what the one line says.


def cut_gguf(folder: Path, real: Path) -> Path:
    path = folder / "cut.gguf"
    with real.open("rb") as source:
        path.write_bytes(source.read(20_000_000))
    return path


def scrambled_gguf(folder: Path, real: Path) -> Path:
    path = folder / "scrambled.gguf"
    with real.open("rb") as source:
        data = bytearray(source.read(1_000_000))
    data[64:4096] = bytes(range(256)) * 15 + bytes(192)
    path.write_bytes(data)
    return path


def other_gguf(folder: Path, real: Path) -> Path:
    return write_gguf(folder / "other.gguf", {}, arch="rwkv7")


def no_gguf(folder: Path, real: Path) -> Path:
    path = folder / "page.gguf"
    path.write_text("<!doctype html>")
    return path


def checkpoint(folder: Path, architecture: str) -> Path:
    config = {
        "architectures": [architecture],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.zeros((64, 32), np.float32)}, str(folder / "model.safetensors"))
    return folder


def cut_safetensors(folder: Path, real: Path) -> Path:
    path = checkpoint(folder, "LlamaForCausalLM") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    return folder


def lacking_safetensors(folder: Path, real: Path) -> Path:
    return checkpoint(folder, "LlamaForCausalLM")


def other_architecture(folder: Path, real: Path) -> Path:
    return checkpoint(folder, "Llama9ForCausalLM")


MODELS: list[tuple[Callable[[Path, Path], Path], list[str]]] = [
    (cut_gguf, ["cut.gguf", "ends at 20000000", "Download the file again"]),
    (scrambled_gguf, ["scrambled.gguf", "corrupt or truncated", "Download the file again"]),
    (other_gguf, ["other.gguf", "'rwkv7'", "llama, mistral, qwen2, qwen3"]),
    (no_gguf, ["page.gguf", "is not a GGUF file"]),
    (cut_safetensors, ["model.safetensors", "the file has 2000", "Download the file again"]),
    (lacking_safetensors, ["needs tensor model.layers.0.", "model.safetensors lacks"]),
    (
        other_architecture,
        ["Llama9ForCausalLM", "neither Octavo nor transformers", "the nearest known one is Llama"],
    ),
]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        # It imports transformers, which takes long; tests/unit/features/bridge/test_bridge_refusals.py has its errors.
        pytest.param(make, says, id=make.__name__, marks=[pytest.mark.slow] if make is other_architecture else [])
        for make, says in MODELS
    ],
)
def test_a_model_that_can_not_be_served(
    smollm2_files: ModelFiles, tmp_path: Path, make: Callable[[Path, Path], Path], says: list[str]
) -> None:
    model = make(tmp_path, smollm2_files.path)
    command = serve_command(str(model), "--tokenizer", "smollm2", "--port", str(free_port()), "--threads", "1")
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 1
    assert result.stdout == ""
    *logged, line = result.stderr.splitlines()
    assert all(" INFO octavo." in one for one in logged)  # a GPU's kernels are compiled while weights are read
    assert line.startswith("octavo: error: ")
    for part in says:
        assert part in line
