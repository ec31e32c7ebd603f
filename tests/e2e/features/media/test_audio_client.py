"""A tiny model with audio behind a real server, asked by OpenAI's client."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from audio_kit import Made, data_url, make, sound, wav
from media_kit import served
from serving import Server

pytestmark = pytest.mark.e2e
GREEDY: dict[str, Any] = {"model": "smollm2", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
SHORT: dict[str, Any] = {"model": "smollm2", "extra_body": {"max_completion_tokens": 6}}
SOUND = sound(1.3)
FILE = ("speech.wav", wav(SOUND))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("qwen3-asr", tmp_path_factory.mktemp("qwen3-asr"))


@pytest.fixture(scope="module")
def server(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = tmp_path_factory.mktemp("files")
    (files / "speech.wav").write_bytes(FILE[1])
    flags = (
        *("--allowed-local-media-path", str(files), "--max-audio-seconds", "5", "--max-audio-bytes", "512K"),
        *("--limit-mm-per-prompt", '{"audio": 2}'),
    )
    with served(made.folder, tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@functools.cache
def expected(made: Made, text: str) -> tuple[int, str]:
    """Prompt tokens and text, by Transformers."""
    tokens, found = made.generated(text, [SOUND], 6)
    return len(tokens), made.processor.tokenizer.decode(found, skip_special_tokens=True)


def messages(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "hear "}, *parts]}]


def part(data: bytes = FILE[1]) -> Any:
    given = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return {"type": "input_audio", "input_audio": given}


def test_chats(client: openai.OpenAI, server: Server, made: Made) -> None:
    told = expected(made, "<s>user: hear AUDIO</s><s>assistant: ")
    files = server.process.args[server.process.args.index("--allowed-local-media-path") + 1]  # type: ignore[union-attr,index]
    urls = [data_url(SOUND), f"file://{files}/speech.wav"]
    for one in (part(), *({"type": "audio_url", "audio_url": {"url": url}} for url in urls)):
        answer = client.chat.completions.create(messages=messages(one), **GREEDY)
        assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == told
    assert server.metric("octavo:audio_windows_encoded_total") == 1
    assert server.metric("octavo:audio_encode_seconds_total") > 0


def test_the_responses_api(client: openai.OpenAI, made: Made) -> None:
    content = [{"type": "input_text", "text": "hear "}, part()]
    answer = client.responses.create(
        model="smollm2",
        input=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        max_output_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    told = expected(made, "<s>user: hear AUDIO</s><s>assistant: ")
    assert (answer.usage.input_tokens, answer.output_text) == told


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        (part(b"no sound"), "input_audio.data", "is not audio: its 8 bytes"),
        (part(wav(sound(6.0))), "input_audio.data", "is 6.0 seconds long; audio may have 5"),
        (part(bytes(600_000)), "input_audio.data", "larger than 524,288 bytes .--max-audio-bytes"),
        ({"type": "input_audio", "input_audio": {"data": "?"}}, "input_audio.data", "is not valid base64"),
        ({"type": "input_audio", "input_audio": "x"}, "input_audio", "must be an object such as"),
        ({"type": "audio_url", "audio_url": {"url": "ftp://x"}}, "audio_url.url", "must be a URL that begins with"),
        ({"type": "audio_url", "audio_url": {"url": "http://10.0.0.1/a"}}, "audio_url.url", "not public"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url", "is image, and this model reads audio"),
    ],
)
def test_what_can_not_be_read_is_refused(client: openai.OpenAI, given: Any, field: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.chat.completions.create(messages=messages(given), **GREEDY)
    assert caught.value.param == f"messages.0.content.1.{field}"


def test_limits(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"At most 2 audio\(s\)"):
        client.chat.completions.create(messages=messages(part(), part(), part()), **GREEDY)


def test_transcriptions(client: openai.OpenAI, made: Made) -> None:
    count, text = expected(made, "<s>user: AUDIO</s><s>assistant: ")
    answer = client.audio.transcriptions.create(file=FILE, **SHORT)
    assert answer.text == text.strip()
    usage: Any = answer.usage
    assert (usage.type, usage.input_tokens, usage.output_tokens) == ("tokens", count, 6)
    details = usage.input_token_details
    assert (details.audio_tokens, details.text_tokens) == (17, count - 17)
    plain: Any = client.audio.transcriptions.create(file=FILE, response_format="text", **SHORT)
    assert plain.strip() == text.strip()


def test_a_language_and_a_prompt(client: openai.OpenAI, made: Made) -> None:
    _, text = expected(made, "<s>system: Octavo</s><s>user: AUDIO</s><s>assistant: language English<asr_text>")
    answer = client.audio.transcriptions.create(
        file=FILE, language="en", prompt="Octavo", response_format="verbose_json", **SHORT
    )
    assert answer.text == text.strip()
    assert (answer.language, answer.duration) == ("English", 1.3)
    usage: Any = answer.usage
    assert (usage.type, usage.seconds) == ("duration", 2)


def test_streamed(client: openai.OpenAI, made: Made) -> None:
    count, text = expected(made, "<s>user: AUDIO</s><s>assistant: language German<asr_text>")
    stream = client.audio.transcriptions.create(file=FILE, language="German", stream=True, **SHORT)
    *deltas, done = list(stream)
    assert len(deltas) > 1
    assert {one.type for one in deltas} == {"transcript.text.delta"}
    assert "".join(one.delta for one in deltas) == text  # type: ignore[union-attr]
    assert done.type == "transcript.text.done"
    assert (done.text, done.usage.input_tokens) == (text, count)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"response_format": "srt"}, "response_format", "needs timestamps"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "gives no timestamps"),
        ({"response_format": "x"}, "response_format", "must be one of json, text, verbose_json"),
        ({"stream": "maybe"}, "stream", "must be true or false"),
        ({"stream": "true", "response_format": "text"}, "stream", "events are JSON"),
        ({"temperature": "warm"}, "temperature", "must be a number"),
        ({"temperature": "-1"}, "temperature", "temperature"),
        ({"language": "tlh"}, "language", "is unknown to this model. It takes ar, cs"),
        ({"chunking_strategy": "auto"}, "chunking_strategy", "is not supported. The fields are file, "),
        ({"file": b"no sound"}, "file", "file is not audio"),
        ({"file": wav(sound(6.0))}, "file", "is 6.0 seconds long"),
        ({}, "file", "file is required"),
    ],
)
def test_forms_that_are_refused(server: Server, fields: dict[str, Any], field: str, says: str) -> None:
    data = fields.get("file", FILE[1] if fields else None)
    plain = {name: value for name, value in fields.items() if name != "file"}
    files = {"file": ("a.wav", data)} if data else {"other": ("a.wav", b"x")}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=plain, files=files)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert says in error["message"]


def test_other_refusals(server: Server, client: openai.OpenAI) -> None:
    url = f"{server.url}/v1/audio"
    assert httpx.post(f"{url}/transcriptions", json={}).status_code == 415
    large = httpx.post(f"{url}/transcriptions", files={"file": ("a.wav", bytes(700_000))})
    assert large.status_code == 413
    assert "--max-audio-bytes" in large.json()["error"]["message"]
    translated = httpx.post(f"{url}/translations", files={"file": FILE})
    assert translated.status_code == 404
    assert "This model transcribes only" in translated.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="speech is not supported by this version"):
        client.audio.speech.create(input="a", model="smollm2", voice="alloy")
    with pytest.raises(openai.NotFoundError, match="`other`"):
        client.audio.transcriptions.create(file=FILE, model="other")


@pytest.mark.slow
def test_translations(tmp_path: Path) -> None:
    """Of a model that translates, and has no chat template."""
    made = make("qwen2-audio", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    settings = ("--kv-cache-memory-bytes", "8M", "--max-model-len", "256", "--threads", "1", "--dtype", "float32")
    server = Server(str(made.folder), tmp_path / "log", *settings)
    samples = sound(0.9)
    try:
        server.wait_ready()
        form = {"max_completion_tokens": "6"}
        files = {"file": ("a.wav", wav(samples))}
        found = httpx.post(f"{server.url}/v1/audio/translations", data=form, files=files).json()
        text = "AUDIODetect the language and translate the speech into English:"
        told = made.processor.tokenizer.decode(made.generated(text, [samples], 6)[1], skip_special_tokens=True)
        assert found["text"] == told.strip()
        long = httpx.post(f"{server.url}/v1/audio/translations", files={"file": ("a.wav", wav(sound(1.2)))})
        assert long.status_code == 400
        assert "file is 1.2 seconds long, and the model takes 1; split it" in long.json()["error"]["message"]
    finally:
        server.close()
