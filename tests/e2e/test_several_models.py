"""Several models behind one server: real processes, over engine cores that only pretend, asked by real clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, descendants, free_port, serve_command, together, wait_until
from websockets.sync.client import connect

from octavo.hub.files import ModelFiles

pytestmark = pytest.mark.e2e

STUB = Path(__file__).with_name("stub_pool.py")
PYTHONPATH = os.pathsep.join([str(STUB.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
HELLO: Any = [{"role": "user", "content": "Hello"}]


@contextmanager
def pool(folder: Path, names: str, *flags: str, step_s: float = 0.002) -> Iterator[Server]:
    command = ["/usr/bin/env", f"PYTHONPATH={PYTHONPATH}", sys.executable, str(STUB), str(step_s), names]
    server = Server("", folder / "log", "--min-model-turn", "0", *flags, command=command)
    try:
        server.wait_ready()
        yield server
    finally:
        left = descendants(server.process.pid)
        server.close()
        wait_until(lambda: not any(alive(pid) for pid in left), "the end of the models' processes")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models that are loaded together, and one that can't be."""
    with pool(tmp_path_factory.mktemp("pool"), "a,b,broken", "--max-loaded-models", "2", "--api-key", "KEY") as server:
        server.http.headers["Authorization"] = "Bearer KEY"
        yield server
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()


@pytest.fixture
def client(both: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="KEY", max_retries=0) as client:
        yield client


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def chat(model: str, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": HELLO, "max_tokens": tokens, **fields}


def states(server: Server) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.http.get("/v1/models").json()["data"]}


def processes(server: Server) -> list[int]:
    """The models' processes."""
    return [pid for pid in descendants(server.process.pid) if b"child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_requests_reach_the_model_that_they_name(client: openai.OpenAI, both: Server) -> None:
    for name in ("a", "b", "a"):
        answer = client.chat.completions.create(**chat(name))
        assert (answer.model, answer.choices[0].finish_reason) == (name, "length")
    assert {model.id for model in client.models.list()} == {"a", "b", "broken"}
    loaded = states(both)
    assert (loaded["a"], loaded["b"]) == ("loaded", "loaded")
    assert client.models.retrieve("b").model_dump()["max_model_len"] == 100_000
    assert both.http.get("/health").json()["models"]["a"] == {"state": "loaded"}
    assert both.http.get("/load").json() == {"server_load": 0}


def test_headers_and_ids_pass_through(both: Server) -> None:
    named = both.http.post("/v1/chat/completions", json=chat("a"), headers={"X-Request-Id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert named.json()["id"] == "chatcmpl-mine"
    unnamed = both.http.post("/v1/chat/completions", json=chat("a"))
    assert unnamed.json()["id"].endswith(unnamed.headers["x-request-id"])
    load = both.http.post("/v1/chat/completions", json=chat("a"), headers={"endpoint-load-metrics-format": "TEXT"})
    assert load.headers["endpoint-load-metrics"].startswith("TEXT ")


def test_errors_have_each_api_s_form(client: openai.OpenAI, both: Server) -> None:
    with pytest.raises(openai.NotFoundError, match=r"The model `c` does not exist\. This server serves `a`, `b`"):
        client.chat.completions.create(**chat("c"))
    with (
        anthropic.Anthropic(base_url=both.url, api_key="KEY", max_retries=0) as other,
        pytest.raises(anthropic.NotFoundError) as caught,
    ):
        other.messages.create(model="c", messages=HELLO, max_tokens=4)
    assert json.loads(caught.value.response.text)["error"]["type"] == "not_found_error"
    unnamed = both.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    assert "serves several models: `a`, `b`" in unnamed.json()["error"]["message"]
    wrong = both.http.post("/v1/chat/completions", json={"model": 7, "messages": HELLO})
    assert wrong.json()["error"]["message"].startswith("model must be a string")
    invalid = both.http.post("/v1/chat/completions", content=b'{"model": "a",', headers={"content-type": "text/json"})
    assert invalid.status_code == 415
    keyless = httpx.post(f"{both.url}/v1/chat/completions", json=chat("a"))
    assert keyless.status_code == 401
    refused = both.http.post("/v1/chat/completions", json=chat("a", temperature=-1))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert both.http.get("/tokenizer_info").status_code == 404


def test_a_model_that_cannot_be_loaded_says_why_and_harms_no_other(client: openai.OpenAI, both: Server) -> None:
    with pytest.raises(openai.InternalServerError, match="The weights take too much") as caught:
        client.chat.completions.create(**chat("broken"))
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert "The weights take too much" in both.http.get("/health").json()["models"]["broken"]["reason"]
    assert client.chat.completions.create(**chat("a")).model == "a"


def test_streams_arrive_while_they_are_made_and_end_when_nobody_reads(client: openai.OpenAI, both: Server) -> None:
    stream = client.chat.completions.create(**chat("a", 90_000), stream=True)
    assert next(iter(stream)).model == "a"
    assert both.metric("octavo:pool_requests_running", model_name="a") == 1
    stream.close()
    wait_until(lambda: both.metric("octavo:num_requests_running", model_name="a") == 0, "the end of the request")
    wait_until(lambda: both.metric("octavo:pool_requests_running", model_name="a") == 0, "the end of its lease")


def test_metrics_have_each_family_once(both: Server, client: openai.OpenAI) -> None:
    together(lambda name: client.chat.completions.create(**chat(name)), ["a", "b"])
    text = both.http.get("/metrics").text
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    names = [family.name for family in text_string_to_metric_families(text)]
    assert {"octavo:pool_loads", "octavo:request_success", "process_cpu_seconds"} <= set(names)
    for model in ("a", "b"):
        assert both.metric("octavo:pool_model_state", model_name=model, state="loaded") == 1
        assert both.metric("octavo:generation_tokens_total", model_name=model, engine="0") > 0


def test_forms_are_routed_by_their_field(both: Server) -> None:
    def post(model: str) -> httpx.Response:
        file = {"file": ("a.wav", b"RIFF" * 50_000)}
        return both.http.post("/v1/audio/transcriptions", files=file, data={"model": model})

    assert "The model `c` does not exist" in post("c").json()["error"]["message"]
    assert "There is no POST /v1/audio/transcriptions here" in post("a").json()["error"]["message"]


def test_stored_responses_are_found_in_the_process_that_made_them(client: openai.OpenAI) -> None:
    made = [client.responses.create(model=name, input="Hello", max_output_tokens=16) for name in ("a", "b")]
    for response, name in zip(made, ("a", "b"), strict=True):
        assert client.responses.retrieve(response.id).model == name
    client.responses.delete(made[1].id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made[1].id)


def test_one_socket_asks_several_models(both: Server) -> None:
    with connect(f"ws://127.0.0.1:{both.port}/v1/stream", additional_headers={"Authorization": "Bearer KEY"}) as socket:
        for name in ("a", "b", "c"):
            socket.send(json.dumps({"type": "request", "id": name, "body": chat(name)}))
        socket.send(json.dumps({"type": "request", "id": "long", "body": chat("a", 90_000)}))
        ends: dict[str, str] = {}
        models: dict[str, str] = {}
        while len(ends) < 4:
            message = json.loads(socket.recv(timeout=60))
            if message["type"] == "chunk":
                models[message["id"]] = message["chunk"]["model"]
                if message["id"] == "long" and message["chunk"]["choices"][0]["delta"].get("content"):
                    socket.send(json.dumps({"type": "cancel", "id": "long"}))
            else:
                ends[message["id"]] = message["type"]
    assert ends == {"a": "done", "b": "done", "c": "error", "long": "cancelled"}
    assert (models["a"], models["b"]) == ("a", "b")


def test_a_batch_may_name_several_models(client: openai.OpenAI) -> None:
    url = "/v1/chat/completions"
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": chat(name)} for name in ("a", "b", "c")]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end")
    ended = client.batches.retrieve(batch.id)
    assert ended.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    assert [one["response"]["body"]["model"] for one in found] == ["a", "b"]
    assert ended.request_counts is not None
    assert ended.request_counts.failed == 1


def test_ollama_s_clients_see_all_models(both: Server, client: openai.OpenAI) -> None:
    client.chat.completions.create(**chat("a"))
    answer = both.http.post(
        "/api/chat", json={"model": "a:latest", "messages": HELLO, "stream": False, "options": {"num_predict": 4}}
    )
    assert answer.json()["done"]
    assert [one["name"] for one in both.http.get("/api/tags").json()["models"]] == ["a", "b", "broken"]
    assert "a" in {one["name"] for one in both.http.get("/api/ps").json()["models"]}
    assert both.http.get("/api/version").json()["version"]
    unknown = both.http.post("/api/chat", json={"model": "c", "messages": HELLO})
    assert unknown.json()["error"].startswith("The model `c` does not exist")


def test_a_killed_process_costs_its_requests_and_is_started_again(client: openai.OpenAI, both: Server) -> None:
    client.chat.completions.create(**chat("b"))
    client.chat.completions.create(**chat("a"))
    with both.http.stream("POST", "/v1/chat/completions", json=chat("a", 90_000, stream=True)) as stream:
        lines = stream.iter_lines()
        next(lines)
        pids = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes(both)}
        running = [pid for pid in pids if model_of(both, pid) == "a"]
        os.kill(running[0], signal.SIGKILL)
        told = [line for line in lines if "error" in line]
    assert "was killed by SIGKILL" in told[0]
    assert "was killed by SIGKILL" in both.http.get("/health").json()["models"]["a"]["reason"]
    assert client.chat.completions.create(**chat("b")).model == "b"
    assert client.chat.completions.create(**chat("a")).model == "a"
    assert both.http.get("/health").json()["models"]["a"] == {"state": "loaded"}


def model_of(server: Server, pid: int) -> str:
    """The model of a process, by the metrics of its engine's process."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    starts = {
        sample.value: sample.labels.get("model_name", "")
        for family in families
        for sample in family.samples
        if sample.name == "process_start_time_seconds"
    }
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")).split()[1]
    began = int(boot) + ticks / os.sysconf("SC_CLK_TCK")
    return starts[min(starts, key=lambda at: abs(at - began))]


def test_one_seat_is_exchanged_and_no_answer_is_cut(tmp_path: Path) -> None:
    with pool(tmp_path, "a,b", step_s=0.01) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(**chat("a", 100), stream=True)
        chunks = iter(stream)
        next(chunks)
        with httpx.Client(base_url=server.url, timeout=120) as other:
            answers = together(
                lambda ask: ask(),
                [
                    lambda: other.post("/v1/chat/completions", json=chat("b")).json(),
                    lambda: list(chunks)[-1].choices[0].finish_reason,
                ],
            )
        assert answers[0]["model"] == "b"
        assert answers[1] == "length"
        assert states(server) == {"a": "unloaded", "b": "loaded"}
        assert len(processes(server)) == 1
        assert client.chat.completions.create(**chat("a")).model == "a"
        assert server.metric("octavo:pool_loads_total", model_name="a") == 2
        assert server.metric("octavo:pool_evictions_total", model_name="a") == 1
        client.close()
        left = descendants(server.process.pid)
        assert server.stop() == 0
        assert not any(alive(pid) for pid in left)
        assert "Traceback" not in server.output(), server.output()


@pytest.mark.slow
def test_a_stop_lets_answers_finish_and_aborts_what_takes_longer(tmp_path: Path) -> None:
    with pool(tmp_path, "a,b", "--shutdown-timeout", "1", step_s=0.01) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = iter(client.chat.completions.create(**chat("a", 90_000), stream=True))
        next(stream)
        left = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "abort"
        assert server.process.wait(60) == 0
        assert not any(alive(pid) for pid in left)
        client.close()


@pytest.mark.slow
def test_a_killed_front_process_leaves_none_behind(tmp_path: Path) -> None:
    with pool(tmp_path, "a,b", "--max-loaded-models", "2", "--preload-models") as server:
        wait_until(lambda: set(states(server).values()) == {"loaded"}, "both models")
        left = processes(server)
        assert len(left) == 2
        server.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in left), "the end of the models' processes")


@pytest.mark.slow
def test_requests_wait_only_so_long(tmp_path: Path) -> None:
    with pool(tmp_path, "a,b", "--model-wait-timeout", "3", "--preload-models", step_s=0.01) as server:
        wait_until(lambda: states(server)["a"] == "loaded", "the first model")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(**chat("a", 90_000), stream=True)
        next(iter(stream))
        late = server.http.post("/v1/chat/completions", json=chat("b"))
        assert (late.status_code, "--model-wait-timeout" in late.json()["error"]["message"]) == (503, True)
        assert int(late.headers["retry-after"]) >= 10
        stream.close()
        client.close()


@pytest.mark.slow
def test_real_models_take_turns_and_sleep(smollm2_files: ModelFiles, minilm_files: ModelFiles, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        f"chat: {{model: {smollm2_files.path}, served-model-name: other, max-model-len: 1024}}\n"
        f"embed: {minilm_files.path}\n"
    )
    flags = ("--models", str(models), "--model-eviction", "sleep", "--threads", "1", "--min-model-turn", "0")
    port = free_port()
    command = [*serve_command(*flags), "--port", str(port), "--kv-cache-memory-bytes", "64M"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    france: Any = [{"role": "user", "content": "What is the capital of France?"}]
    try:
        wait_until(lambda: b"The server is ready" in log.read_bytes(), "the server's start")
        answers = []
        for _ in range(2):
            answer = client.chat.completions.create(model="other", messages=france, temperature=0, max_tokens=16)
            answers.append(answer.choices[0].message.content or "")
            assert len(client.embeddings.create(model="embed", input="Hello").data[0].embedding) == 384
        assert "Paris" in answers[0]
        assert answers[0] == answers[1]
        told = log.read_text()
        assert "chat fell asleep in" in told
        assert "chat woke up in" in told
        assert "embed can't sleep and is stopped" in told
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        client.close()
        process.kill()
        process.wait()
