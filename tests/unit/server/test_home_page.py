"""GET /: what browsers and programs get, what the page may do, and what it says where there is no chat."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, get_now, make_house, saying

import octavo
from octavo.config import ServerConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.no_tokenizer import NoTokenizer

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PACKAGE = Path(octavo.__file__).parent


def page_of(app: Any, path: str = "/") -> tuple[str, dict[str, str]]:
    answer = get_now(app, path, headers=BROWSER)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.body.decode(), answer.headers


def page(path: str = "/", **config: Any) -> tuple[str, dict[str, str]]:
    return page_of(make_house(saying("x"), ServerConfig(**config)).app, path)


def script() -> str:
    (text,) = re.findall(r"<script>(.*?)</script>", page()[0], re.DOTALL)
    return str(text)


def hidden(text: str) -> set[str]:
    """The ids of what the page does not show at first."""
    return {one for tag in re.findall(r"<[^>]* hidden[^>]*>", text) for one in re.findall(r'id="(\w+)"', tag)}


def test_programs_get_json() -> None:
    app = make_house(saying("x"), ServerConfig(api_keys=("k",), served_model_name=("<b>",))).app
    answer = get_now(app, "/")
    assert answer.headers["vary"] == "Accept"
    assert answer.json()["model"] == "<b>"
    assert "curl http://test/v1/chat/completions" in answer.json()["try"]
    assert "Authorization" in answer.json()["try"]


def test_only_its_own_script_and_style_run() -> None:
    text, headers = page()
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == policy.pop("form-action") == policy.pop("frame-ancestors") == "'none'"
    assert policy.pop("connect-src") == policy.pop("base-uri") == "'self'"
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert not policy
    # The policy would keep these from working.
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", text)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["vary"] == "Accept"


def test_it_needs_nothing_from_elsewhere() -> None:
    text, _ = page()
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://test"}  # the server, in the command to copy
    assert not re.findall(r"\bsrc=|@import|\bimport\b|url\(", text)


def test_nothing_can_be_attached_where_the_model_reads_only_text() -> None:
    text, headers = page()
    assert {"attach", "attached", "files"} <= hidden(text)
    assert "img-src" not in headers["content-security-policy"]


def test_answers_stay_texts() -> None:
    """No markup is ever made of what a model or server has written, and this tab's memory is all that has it."""
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script())
    assert not re.findall(r"localStorage|indexedDB|document\.cookie", script())
    assert re.findall(r"setItem\((\w+), (\w+)\)", script()) == [("KEY", "key")]


def test_what_the_script_asks_for_is_there() -> None:
    text, _ = page()
    ids = re.findall(r'\bid="(\w+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("(\w+)"\)', script())) <= set(ids)
    app = make_house(saying("x")).app
    asked = re.findall(r'(?:fetch|ask)\("([\w/]+)"', script())
    assert sorted(asked) == ["health", "v1/chat/completions", "v1/models"]
    for path in asked:
        assert get_now(app, f"/{path}").status in (200, 405)
    fields = re.findall(r'<(?:input|textarea) id="(\w+)"', text)
    for field in fields:
        assert f'for="{field}"' in text or re.search(rf'<label>[^<]*<\w+ id="{field}"', text), f"no label for {field}"


@pytest.mark.parametrize("name", ['"><script>alert(1)</script>', "</title><b>", "a'b&c", "$style", "${script}"])
def test_the_models_name_is_a_text(name: str) -> None:
    text, _ = page(served_model_name=(name,))
    plain, _ = page(served_model_name=("toy",))
    assert text.count("<") == plain.count("<")
    (shown,) = re.findall(r'<span id="model">(.*?)</span>', text)
    (told,) = re.findall(r'data-model="(.*?)"', text)
    assert unescape(shown) == unescape(told) == name


def test_a_host_header_is_a_text() -> None:
    answer = get_now(make_house(saying("x")).app, "/", headers={**BROWSER, "host": "<script>alert(1)</script>"})
    assert b"<script>alert" not in answer.body


def test_links_hold_wherever_a_proxy_has_put_it() -> None:
    for path in ("/", "/api/"):
        text, _ = page(path, root_path="/api")
        assert '<base href="/api/">' in text
        assert "curl http://test/api/v1/chat/completions" in unescape(text)
    text, _ = page()
    assert '<base href="./">' in text
    links = re.findall(r'<a href="([^"]*)"', text)
    assert links == ["docs", "openapi.json", "v1/models", "health", "metrics", "version"]


def test_it_is_open_and_asks_for_the_key_only_when_the_server_does() -> None:
    app = make_house(saying("x"), ServerConfig(api_keys=("secret-key",))).app
    text, _ = page_of(app)
    assert "secret-key" not in text
    assert "unlock" in hidden(text)
    assert get_now(app, "/v1/models").status == 401


def test_it_is_left_out_with_the_other_pages() -> None:
    app = make_house(saying("x"), ServerConfig(enable_docs=False)).app
    answer = get_now(app, "/", headers=BROWSER)
    assert answer.headers["content-type"] == "application/json"
    assert "/docs" not in answer.json()["links"]


def test_a_model_that_chats_is_offered_for_it() -> None:
    text, _ = page()
    assert "notice" in hidden(text)
    assert not hidden(text) & {"compose", "new"}
    assert '<details id="api" >' in text


@pytest.mark.parametrize(
    ("frontend", "says", "curl"),
    [
        ({"chat": None}, "--chat-template FILE", '/v1/completions -H .* "prompt": "'),
        ({"tasks": ["embed", "token_embed"]}, "makes embeddings", "/v1/embeddings "),
        (
            {"tokenizer": NoTokenizer(VOCAB_SIZE), "chat": None},
            "--skip-tokenizer-init",
            r"/v1/completions .*\[1, 2, 3\]",
        ),
    ],
    ids=["no template", "embeddings", "no tokenizer"],
)
def test_where_there_is_no_chat_it_says_what_to_do(frontend: dict[str, Any], says: str, curl: str) -> None:
    given = {"chat": ChatTemplate("{{ messages }}", TOKENIZER), "tokenizer": TOKENIZER, **frontend}
    info = fake_info(name="toy", vocab_size=VOCAB_SIZE, tasks=given.pop("tasks", ["generate"]))
    engine = FakeEngine(saying("x"), info=info)
    text, _ = page_of(create_app(Frontend(engine, given["tokenizer"], info, chat=given["chat"])))
    (notice,) = re.findall(r'<p id="notice" >(.*?)</p>', text)
    assert says in unescape(notice)
    assert hidden(text) >= {"compose", "new"}
    assert '<details id="api" open>' in text
    assert re.search(curl, unescape(text))


def test_wheels_contain_all_its_parts() -> None:
    """And all else in the package that is not Python."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    globs = settings["tool"]["setuptools"]["package-data"]["octavo"]
    packed = {path for pattern in globs for path in PACKAGE.glob(pattern)}
    there = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {"home.html", "home.css", "home.js", "home_stream.js"} <= {path.name for path in packed}
    assert {path for path in there if path.suffix != ".py"} == packed
