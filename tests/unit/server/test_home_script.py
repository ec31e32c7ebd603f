"""How the page at / reads streams, in Node.js: its script by itself, on every way in which a stream can be cut."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import octavo

SCRIPT = Path(octavo.__file__).parent / "server" / "routes" / "home_stream.js"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js on this machine to run the page's script")

READ = """
const pieces = (bytes, size) => Array.from({length: Math.ceil(bytes.length / size)},
  (_, place) => bytes.subarray(place * size, (place + 1) * size));
async function read(pieces) {
  const body = new ReadableStream({start(out) { pieces.forEach((one) => out.enqueue(one)); out.close(); }});
  const got = [];
  try {
    for await (const chunk of chunksOf(new Response(body))) got.push(chunk);
  } catch (error) {
    got.push({threw: error.message});
  }
  return got;
}
"""


def run(code: str, given: Any) -> Any:
    """What `code`, the body of an async function of `given`, returns."""
    whole = f"{SCRIPT.read_text()}{READ}(async (given) => {{{code}}})({json.dumps(given)})"
    whole += ".then((value) => console.log(JSON.stringify(value)))"
    done = subprocess.run([str(NODE), "-"], input=whole, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CHUNKS = [{"n": 1}, {"text": "né 🙂\u2028 a\r\nb \\ data: x"}, {"text": "data: [DONE]"}, {"n": 4}]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_however_a_stream_is_cut_its_chunks_are_the_same(end: str) -> None:
    data = [json.dumps(chunk, ensure_ascii=False) for chunk in CHUNKS]
    lines = [": keep-alive", "", f"data: {data[0]}", "", f"data:{data[1]}", "id: 7", "", "event: x", f"data: {data[2]}"]
    # The last chunk is on two lines, which are one text with a line break between them.
    lines += ["", ": keep-alive", "", 'data: {"n":', "data: 4}", "", "data: [DONE]", "", "data: after the end", ""]
    text = "".join(line + end for line in lines)
    code = """
    const bytes = new TextEncoder().encode(given), found = [];
    for (let cut = 0; cut <= bytes.length; cut++) found.push(await read([bytes.subarray(0, cut), bytes.subarray(cut)]));
    for (const size of [1, 2, 3, 5, 7]) found.push(await read(pieces(bytes, size)));
    return [...new Set(found.map((one) => JSON.stringify(one)))].map((one) => JSON.parse(one));
    """
    assert run(code, text) == [CHUNKS]


def test_an_error_in_the_middle_is_thrown_with_its_words() -> None:
    text = 'data: {"n": 1}\n\ndata: {"error": {"message": "It <broke>.", "code": 500}}\n\ndata: [DONE]\n\n'
    assert run("return read([new TextEncoder().encode(given)])", text) == [{"n": 1}, {"threw": "It <broke>."}]


@pytest.mark.parametrize("text", ["", 'data: {"n": 1}\n\n', 'data: {"n": 1}\n\ndata: [DONE]'])
def test_a_stream_without_its_end_is_an_error(text: str) -> None:
    *before, last = run("return read([new TextEncoder().encode(given)])", text)
    assert last == {"threw": "The connection ended before the answer did."}
    assert before == [{"n": 1}] * bool(text)


def test_a_message_has_its_images_before_its_text() -> None:
    code = "return given.map(([text, images]) => contentOf(text, images))"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    data = image["image_url"]["url"]  # type: ignore[index]
    assert run(code, [["What?", []], ["What?", [data, data]], [" ", [data]]]) == [
        "What?",
        [image, image, {"type": "text", "text": "What?"}],
        [image],
    ]


def test_a_message_has_videos_and_audio_as_parts_of_their_own_types() -> None:
    video, audio = "data:video/mp4;base64,AA", "data:audio/wav;base64,AA"
    assert run("return contentOf(...given)", ["", [video, audio]]) == [
        {"type": "video_url", "video_url": {"url": video}},
        {"type": "audio_url", "audio_url": {"url": audio}},
    ]


def test_refusals_are_told_as_they_are() -> None:
    error = json.dumps({"error": {"message": "temperature must be non-negative.", "code": 400}})
    code = """
    const [error, page] = given;
    return [await complaintOf(new Response(error, {status: 400})),
      await complaintOf(new Response(page, {status: 502, statusText: "Bad Gateway"}))];
    """
    page = "<html>a proxy's own</html>"
    assert run(code, [error, page]) == ["temperature must be non-negative.", f"502 Bad Gateway {page}"]
