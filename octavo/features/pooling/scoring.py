"""Scores of pairs of texts: by a cross-encoder, by the cosine of their embeddings, or by those of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.info import ModelInfo
from octavo.core.request import GenerateRequest
from octavo.features.pooling.params import Pooled, pooler_info
from octavo.features.pooling.requests import Pair, PoolingPreparer, cosine


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The requests for a list of pairs.

    Attributes:
        requests: requests for the engine.
        members: for each pair, the indices of its requests.
        score: function from the results of a pair's requests to its score.
    """

    requests: list[GenerateRequest]
    members: Sequence[tuple[int, ...]]
    score: Callable[[Sequence[Pooled]], float]

    def scores(self, results: Sequence[Pooled]) -> list[float]:
        """Return the score of each pair, from the results of `requests`."""
        return [self.score([results[place] for place in places]) for places in self.members]

    def tokens(self, pair: int) -> list[int]:
        """Return all tokens of a pair's requests."""
        return [token for place in self.members[pair] for token in self.requests[place].tokens]


def is_cross_encoder(info: ModelInfo) -> bool:
    """Return whether the model scores two texts as one sequence."""
    pooler = pooler_info(info)
    return "classify" in info.tasks and pooler is not None and len(pooler.labels) == 1


def check_scores(info: ModelInfo) -> None:
    """Raise UnsupportedError for a model whose head has several labels: none of them is a score."""
    if "classify" in info.tasks and not is_cross_encoder(info):
        pooler = pooler_info(info)
        labels = len(pooler.labels) if pooler else 0
        raise UnsupportedError(
            f"This server's model {info.name} has a head with {labels} labels, and scores need exactly one. Use "
            "/classify, or serve an embedding model or a cross-encoder."
        )


def plan_scores(
    pairs: Sequence[Pair],
    preparer: PoolingPreparer,
    prepare: Callable[..., GenerateRequest],
    *,
    activate: bool | None = None,
) -> ScorePlan:
    """Plan one request for each pair with a cross-encoder, otherwise one for each distinct text.

    Args:
        prepare: `preparer.prepare` with options bound; called with the text or the pair, and the params.
        activate: False returns a cross-encoder's raw, unbounded outputs, without its activation.

    Raises:
        InvalidRequestError: a text can't be served.
        UnsupportedError: the model can't score.
    """
    check_scores(preparer.info)
    if is_cross_encoder(preparer.info):
        params = preparer.params("classify", normalize=activate)
        requests = [prepare(pair, params) for pair in pairs]
        return ScorePlan(requests, [(place,) for place in range(len(pairs))], lambda found: found[0].values()[0])
    late = is_late_interaction(preparer.info)
    params = preparer.params("token_embed" if late else "embed", normalize=True)
    places: dict[str, int] = {}
    for pair in pairs:
        for text in pair:
            places.setdefault(text, len(places))
    requests = [prepare(text, params) for text in places]
    members = [(places[first], places[second]) for first, second in pairs]
    if late:
        return ScorePlan(requests, members, lambda found: max_sim(*found))
    return ScorePlan(requests, members, lambda found: cosine(found[0].values(), found[1].values()))


def is_late_interaction(info: ModelInfo) -> bool:
    """Return whether the model's vectors are those of tokens."""
    pooler = pooler_info(info)
    return pooler is not None and pooler.task == "token_embed"


def max_sim(query: Pooled, document: Pooled) -> float:
    """Return the sum, over the query's tokens, of the largest dot product with a token of the document
    (https://arxiv.org/abs/2004.12832)."""
    first, second = (np.frombuffer(one.data, "<f4").reshape(one.shape) for one in (query, document))
    return float((first @ second.T).max(axis=1).sum())


def paired(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[Pair]:
    """Pair one text with each of many, or texts one to one.

    Raises:
        InvalidRequestError: the numbers don't match, or a side is empty; `names` are the fields.
    """
    for texts, name in zip((first, second), names, strict=True):
        if not texts:
            raise InvalidRequestError(f"{name} must not be empty.", param=name, value=[])
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"{names[0]} must be one text, or as many as {names[1]} has; got {len(first)} for {len(second)}.",
            param=names[0],
            value=len(first),
        )
    return list(zip(first, second, strict=True))
