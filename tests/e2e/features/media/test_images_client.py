"""A tiny model with images behind a real server, asked by OpenAI's and Anthropic's clients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import openai
import pytest
from image_kit import Made, data_url, make, picture
from media_kit import served
from serving import Server, together

pytestmark = pytest.mark.e2e
GREEDY: dict[str, Any] = {"model": "smollm2", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
IMAGE = picture(40, 31)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("smolvlm", tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A host of images. `/away` redirects to another name of this machine."""
    file = tmp_path_factory.mktemp("host") / "image.png"
    IMAGE.save(file)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{self.server.server_port}/image.png")  # type: ignore[attr-defined]
                self.end_headers()
                return
            self.send_response(200 if self.path == "/image.png" else 404)
            self.end_headers()
            self.wfile.write(file.read_bytes())

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = tmp_path_factory.mktemp("files")
    IMAGE.save(files / "image.png")
    flags = (
        *("--allowed-media-domains", "127.0.0.1", "--allowed-local-media-path", str(files)),
        *("--max-image-pixels", "10000", "--limit-mm-per-prompt", '{"image": 3}'),
    )
    with served(made.folder, tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def messages(*urls: str, **more: Any) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "see "}, *parts, {"type": "text", "text": "?"}]}]


@functools.cache
def expected(made: Made) -> tuple[int, str]:
    """Prompt tokens and text, by Transformers."""
    tokens, found = made.generated("<s>user: see IMAGE?</s><s>assistant: ", [IMAGE], 6)
    return len(tokens), made.processor.tokenizer.decode(found, skip_special_tokens=True)


def test_a_data_url(client: openai.OpenAI, made: Made) -> None:
    answer = client.chat.completions.create(messages=messages(data_url(IMAGE)), **GREEDY)
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == expected(made)


def test_streamed(client: openai.OpenAI, made: Made) -> None:
    stream = client.chat.completions.create(messages=messages(data_url(IMAGE)), stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected(made)[1]


def test_the_responses_api(client: openai.OpenAI, made: Made) -> None:
    content = [
        {"type": "input_text", "text": "see "},
        {"type": "input_image", "image_url": data_url(IMAGE), "detail": "auto"},
        {"type": "input_text", "text": "?"},
    ]
    answer = client.responses.create(
        model="smollm2",
        input=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        max_output_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert (answer.usage.input_tokens, answer.output_text) == expected(made)


def test_the_messages_api(server: Server, made: Made) -> None:
    data = data_url(IMAGE).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: list[Any] = [
        {"type": "text", "text": "see "},
        {"type": "image", "source": source},
        {"type": "text", "text": "?"},
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        asked = {"model": "smollm2", "messages": [{"role": "user", "content": content}]}
        more = {"ignore_eos": True, "temperature": 0}
        answer = client.messages.create(max_tokens=6, extra_body=more, **asked)  # type: ignore[arg-type]
        counted = client.messages.count_tokens(**asked)  # type: ignore[arg-type]
    used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert (used, answer.content[0].text) == expected(made)  # type: ignore[union-attr]
    assert counted.input_tokens == expected(made)[0]


def test_errors_of_the_responses_api_name_its_fields(client: openai.OpenAI) -> None:
    """With instructions the chat has a message before them, and items of calls and reasoning are merged."""
    broken = {"type": "input_image", "image_url": "data:image/png;base64,?", "detail": "auto"}
    given: list[Any] = [
        {"role": "user", "content": "call it"},
        {"type": "function_call", "call_id": "1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "seen"},
        {"role": "user", "content": [{"type": "input_text", "text": "see "}, broken]},
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="smollm2", instructions="Be brief.", input=given, max_output_tokens=2)
    assert caught.value.param == "input.3.content.1.image_url"  # type: ignore[union-attr]
    assert "input.3.content.1.image_url is not valid base64" in caught.value.message
    assert "messages" not in caught.value.message
    odd: list[Any] = [{"role": "user", "content": [broken | {"image_url": data_url(IMAGE), "detail": "huge"}]}]
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0\.image_url: detail must be") as caught:
        client.responses.create(model="smollm2", input=odd, max_output_tokens=2)


def test_errors_of_the_messages_api_name_its_fields(server: Server) -> None:
    """Results of tools are messages of their own in the chat, as is the system's text."""
    broken = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}}
    far = {"type": "image", "source": {"type": "url", "url": "ftp://far/away.png"}}
    call = {"type": "tool_use", "id": "1", "name": "see", "input": {}}
    start: list[Any] = [{"role": "user", "content": "call it"}, {"role": "assistant", "content": [call]}]
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 2, "system": "Be brief."}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        result = {"type": "tool_result", "tool_use_id": "1", "content": "seen"}
        for block, field in ((broken, "source.data"), (far, "source.url")):
            with pytest.raises(anthropic.BadRequestError) as caught:
                client.messages.create(messages=[*start, {"role": "user", "content": [result, block]}], **asked)
            assert f"messages.2.content.1.{field}" in caught.value.message
            assert "image_url" not in caught.value.message


def test_urls_of_hosts_and_files(client: openai.OpenAI, host: str, server: Server, made: Made) -> None:
    answer = client.chat.completions.create(messages=messages(f"{host}/image.png"), **GREEDY)
    assert answer.choices[0].message.content == expected(made)[1]
    files = server.process.args[server.process.args.index("--allowed-local-media-path") + 1]  # type: ignore[union-attr,index]
    answer = client.chat.completions.create(messages=messages(f"file://{files}/image.png"), **GREEDY)
    assert answer.choices[0].message.content == expected(made)[1]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,bm8gaW1hZ2U=", "is not an image: its 8 bytes"),
        ("data:image/png;base64,?", "is not valid base64"),
        ("HOST/missing.png", "the host answered 404"),
        ("HOST/away", "--allowed-media-domains.*, and not from localhost"),
        ("http://10.0.0.1/image.png", "and not from 10.0.0.1"),
        ("file:///etc/passwd", "must name a file in the folder of --allowed-local-media-path"),
        ("ftp://127.0.0.1/image.png", "must be a URL that begins with data:, http:, https: or file:"),
        ("LARGE", "has 200 x 60 pixels; images may have 10,000"),
    ],
)
def test_what_can_not_be_read_is_refused(client: openai.OpenAI, host: str, url: str, says: str) -> None:
    large = data_url(picture(200, 60)) if url == "LARGE" else ""
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.chat.completions.create(messages=messages(large or url.replace("HOST", host)), **GREEDY)
    assert caught.value.param == "messages.0.content.1.image_url.url"


def test_a_bad_image_harms_no_other_request(client: openai.OpenAI, made: Made) -> None:
    def ask(number: int) -> str:
        url = "data:image/png;base64,aGk=" if number % 3 == 1 else data_url(IMAGE)
        try:
            answer = client.chat.completions.create(messages=messages(url), **GREEDY)
        except openai.BadRequestError:
            return "refused"
        return answer.choices[0].message.content or ""

    found = together(ask, range(9))
    assert found == ["refused" if number % 3 == 1 else expected(made)[1] for number in range(9)]


def test_limits_and_other_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"At most 3 image\(s\)"):
        client.chat.completions.create(messages=messages(*[data_url(IMAGE)] * 4), **GREEDY)
    with pytest.raises(openai.BadRequestError, match="detail must be auto, low or high"):
        client.chat.completions.create(messages=messages(data_url(IMAGE), detail="best"), **GREEDY)
    sound: list[Any] = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
    with pytest.raises(openai.BadRequestError, match="is audio, and this model reads images"):
        client.chat.completions.create(messages=[{"role": "user", "content": sound}], **GREEDY)


def test_detail_low_takes_fewer_tokens(client: openai.OpenAI, made: Made) -> None:
    answer = client.chat.completions.create(messages=messages(data_url(IMAGE), detail="low"), **GREEDY)
    assert answer.usage.prompt_tokens < expected(made)[0]


def test_an_image_that_is_sent_again_is_not_encoded_again(client: openai.OpenAI, server: Server, made: Made) -> None:
    """Nor where its keys and values are not shared."""
    salted = GREEDY | {"extra_body": {"ignore_eos": True, "cache_salt": "another tenant"}}
    for asked in (GREEDY, salted):
        client.chat.completions.create(messages=messages(data_url(IMAGE)), **asked)
        encoded, found = (server.metric(f"octavo:{name}_total") for name in ("images_encoded", "mm_cache_hits"))
    assert encoded > 0
    assert found > 0
    again = GREEDY | {"extra_body": {"ignore_eos": True, "cache_salt": "a third one"}}
    client.chat.completions.create(messages=messages(data_url(IMAGE)), **again)
    assert server.metric("octavo:images_encoded_total") == encoded
    assert server.metric("octavo:mm_cache_hits_total") > found
