"""Types of vectors: what a request asks for, what comes back, and what a model offers."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Literal

import msgspec

from octavo.core.info import ModelInfo
from octavo.core.output import RequestTimes
from octavo.features.pooling.payload import NAME

Task = Literal["embed", "classify", "token_embed"]
Pooling = Literal["mean", "cls", "last"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid", "silu"]


class DenseLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that pooled vectors go through, as sentence-transformers' module Dense.

    Attributes:
        weights: a safetensors file with `linear.weight` [outputs, inputs] and, with `bias`, `linear.bias` [outputs].
    """

    weights: str
    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of the hidden states of a prompt. Nothing in it is left to the model.

    Attributes:
        task: "embed" makes one vector, "classify" feeds it to the model's classification head, "token_embed" makes a
            vector of each token.
        pooling: how one vector is made of many: their mean, or that of the first or the last token.
        activation: what the result goes through at the end; "normalize" makes its Euclidean length 1.
        dimensions: how many of the vector's first elements are kept, before the activation; None for all.
        segment: the first token of the second of two texts, for models that tell them apart by token types.
    """

    task: Task = "embed"
    pooling: Pooling = "mean"
    activation: Activation = "normalize"
    dimensions: int | None = None
    segment: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether it needs the hidden states of the whole prompt, so that none of it may come from the cache."""
        return self.pooling != "last" or self.task == "token_embed"


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The result. `data` is float32, little-endian; `shape` is [size], or [tokens, size] for "token_embed"."""

    shape: list[int]
    data: bytes

    def values(self) -> list[float]:
        """All elements, row after row."""
        numbers = array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    def rows(self) -> list[list[float]]:
        """The elements of each token's vector, or those of the only one."""
        values, size = self.values(), self.shape[-1]
        return [values[start : start + size] for start in range(0, len(values), size)]


class PoolerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's vectors are made, unless a request says otherwise.

    Attributes:
        pooling: as in `PoolingParams`.
        normalize: whether embeddings have length 1.
        size: elements of an embedding.
        matryoshka: the lengths to which embeddings may be cut; [] for any, None where cutting spoils them.
        labels: what the outputs of the classification head stand for; [] without a head.
        activation: what those outputs go through.
        task: what is made of a prompt where nothing is said.
    """

    pooling: Pooling
    normalize: bool
    size: int
    matryoshka: list[int] | None = None
    labels: list[str] = msgspec.field(default_factory=list)
    activation: Activation = "none"
    task: Task = "embed"


def pooler_info(info: ModelInfo) -> PoolerInfo | None:
    """How the served model's vectors are made; None if it makes none."""
    told = info.feature_info.get(NAME)
    return None if told is None else msgspec.msgpack.decode(told, type=PoolerInfo)


@dataclass(slots=True)
class PooledOutput:
    """What a front end gets for one request."""

    request_id: str
    pooled: Pooled
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class PoolingOutput:
    """`data` is one vector, or a vector a token."""

    data: list[float] | list[list[float]]


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector of a whole prompt, of length 1 if it is normalized."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`probs[i]` is the probability of label i; without an activation the head's output for it."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """A cross-encoder's output for a pair, or the cosine of two embeddings, in [-1, 1]."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """What `LLM.encode` gives for one prompt."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` gives for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class ClassificationRequestOutput:
    """What `LLM.classify` gives for one prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class ScoringRequestOutput:
    """What `LLM.score` gives for one pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
