"""An engine and a server without a tokenizer: token ids in and out, and a sentence for whoever wants text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, ask_now, saying
from toy_models import LLAMA

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.engine.fake import FakeEngine, fake_info
from octavo.hub.files import ModelFiles
from octavo.python_api.llm import LLM
from octavo.server.app import create_app
from octavo.text.frontend import Frontend
from octavo.text.model_text import load_text
from octavo.text.tokenizers.no_tokenizer import NoTokenizer

SAID = TOKENIZER.encode("Bonjour", add_special_tokens=False)
IDS = {"prompt": [5, 6, 7], "max_tokens": 7}
SAYS = "runs without a tokenizer"


@pytest.fixture(scope="module")
def app() -> Any:
    engine = FakeEngine(saying("Bonjour"), info=fake_info(name="toy", vocab_size=VOCAB_SIZE))
    return create_app(Frontend(engine, NoTokenizer(VOCAB_SIZE), engine.info))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory_bytes": 1 << 20}
    with LLM(str(folder), skip_tokenizer_init=True, threads=1, **settings) as made:
        yield made


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2, "prompt": [[5, 6], [7]]}, {"detokenize": False}])
def test_completions_of_ids_are_ids(app: Any, more: dict[str, Any]) -> None:
    answer = ask_now(app, "/v1/completions", IDS | more)
    assert answer.status == 200, answer.body
    for choice in answer.json()["choices"]:
        assert (choice["text"], choice["token_ids"]) == ("", SAID)
        if choice["logprobs"]:
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in SAID]
    events = ask_now(app, "/v1/completions", IDS | more | {"stream": True}).events()
    told = [token for e in events for c in e["choices"] if c["index"] == 0 for token in c["token_ids"]]
    assert told == SAID


def test_generation_of_tokens_needs_none(app: Any) -> None:
    answer = ask_now(app, "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 7}})
    assert answer.json()["choices"][0]["token_ids"] == SAID


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", IDS | {"stop": "x"}),
        ("/v1/completions", IDS | {"bad_words": ["x"]}),
        ("/v1/completions", IDS | {"detokenize": True}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/chat/completions", HELLO),
        ("/v1/messages", HELLO | {"max_tokens": 5, "model": "toy"}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "text"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_who_wants_text_is_told_why_not(app: Any, path: str, body: dict[str, Any]) -> None:
    answer = ask_now(app, path, body)
    assert answer.status == 400, answer.body
    assert SAYS in answer.json()["error"]["message"], answer.body


def test_llm_of_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    (output,) = llm.generate({"prompt_token_ids": [4, 5, 6]}, params)
    assert (output.prompt, output.outputs[0].text, len(output.outputs[0].token_ids)) == (None, "", 3)
    entries = output.outputs[0].logprobs or []
    assert [[one.decoded_token for one in entry.values()] for entry in entries] == [[None]] * 3


@pytest.mark.parametrize("params", [{"stop": "a"}, {"bad_words": ["a"]}])
def test_llm_says_why_not(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{SAYS}.*{next(iter(params))}"):
        llm.generate([[4, 5]], SamplingParams(**params))
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        llm.get_tokenizer,
    ):
        with pytest.raises(InvalidRequestError, match=SAYS):
            call()


def test_a_template_without_a_tokenizer_is_a_mistake() -> None:
    files = ModelFiles(name="m", path=Path("m"), format="safetensors", weights=(), config=LLAMA)
    config = ModelConfig(skip_tokenizer_init=True)
    assert load_text(files, config).chat is None
    with pytest.raises(ConfigError, match="--chat-template needs a tokenizer"):
        load_text(files, config, chat_template="{{ messages }}")
