"""What is refused at the door of vectors, and what the others become."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import toy_tokenizers
from pooler_kit import told

from octavo.core.errors import InvalidRequestError
from octavo.engine.fake import fake_info
from octavo.features.pooling.params import PoolerInfo, PoolingSpec
from octavo.features.pooling.payload import NAME as OPTION
from octavo.features.pooling.requests import PoolingPreparer, cosine
from octavo.features.pooling.scoring import paired, plan_scores
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(toy_tokenizers.bert())
POOLER = PoolerInfo(pooling="mean", normalize=True, size=8)


def preparer(pooler: PoolerInfo | None = POOLER, **info: Any) -> PoolingPreparer:
    settings = {"vocab_size": 57, "max_model_len": 12, "num_blocks": 0, "tasks": ["embed", "token_embed"], **info}
    return PoolingPreparer(TOKENIZER, fake_info(feature_info=told(pooler), **settings))


def asked(request: Any) -> PoolingSpec:
    return msgspec.msgpack.decode(request.options[OPTION], type=PoolingSpec)


def test_a_text_ends_with_its_prompt() -> None:
    one = preparer()
    request = one.prepare("ab", one.params())
    assert request.tokens == TOKENIZER.encode("ab")
    assert request.prompt_only
    assert asked(request) == PoolingSpec(task="embed", pooling="mean", activation="normalize")


def test_text_with_a_token_that_the_model_lacks_is_refused() -> None:
    one = preparer(vocab_size=max(TOKENIZER.encode("ab")))
    with pytest.raises(InvalidRequestError, match="This model lacks the token"):
        one.prepare("ab", one.params())


def test_a_models_prompt_stands_in_front_of_texts() -> None:
    """Not of token ids, of conversations that a template has rendered, or of what is to be labelled."""
    one = preparer(PoolerInfo(pooling="mean", normalize=True, size=8, prompt="the "))
    assert one.prepare("ab", one.params()).tokens == TOKENIZER.encode("the ab")
    assert one.prepare("ab", one.params("token_embed")).tokens == TOKENIZER.encode("the ab")
    assert one.prepare([5, 6], one.params()).tokens == [5, 6]
    assert one.prepare("ab", one.params(), prompted=False).tokens == TOKENIZER.encode("ab")


def test_a_models_length_of_vectors_is_that_of_requests_without_one() -> None:
    one = preparer(PoolerInfo(pooling="mean", normalize=True, size=8, dimensions=4))
    assert one.params().dimensions == 4
    assert one.params(dimensions=4).dimensions == 4
    assert one.params(dimensions=8).dimensions is None
    assert one.params("token_embed").dimensions is None


def test_only_the_last_token_may_come_by_way_of_the_cache() -> None:
    for pooling, num_blocks, reads in (("mean", 8, False), ("cls", 8, False), ("last", 8, True), ("last", 0, False)):
        one = preparer(PoolerInfo(pooling=pooling, normalize=True, size=8), num_blocks=num_blocks)
        assert one.prepare("ab", one.params()).reads_cache is reads
    one = preparer(PoolerInfo(pooling="last", normalize=True, size=8), num_blocks=8)
    assert not one.prepare("ab", one.params("token_embed")).reads_cache


def test_two_texts_are_one_sequence_and_told_apart() -> None:
    one = preparer(PoolerInfo(pooling="cls", normalize=False, size=8, labels=["x"]), tasks=["classify"])
    request = one.prepare(("ab", "c"), one.params("classify"))
    assert request.tokens == toy_tokenizers.bert().encode("ab", "c").ids
    assert asked(request).segment == 4


@pytest.mark.parametrize(
    ("text", "limit", "side", "kept"),
    [
        ("abcdefghijklmnop", -1, "right", "abcdefghij"),
        ("abcdef", 5, "right", "abc"),
        ("abcdef", 5, "left", "def"),
        ("ab", 5, "right", "ab"),
    ],
)
def test_a_text_is_cut_and_keeps_its_marks(text: str, limit: int, side: Any, kept: str) -> None:
    one = preparer()
    request = one.prepare(text, one.params(), truncate=limit, side=side)
    cls, *content, sep = request.tokens
    assert (cls, sep) == (TOKENIZER.backend.token_to_id("[CLS]"), TOKENIZER.backend.token_to_id("[SEP]"))
    words = [TOKENIZER.backend.id_to_token(token).removeprefix("##") for token in content]
    assert "".join(words) == kept


def test_of_two_texts_the_longer_one_is_cut_first() -> None:
    one = preparer(PoolerInfo(pooling="cls", normalize=False, size=8, labels=["x"]), tasks=["classify"])
    whole = toy_tokenizers.bert()
    for first, second, cut in (
        ("abcdefgh", "ij", ("abcdefg", "ij")),
        ("ab", "ijklmnopq", ("ab", "ijklmno")),
        ("abcdefgh", "ijklmnopq", ("abcd", "ijklm")),
    ):
        assert one.prepare((first, second), one.params("classify"), truncate=12).tokens == whole.encode(*cut).ids


def test_token_ids_are_cut_too() -> None:
    one = preparer()
    assert one.prepare([5, 6, 7], one.params(), truncate=2).tokens == [5, 6]
    assert one.prepare([5, 6, 7], one.params(), truncate=2, side="left").tokens == [6, 7]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (
            "abcdefghijk",
            {},
            r"maximum context length is 12 tokens.*your input resulted in 13.*truncate_prompt_tokens=-1",
        ),
        ([57], {}, r"out of vocabulary.*check_embedding_ctx_length=False"),
        ([True], {}, "must be integers"),
        ([], {}, "input cannot be empty"),
        ("ab", {"truncate": 0}, "must be -1"),
        ("ab", {"truncate": 13}, "from 1 to 12, got 13"),
        ("ab", {"truncate": 2}, "more than the 2 special tokens"),
        ("\ud800", {}, "half of a surrogate pair"),
        ("a" * 100_000, {}, "maximum context length"),
    ],
)
def test_what_can_not_be_served_is_named(prompt: Any, options: dict[str, Any], message: str) -> None:
    one = preparer()
    with pytest.raises(InvalidRequestError, match=message):
        one.prepare(prompt, one.params(), **options)


def test_vectors_are_cut_only_where_the_model_was_trained_for_it() -> None:
    some = PoolerInfo(pooling="mean", normalize=True, size=8, matryoshka=[2, 4])
    every = PoolerInfo(pooling="mean", normalize=True, size=8, matryoshka=[])
    assert preparer(some).params(dimensions=4).dimensions == 4
    assert preparer(every).params(dimensions=3).dimensions == 3
    assert preparer().params(dimensions=8).dimensions is None
    for pooler, dimensions, message in (
        (POOLER, 4, "matryoshka"),
        (some, 3, "dimensions of 2, 4 and 8, got 3"),
        (every, 9, "from 1 to 8"),
        (every, 0, "from 1 to 8"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            preparer(pooler).params(dimensions=dimensions)


def test_a_model_is_asked_only_for_what_it_can() -> None:
    with pytest.raises(InvalidRequestError, match=r"makes no embeddings.*--runner pooling"):
        preparer(None, tasks=["generate"]).params()
    with pytest.raises(InvalidRequestError, match="no classification head"):
        preparer().params("classify")
    head = PoolerInfo(pooling="cls", normalize=True, size=8, labels=["x"], activation="sigmoid")
    one = preparer(head, tasks=["classify"])
    assert one.params("classify").activation == "sigmoid"
    assert one.params("classify", normalize=False).activation == "none"
    with pytest.raises(InvalidRequestError, match="dimensions is for embeddings"):
        one.params("classify", dimensions=3)


def test_a_text_in_several_pairs_is_computed_once() -> None:
    one = preparer()
    plan = plan_scores([("a", "b"), ("a", "c"), ("c", "a")], one, one.prepare)
    assert [request.tokens for request in plan.requests] == [TOKENIZER.encode(text) for text in "abc"]
    assert list(plan.members) == [(0, 1), (0, 2), (2, 0)]


def test_pairs_are_one_with_many_or_as_many_with_as_many() -> None:
    assert paired(["a"], ["b", "c"], ("x", "y")) == [("a", "b"), ("a", "c")]
    assert paired(["a", "b"], ["c", "d"], ("x", "y")) == [("a", "c"), ("b", "d")]
    for first, second, name in ((["a", "b"], ["c"], "x"), ([], ["c"], "x"), (["a"], [], "y")):
        with pytest.raises(InvalidRequestError) as caught:
            paired(first, second, ("x", "y"))
        assert caught.value.param == name


def test_the_cosine_of_nothing_is_nothing() -> None:
    assert cosine([3.0, 4.0], [6.0, 8.0]) == pytest.approx(1)
    assert cosine([0.0, 0.0], [1.0, 0.0]) == 0
