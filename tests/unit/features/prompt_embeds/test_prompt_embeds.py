"""Prompts with embeddings: what they become for the engine, and what is refused at the door."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import pytest
import torch
import toy_tokenizers

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.engine.fake import fake_info
from octavo.features.prompt_embeds.span import EmbedSpan
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(toy_tokenizers.sentencepiece())
INFO = fake_info(vocab_size=TOKENIZER.vocab_size, max_model_len=20, features=["prompt_embeds"], hidden_size=4)
PREPARER = Preparer(TOKENIZER, INFO)
PARAMS = SamplingParams(max_tokens=4)
X = torch.arange(24, dtype=torch.float32).view(6, 4)


def in_base64(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def prepared(**prompt: Any) -> Any:
    return PREPARER.prepare(prompt, PARAMS).request  # type: ignore[arg-type]


def spans(request: Any) -> list[tuple[int, int, str]]:
    """With the data checked to be X's."""
    found = msgspec.msgpack.decode(request.options["prompt_embeds"], type=list[EmbedSpan])
    for span in found:
        assert bytes(span.data) == X[span.start : span.start + span.count].numpy().tobytes()
    return [(span.start, span.count, span.dtype) for span in found]


@pytest.mark.parametrize("given", [X, X[None], X.clone().requires_grad_(), X.t().contiguous().t(), in_base64(X)])
def test_a_prompt_of_embeddings_alone(given: Any) -> None:
    request = prepared(prompt_embeds=given, cache_salt="s")
    assert request.tokens == [-1] * 6
    assert spans(request) == [(0, 6, "float32")]
    assert len(set(request.keys)) == 6
    assert request.namespace.endswith("s")


def test_tokens_and_embeddings_take_turns() -> None:
    mask = [True, False, False, True, True, False]
    request = prepared(prompt_embeds=X, prompt_token_ids=[5, 6, 7, 8, 9, 10], prompt_is_token_ids=mask)
    assert request.tokens == [5, -1, -1, 8, 9, -1]
    assert [key for key in request.keys if isinstance(key, int)] == [5, 8, 9]
    assert spans(request) == [(1, 2, "float32"), (5, 1, "float32")]


def test_keys_are_equal_for_equal_rows_of_one_dtype_alone() -> None:
    rows = torch.zeros(5, 4)
    rows[2, 3] = 1
    keys = prepared(prompt_embeds=rows).keys
    assert keys[0] == keys[1] == keys[3] == prepared(prompt_embeds=rows[:1]).keys[0]
    assert len({*keys, *prepared(prompt_embeds=rows.half()).keys, *prepared(prompt_embeds=rows.bfloat16()).keys}) == 6


def test_a_prompt_without_embeddings_is_as_ever() -> None:
    request = PREPARER.prepare([5, 6], PARAMS).request
    assert (request.tokens, request.keys, request.options) == ([5, 6], [], {})
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        PREPARER.prepare([5, -1], PARAMS)
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        prepared(prompt_embeds=X, prompt_token_ids=[5, -2, 7, 8, 9, 10], prompt_is_token_ids=[True] * 5 + [False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_holds_no_number_is_named(dtype: torch.dtype, value: float) -> None:
    spoilt = X.to(dtype, copy=True)
    spoilt[3, 1] = value
    with pytest.raises(InvalidRequestError, match="in row 3 there is NaN or an infinity"):
        prepared(prompt_embeds=spoilt)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (X.double(), "dense torch tensor of float32, float16 or bfloat16, got torch.strided of float64"),
        (X.to_sparse(), "got torch.sparse_coo of float32"),
        ([[1.0] * 4], "got list"),
        (X[0], r"shape \[tokens, hidden size\], got \[4\]"),
        (X.view(2, 3, 4), r"shape \[tokens, hidden size\], got \[2, 3, 4\]"),
        (X[:0], r"shape \[tokens, hidden size\], got \[0, 4\]"),
        (X.view(8, 3), r"hidden size: \[tokens, 4\], got \[8, 3\]"),
        (torch.zeros(20, 4), "maximum context length is 20 tokens.*20 tokens"),
        (torch.zeros(17, 4), "you requested 21 tokens"),
        ("", "requires a non-empty tensor"),
        ("...", "not valid base64"),
        ("aGVsbG8=", "no file of torch.save"),
        (in_base64(X.double()), "convert it to float32"),
        (in_base64(X[0]), r"shape \[tokens, hidden size\], got \[4\]"),
    ],
)
def test_what_can_not_be_a_prompt(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        prepared(prompt_embeds=given)
    assert caught.value.param in ("prompt_embeds", "max_tokens")


@pytest.mark.parametrize(
    ("prompt", "params", "options", "param"),
    [
        ({}, {"prompt_logprobs": 1}, {}, "prompt_logprobs"),
        ({}, {}, {"truncate": 4}, "truncate_prompt_tokens"),
        ({"prompt_is_token_ids": [True] * 6}, {}, {}, "prompt_is_token_ids"),
        ({"prompt_is_token_ids": [True] * 5, "prompt_token_ids": [5] * 5}, {}, {}, "prompt_is_token_ids"),
        ({"prompt_token_ids": [5] * 6}, {}, {}, "prompt_is_token_ids"),
        (
            {"prompt_token_ids": [5, -1, 7, 8, 9, 10], "prompt_is_token_ids": [True] * 5 + [False]},
            {},
            {},
            "prompt_is_token_ids",
        ),
    ],
)
def test_what_does_not_go_with_it(prompt: Any, params: Any, options: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PREPARER.prepare({"prompt_embeds": X, **prompt}, PARAMS.replace(**params), **options)
    assert caught.value.param == param


def test_an_engine_that_was_not_told_to_take_them_says_how() -> None:
    with pytest.raises(InvalidRequestError, match="You must set `--enable-prompt-embeds`"):
        Preparer(TOKENIZER, fake_info()).prepare({"prompt_embeds": "rubbish"}, PARAMS)
