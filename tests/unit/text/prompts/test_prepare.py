from __future__ import annotations

from typing import Any

import pytest
import toy_tokenizers

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import RepetitionDetection, SamplingParams
from octavo.engine.fake import fake_info
from octavo.text.prompts.defaults import sampling_defaults, with_defaults
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(toy_tokenizers.sentencepiece())
SIZE = TOKENIZER.vocab_size
PREPARER = Preparer(TOKENIZER, fake_info(vocab_size=SIZE, max_model_len=20))
PARAMS = SamplingParams(max_tokens=4)


def refused(prompt: Any, params: SamplingParams = PARAMS, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        PREPARER.prepare(prompt, params, **options)
    return caught.value


def test_the_forms_of_a_prompt() -> None:
    tokens = TOKENIZER.encode("the dog")
    text = PREPARER.prepare("the dog", PARAMS)
    assert (text.request.tokens, text.prompt_text) == (tokens, "the dog")
    as_object = PREPARER.prepare({"prompt": "the dog"}, PARAMS)
    assert (as_object.request.tokens, as_object.prompt_text) == (tokens, "the dog")
    as_ids = PREPARER.prepare([5, 6], PARAMS)
    assert (as_ids.request.tokens, as_ids.prompt_text) == ([5, 6], None)
    both = PREPARER.prepare({"prompt_token_ids": [5, 6], "prompt": "known"}, PARAMS)
    assert (both.request.tokens, both.prompt_text) == ([5, 6], "known")


def test_a_templates_prompt_gets_no_second_mark() -> None:
    assert PREPARER.prepare("dog", PARAMS).request.tokens[0] == 1
    assert 1 not in PREPARER.prepare("dog", PARAMS, add_special_tokens=False).request.tokens


def test_fields_of_the_request() -> None:
    request = PREPARER.prepare([5], PARAMS, request_id="r", priority=-3, namespace="adapter").request
    assert (request.id, request.priority, request.namespace) == ("r", -3, "adapter")
    assert request.arrival > 0
    one, other = (PREPARER.prepare([5], PARAMS).request.id for _ in range(2))
    assert one != other


def test_a_salt_makes_a_namespace() -> None:
    def namespace(salt: str | None, name: str = "") -> str:
        prompt: Any = {"prompt": "a"} | ({"cache_salt": salt} if salt else {})
        return PREPARER.prepare(prompt, PARAMS, namespace=name).request.namespace

    seen = [namespace(None), namespace("x"), namespace("y"), namespace(None, "x"), namespace("x", "x")]
    assert len(set(seen)) == len(seen)
    assert namespace("x") == namespace("x")
    assert refused({"prompt": "a", "cache_salt": ""}).param == "cache_salt"


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, {"prompt": 5}, {"prompt_token_ids": "x"}, {"prompt": None}, ("a",), b"a"], ids=repr
)
def test_prompts_of_a_wrong_form(prompt: Any) -> None:
    assert refused(prompt).param == "prompt"


def test_an_empty_prompt() -> None:
    assert "empty" in refused([]).message
    assert "empty" in refused("", add_special_tokens=False).message
    assert PREPARER.prepare("", PARAMS).request.tokens == [1]  # the beginning mark alone is something to go on from


@pytest.mark.parametrize("token", [-1, SIZE, 1 << 70, True, 1.0, "5", None])
def test_prompt_ids_must_be_in_the_vocabulary(token: Any) -> None:
    error = refused([5, token], param="prompt")
    assert error.param == "prompt"
    assert repr(token) in error.message
    assert "position 1" in error.message


@pytest.mark.parametrize("token", [-1, SIZE])
def test_ids_in_parameters_must_be_in_the_vocabulary(token: int) -> None:
    for name, value in {"logit_bias": {3: 1.0, token: 1.0}, "stop_token_ids": [3, token]}.items():
        error = refused("a", SamplingParams(**{name: value}))
        assert error.param == name
        for part in (str(token), name, "out-of-vocab", f"Vocabulary size: {SIZE}"):
            assert part in error.message
    PREPARER.prepare("a", SamplingParams(logit_bias={SIZE - 1: 1.0, 0: 1.0}, stop_token_ids=[0, SIZE - 1]))


def test_max_tokens_is_the_rest_of_the_context_if_not_given() -> None:
    params = SamplingParams(max_tokens=None)
    assert PREPARER.prepare([5] * 13, params).request.params.max_tokens == 7
    assert PREPARER.prepare([5] * 19, params).request.params.max_tokens == 1
    assert PREPARER.prepare([5] * 16, PARAMS).request.params.max_tokens == 4


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    for number in (20, 21):
        for params in (PARAMS, SamplingParams(max_tokens=None)):
            error = refused([5] * number, params, param="messages")
            assert error.param == "messages"
            assert error.message == (
                "This model's maximum context length is 20 tokens. However, your messages resulted in "
                f"{number} tokens. Please reduce the length of the messages."
            )
    assert (
        "your prompt resulted in 20 tokens. Please reduce the length of the input prompt." in refused([5] * 20).message
    )


def test_prompt_and_output_together_are_over_the_context() -> None:
    error = refused([5] * 17, param="messages")
    assert error.param == "max_tokens"
    assert error.message == (
        "This model's maximum context length is 20 tokens. However, you requested 21 tokens (17 in the messages, 4 "
        "in the completion). Please reduce the length of the messages or completion."
    )
    assert "(17 in the prompt, 4 in the completion)" in refused([5] * 17).message


def test_min_tokens_over_the_rest_of_the_context() -> None:
    assert refused([5] * 17, SamplingParams(max_tokens=None, min_tokens=4)).param == "min_tokens"


def test_a_giant_text_is_refused_without_being_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(TOKENIZER, "encode", fail)
    error = refused("dog " * 1_000_000)
    assert error.message.startswith(
        "This model's maximum context length is 20 tokens. However, your prompt resulted in at"
    )
    assert len(str(error)) < 500


def test_a_text_of_the_longest_tokens_is_not_refused_for_its_length() -> None:
    longest = max((token for token in TOKENIZER.backend.get_vocab() if not token.startswith("<")), key=len).replace(
        "▁", " "
    )
    text = longest * 8
    assert len(PREPARER.prepare(text, PARAMS).request.tokens) <= 20


def test_defaults_from_the_models_generation_config() -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 99,
        "eos_token_id": 2,
        "do_sample": True,
        "transformers_version": "5",
    }
    defaults = sampling_defaults(config)
    assert defaults.keys() == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}
    params = with_defaults(defaults, {"top_p": 0.5, "temperature": None, "seed": None})
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.6, 0.5, 99, None)
    assert with_defaults(defaults, {"max_tokens": None}).max_tokens is None
    assert sampling_defaults({"temperature": None}) == {}
    assert sampling_defaults(defaults) == defaults


def test_the_default_of_loop_detection_holds_where_it_can() -> None:
    rule = {"max_pattern_size": 8, "min_tokens": 64}
    defaults = sampling_defaults({"repetition_detection": rule})
    made = RepetitionDetection(**rule)
    assert with_defaults(defaults, {}).repetition_detection == made
    assert with_defaults(defaults, {"ignore_eos": False}).repetition_detection == made
    assert with_defaults(defaults, {"ignore_eos": True}).repetition_detection is None
    assert with_defaults(defaults, {"ignore_eos": True, "repetition_detection": made}).repetition_detection == made
    assert with_defaults(defaults, {"beam_width": 2, "temperature": 0.0}).repetition_detection is None
    assert with_defaults(defaults, {"repetition_detection": None}).repetition_detection is None
    assert sampling_defaults({"repetition_detection": None}) == {}


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"repetition_detection": {"min_count": 3}}]
)
def test_defaults_out_of_range_are_the_operators_fault(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        sampling_defaults(config)


def test_text_with_a_token_that_the_model_lacks_is_refused() -> None:
    """Its embedding would be read beyond the table."""
    tokens = TOKENIZER.encode("the dog")
    smaller = Preparer(TOKENIZER, fake_info(vocab_size=max(tokens), max_model_len=20))
    with pytest.raises(InvalidRequestError, match=r"lacks the token .* in the prompt.*--tokenizer") as caught:
        smaller.prepare("the dog", PARAMS)
    assert caught.value.param == "prompt"
    assert f"({max(tokens)})" in caught.value.message
    enough = Preparer(TOKENIZER, fake_info(vocab_size=max(tokens) + 1, max_model_len=20))
    assert enough.prepare("the dog", PARAMS).request.tokens == tokens


def test_bad_words_with_a_token_that_the_model_lacks_are_no_constraint() -> None:
    tokens = TOKENIZER.encode("dog", add_special_tokens=False)
    smaller = Preparer(TOKENIZER, fake_info(vocab_size=max(tokens), max_model_len=20))
    params = SamplingParams(max_tokens=4, bad_words=["dog"])
    assert tokens in (PREPARER.prepare([1], params).request.params.bad_token_ids or [])
    assert tokens not in (smaller.prepare([1], params).request.params.bad_token_ids or [])
