"""SmolLM2's tokenizer and chat template, rebuilt from its GGUF file, against ids on which other engines agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.hub.files import ModelFiles
from octavo.text.chat.template import ChatTemplate, chat_template_of
from octavo.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent.parent / "data"
STRINGS = json.loads((DATA / "smollm2_tokens.json").read_text())["cases"]
CHATS = json.loads((DATA / "smollm2_greedy.json").read_text())["chats"]


@pytest.fixture(scope="module")
def tokenizer(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatTemplate:
    template = chat_template_of(tokenizer)
    assert template is not None
    return template


def test_all_cases_are_here() -> None:
    assert len(STRINGS) == 37
    assert len(CHATS) == 12


@pytest.mark.parametrize("case", STRINGS, ids=lambda case: ascii(case["text"][:24]))
def test_ids_and_back(tokenizer: Tokenizer, case: dict) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_chat_prompts(tokenizer: Tokenizer, chat: ChatTemplate, number: int) -> None:
    prompt = chat.render(CHATS[number]["messages"])
    assert tokenizer.encode(prompt, add_special_tokens=False) == CHATS[number]["prompt_token_ids"]
    assert tokenizer.decode(CHATS[number]["tokens"]) == CHATS[number]["text"]


def test_marks(tokenizer: Tokenizer, smollm2_files: ModelFiles) -> None:
    assert tokenizer.vocab_size == smollm2_files.config["vocab_size"] == 49152
    assert [tokenizer.named_tokens[name] for name in ("bos_token", "eos_token")] == ["<|im_start|>", "<|im_end|>"]
    assert {0, 1, 2} <= tokenizer.special_ids
    assert len(tokenizer.special_ids) == 17
