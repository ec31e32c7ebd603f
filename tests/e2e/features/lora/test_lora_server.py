"""Adapters behind a real server of two API processes, with OpenAI's client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file
from serving import Server, serve_command, together, wait_until
from tiny_adapters import merged, save_adapter
from toy_engine import GPU
from toy_models import save_decoder

from octavo import LLM, LoRARequest, SamplingParams
from octavo.core.errors import ModelNotFoundError

pytestmark = pytest.mark.e2e

PROMPT = "The quick brown fox jumps over"
COUNT = 12
BACKEND = "triton" if GPU else "torch"
SETTINGS = (
    *("--dtype", "float32", "--threads", "1", "--max-model-len", "128", "--kv-cache-memory-bytes", "8M"),
    *("--attention-backend", BACKEND),
)
SHAPES = {"red": {"rank": 4}, "blue": {"rank": 16, "use_rslora": True}, "green": {"rank": 64, "targets": ("q_proj",)}}
NEW = "red, once more"
"""What the name `red` means after it was loaded in place."""


class Files:
    """A model, adapters of it, and the tokens that the models with merged weights answer."""

    def __init__(self, folder: Path) -> None:
        self.base = save_decoder(folder / "base", seed=3, vocab_size=512)
        (self.base / "chat_template.jinja").write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}")
        config = json.loads((self.base / "config.json").read_text())
        self.adapters = {
            name: save_adapter(folder / "adapters" / name, config, seed=place, **shape)
            for place, (name, shape) in enumerate((SHAPES | {NEW: {"rank": 8}}).items())
        }
        self.told = {"smollm2": self._tokens(self.base)}
        weights = load_file(self.base / "model.safetensors")
        for name, adapter in self.adapters.items():
            path = shutil.copytree(self.base, folder / "merged" / name)
            save_file(merged(weights, adapter), path / "model.safetensors", {"format": "pt"})
            self.told[name] = self._tokens(path)
        assert len(set(map(tuple, self.told.values()))) == len(self.told)

    def _tokens(self, model: Path) -> list[int]:
        with LLM(str(model), dtype="float32", threads=1, kv_cache_memory_bytes=1 << 20, max_model_len=128) as llm:
            return list(llm.generate(PROMPT, greedy())[0].outputs[0].token_ids)


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def server(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    (files.base.parent / "adapters" / "bad").mkdir()
    flags = ("--lora-modules", f"red={files.adapters['red']}", "--lora-dir", str(files.base.parent / "adapters"))
    server = Server(
        str(files.base),
        tmp_path_factory.mktemp("server") / "log",
        *(*SETTINGS, *flags, "--allow-runtime-lora-updating", "--api-server-count", "2"),
    )
    try:
        server.wait_ready()
        wait_until(lambda: "The server is ready" in server.output(), "all processes")
        yield server
        used = ("octavo:kv_blocks_used", "octavo:lora_blocks")
        wait_until(lambda: len({server.metric(name) for name in used}) == 1, "only adapters in the KV cache")
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
    finally:
        server.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


ASKED: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": COUNT,
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


def tokens(client: openai.OpenAI, model: str) -> list[int]:
    choice: Any = client.completions.create(model=model, **ASKED).choices[0]
    return list(choice.token_ids)


def streamed(client: openai.OpenAI, model: str) -> list[int]:
    found: list[int] = []
    for chunk in client.completions.create(model=model, stream=True, **ASKED):
        assert chunk.model == model
        for choice in chunk.choices:
            found += getattr(choice, "token_ids", None) or []
    return found


def test_each_model_answers_as_its_merged_weights_do(client: openai.OpenAI, files: Files) -> None:
    names = ["smollm2", "red", "blue", "green"] * 2
    assert together(lambda name: tokens(client, name), names) == [files.told[name] for name in names]
    assert [streamed(client, name) for name in ("blue", "smollm2")] == [files.told["blue"], files.told["smollm2"]]


def test_models_are_listed(client: openai.OpenAI, files: Files, server: Server) -> None:
    assert tokens(client, "green") == files.told["green"]  # found in the folder
    cards: dict[str, Any] = {card.id: card for card in client.models.list()}
    assert {"smollm2", "red", "green"} <= set(cards)
    assert (cards["red"].root, cards["red"].parent) == (str(files.adapters["red"]), "smollm2")
    assert client.models.retrieve("red").id == "red"
    assert "LoRA adapters" in server.output()


def test_other_routes_take_adapters(client: openai.OpenAI, server: Server, files: Files) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    asked = ASKED["extra_body"]
    chat: Any = client.chat.completions.create(
        model="red", messages=messages, max_tokens=COUNT, temperature=0, extra_body=asked
    )
    assert (chat.model, chat.choices[0].token_ids) == ("red", files.told["red"])
    response = client.responses.create(model="red", input=PROMPT, max_output_tokens=COUNT, temperature=0)
    assert response.model == "red"
    body = {"model": "red", "messages": messages, "max_tokens": COUNT, "temperature": 0}
    answer = server.http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}).json()
    assert (answer["model"], answer["content"][0]["text"]) == ("red", response.output_text)


def test_several_adapters_add_up(client: openai.OpenAI, files: Files) -> None:
    def with_loras(*loras: Any) -> list[int]:
        body = {**ASKED, "extra_body": {**ASKED["extra_body"], "loras": list(loras)}}
        choice: Any = client.completions.create(model="smollm2", **body).choices[0]
        return list(choice.token_ids)

    listed = shutil.copytree(files.adapters["blue"], files.adapters["blue"].with_name("listed"))
    assert with_loras({"name": listed.name}) == files.told["blue"], "found in --lora-dir"
    with pytest.raises(openai.NotFoundError, match="`purple` does not exist"):
        with_loras("red", "purple")
    assert with_loras("red") == files.told["red"]
    assert with_loras("red", {"name": "blue", "weight": 0}) == files.told["red"]
    assert with_loras({"name": "red", "weight": 0}) == files.told["smollm2"]
    assert with_loras("red", "blue") not in (files.told["red"], files.told["blue"])


def test_unknown_names_and_bad_folders(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"`purple` does not exist. This server serves `smollm2`, `red`"):
        tokens(client, "purple")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        tokens(client, "../base")
    with pytest.raises(openai.BadRequestError, match=r"bad has no adapter_config.json"):
        tokens(client, "bad")


def test_a_batch_mixes_models(client: openai.OpenAI, server: Server, files: Files) -> None:
    names = ["smollm2", "red", "purple"]
    body = {key: value for key, value in ASKED.items() if key != "extra_body"} | ASKED["extra_body"]
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, "model": name}}
        for name in names
    ]
    given = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=given.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    ended = client.batches.retrieve(batch.id)
    done = [json.loads(line) for line in client.files.content(str(ended.output_file_id)).text.splitlines()]
    told = {line["custom_id"]: line["response"]["body"]["choices"][0]["token_ids"] for line in done}
    assert told == {name: files.told[name] for name in ("smollm2", "red")}
    failed = json.loads(client.files.content(str(ended.error_file_id)).text)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("purple", 404)


def test_loading_in_place_and_unloading_under_load(server: Server, client: openai.OpenAI, files: Files) -> None:
    def post(path: str, **body: Any) -> tuple[int, str]:
        answer = server.http.post(path, json=body)
        return answer.status_code, answer.text

    def work(number: int) -> list[int]:
        name = ("smollm2", "blue", "other")[number % 3]
        if name != "other":
            found = tokens(client, name)
            assert found == files.told[name]
            return found
        path, old, new = "/v1/load_lora_adapter", files.adapters["red"], files.adapters[NEW]
        own = f"own-{number}"
        assert post(path, lora_name=own, lora_path=str(old))[0] == 200
        assert tokens(client, own) == files.told["red"]
        assert post(path, lora_name=own, lora_path=str(new))[0] == 400
        assert post(path, lora_name=own, lora_path=str(new), load_inplace=True)[0] == 200
        assert tokens(client, own) == files.told[NEW]
        assert post("/v1/unload_lora_adapter", lora_name=own)[0] == 200
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            tokens(client, own)
        return []

    together(work, range(12))
    assert post("/v1/unload_lora_adapter", lora_name="own-2") == (
        404,
        '{"error":{"message":"The lora adapter \'own-2\' cannot be found.","type":"NotFoundError","param":"model",'
        '"code":404}}',
    )
    assert post("/v1/load_lora_adapter", lora_name="x", lora_path="/nowhere")[0] in (400, 404)


def test_a_name_that_is_loaded_twice_at_once(server: Server, client: openai.OpenAI, files: Files) -> None:
    """One of them wins, the others get the 400, and the name means the winner's files in all processes."""
    names = ["red", "blue", "green", NEW] * 2

    def load(name: str) -> int:
        body = {"lora_name": "twice", "lora_path": str(files.adapters[name])}
        return server.http.post("/v1/load_lora_adapter", json=body).status_code

    statuses = together(load, names)
    assert sorted(statuses) == [200] + [400] * 7
    winner = names[statuses.index(200)]
    assert together(lambda _: tokens(client, "twice"), range(4)) == [files.told[winner]] * 4
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": "twice"}).status_code == 200


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_loads_and_unloads_leave_nothing_behind(
    count: int, server: Server, client: openai.OpenAI, files: Files
) -> None:
    """Each under another name, beside streams of the base and of another adapter."""
    pids = [server.process.pid, *server.children()]
    ended = threading.Event()

    def load(number: int) -> None:
        name, path = f"brief-{number}", files.adapters[("red", "blue", NEW)[number % 3]]
        body = {"lora_name": name, "lora_path": str(path)}
        assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert tokens(client, name) == files.told[("red", "blue", NEW)[number % 3]]
        assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200

    def stream(name: str) -> None:
        while not ended.is_set():
            assert streamed(client, name) == files.told[name]

    def state() -> tuple[list[int], float, float]:
        opened = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
        places = server.metric("octavo:lora_adapters", place="host"), server.metric("octavo:lora_blocks")
        return opened, *places

    with ThreadPoolExecutor(2) as streams:
        running = [streams.submit(stream, name) for name in ("smollm2", "blue")]
        try:
            for number in range(count // 10):
                load(number)
            before, memory = state(), [_resident(pid) for pid in pids]
            for number in range(count // 10, count):
                load(number)
            grown = [now - then for now, then in zip(map(_resident, pids), memory, strict=True)]
        finally:
            ended.set()
        for one in running:
            one.result()
    # The engine's numbers are those of its last step.
    wait_until(lambda: all(now <= then for now, then in zip(state()[1:], before[1:], strict=True)), "no more adapters")
    opened = state()[0]
    assert max(now - then for now, then in zip(opened, before[0], strict=True)) <= 4, "connections come and go"
    assert max(grown) < 64 << 20


def _resident(pid: int) -> int:
    """Bytes of a process's memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_wrong_paths_end_the_start(files: Files) -> None:
    command = [*serve_command(str(files.base)), *SETTINGS, "--port", "0", "--lora-modules", "x=/nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "/nowhere" in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


def test_the_python_api(files: Files) -> None:
    settings: dict[str, Any] = {"threads": 1, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 128}
    settings["attention_backend"] = BACKEND
    red, blue = (LoRARequest(name, place, str(files.adapters[name])) for place, name in ((1, "red"), (2, "blue")))
    with LLM(str(files.base), dtype="float32", enable_lora=True, **settings) as llm:
        outputs = llm.generate([PROMPT] * 3, greedy(), lora_request=[red, None, blue])
        assert [list(one.outputs[0].token_ids) for one in outputs] == [
            files.told[name] for name in ("red", "smollm2", "blue")
        ]
        assert llm.list_loras() == {1, 2}
        assert llm.pin_lora(1)
        assert {one.name: one.pinned for one in llm.get_loras()} == {"red": True, "blue": False}
        assert llm.remove_lora(1)
        with pytest.raises(ModelNotFoundError):
            llm.add_lora(LoRARequest("green", 1, "/nowhere"))
        assert llm.add_lora(LoRARequest("new", 1, str(files.adapters[NEW]))), "its number is free again"
        assert llm.remove_lora("new")
        wrong = LoRARequest("wrong", 1, "/nowhere")
        for refused in (partial(llm.generate, PROMPT, lora_request=wrong), partial(llm.remove_lora, 1)):
            with pytest.raises(ModelNotFoundError):
                refused()
        assert llm.add_lora(LoRARequest("new", 1, str(files.adapters[NEW])))
        assert llm.remove_lora(1)
        assert llm.list_loras() == {2}
        assert llm.add_lora(LoRARequest("blue", 2, str(files.adapters[NEW]), load_inplace=True))
        assert list(llm.generate(PROMPT, greedy(), lora_request="blue")[0].outputs[0].token_ids) == files.told[NEW]
