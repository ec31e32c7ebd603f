"""A tiny model with videos behind a real server, asked by OpenAI's client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openai
import pytest
from image_kit import data_url as image_url
from image_kit import picture
from media_kit import served
from serving import Server, together
from video_kit import Made, data_url, film, gif, jpegs, make, mp4

from octavo.features.media.video.decode import decoded_video
from octavo.features.media.video.video import Limits

pytestmark = pytest.mark.e2e
GREEDY: dict[str, Any] = {"model": "smollm2", "max_tokens": 6, "temperature": 0}
IGNORES = {"ignore_eos": True}
FILM = film(12, 40, 32)
FILE = mp4(FILM, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("qwen2.5-vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/film.mp4" else 404)
            self.end_headers()
            self.wfile.write(FILE)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (
        *("--allowed-media-domains", "127.0.0.1", "--max-video-frames", "100"),
        *("--max-image-pixels", "10000", "--limit-mm-per-prompt", '{"image": 2, "video": 2}'),
    )
    with served(made.folder, tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def messages(*urls: str) -> list[Any]:
    parts = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "see "}, *parts, {"type": "text", "text": "?"}]}]


def asked(client: openai.OpenAI, *urls: str, **more: Any) -> tuple[int, str]:
    answer = client.chat.completions.create(messages=messages(*urls), extra_body=IGNORES | more, **GREEDY)
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.choices[0].message.content or ""


def expected(made: Made, **sampling: Any) -> tuple[int, str]:
    """Prompt tokens and text, by Transformers, of the frames as the file has them."""
    video = decoded_video(FILE, Limits(100, 60.0, 10**6, 10**9), "it")
    frames = np.stack([np.asarray(image) for image in video.read(range(video.count))])
    text = "<s>user: see VIDEO?</s><s>assistant: "
    tokens, found, _ = made.generated(text, [frames], 4.0, sampling or {"fps": 2.0}, 6)
    return len(tokens), made.processor.tokenizer.decode(found, skip_special_tokens=True)


def test_a_file_as_a_data_url_and_from_a_host(client: openai.OpenAI, host: str, made: Made) -> None:
    wanted = expected(made)
    assert asked(client, data_url(FILE)) == wanted
    assert asked(client, f"{host}/film.mp4") == wanted


def test_sampling_in_both_forms(client: openai.OpenAI, made: Made) -> None:
    wanted = expected(made, num_frames=4)
    assert asked(client, data_url(FILE), mm_processor_kwargs={"num_frames": 4}) == wanted
    assert asked(client, data_url(FILE), media_io_kwargs={"video": {"num_frames": 4}}) == wanted
    assert wanted[0] < expected(made)[0]


def test_frames_as_jpeg_and_animations(client: openai.OpenAI) -> None:
    tokens, text = asked(client, jpegs(FILM[:4]))
    assert text
    assert asked(client, data_url(gif(FILM, 500), "image/gif"))[0] > tokens


def test_beside_an_image(client: openai.OpenAI) -> None:
    content = [*messages(data_url(FILE))[0]["content"]]
    content.append({"type": "image_url", "image_url": {"url": image_url(picture(40, 31))}})
    answer = client.chat.completions.create(messages=[{"role": "user", "content": content}], **GREEDY)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > asked(client, data_url(FILE))[0]


@pytest.mark.parametrize(
    ("url", "more", "says"),
    [
        (data_url(FILE[:400]), {}, "is a damaged video"),
        (data_url(b"no video at all"), {}, "is not video: its 15 bytes"),
        ("http://10.0.0.1/film.mp4", {}, "and not from 10.0.0.1"),
        (data_url(mp4(film(4, 200, 60), 4)), {}, "has 12,000 pixels in a frame; video may have 10,000"),
        (data_url(mp4(film(101, 16, 16), 25)), {}, r"has 101 frames; video may have 100 \(--max-video-frames\)"),
        (data_url(FILE), {"mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps must be a number"),
        (data_url(mp4(film(99, 90, 90), 2)), {}, r"has [\d,]+ tokens .* and the context has room for"),
    ],
)
def test_what_can_not_be_read_is_refused(client: openai.OpenAI, url: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        asked(client, url, **more)


def test_fields_without_effect(client: openai.OpenAI) -> None:
    for more in ({"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {"fps": 1}}}):
        with pytest.raises(openai.BadRequestError, match="has no effect: it says how videos are read"):
            client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], extra_body=more, **GREEDY)
    with pytest.raises(openai.BadRequestError, match=r"At most 2 video\(s\)"):
        asked(client, *[jpegs(FILM[:2])] * 3)


def test_a_bad_video_harms_no_other_request(client: openai.OpenAI, made: Made) -> None:
    def ask(number: int) -> str:
        try:
            return asked(client, data_url(FILE[:500] if number % 3 == 1 else FILE))[1]
        except openai.BadRequestError:
            return "refused"

    text = expected(made)[1]
    assert together(ask, range(9)) == ["refused" if number % 3 == 1 else text for number in range(9)]


def test_a_video_that_is_sent_again_is_not_encoded_again(client: openai.OpenAI, server: Server) -> None:
    asked(client, data_url(FILE))
    encoded = server.metric("octavo:images_encoded_total")
    asked(client, data_url(FILE), cache_salt="another tenant")
    assert server.metric("octavo:images_encoded_total") == encoded
