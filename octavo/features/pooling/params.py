"""Types: parameters of requests, their results, and a model's pooling configuration."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

import msgspec

from octavo.core.info import ModelInfo
from octavo.core.output import RequestTimes
from octavo.features.pooling.payload import NAME

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Task = Literal["embed", "classify", "token_embed"]
Pooling = Literal["mean", "cls", "last"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]
PooledData: TypeAlias = "list[float] | list[list[float]] | NDArray[np.float32]"
DenseActivation = Literal["identity", "tanh", "relu", "gelu", "sigmoid", "silu"]


class DenseLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer applied to pooled vectors, as sentence-transformers' module Dense.

    Attributes:
        weights: a safetensors file with `linear.weight` [outputs, inputs] and, with `bias`, `linear.bias` [outputs].
    """

    weights: str
    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to pool the hidden states of a prompt, with the model's defaults filled in.

    Attributes:
        task: "embed" makes one vector, "classify" feeds it to the model's classification head, "token_embed" makes a
            vector of each token.
        pooling: the mean of all hidden states, or that of the first or the last token.
        activation: function applied at the end; "normalize" scales to Euclidean length 1.
        dimensions: number of leading elements to keep, before the activation; None for all.
        segment: index of the first token of the second text, for models with token types.
    """

    task: Task = "embed"
    pooling: Pooling = "mean"
    activation: Activation = "normalize"
    dimensions: int | None = None
    segment: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether it needs the hidden states of the whole prompt, so that the prefix cache can't be used."""
        return self.pooling != "last" or self.task == "token_embed"


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The result. `data` is float32, little-endian; `shape` is [size], or [tokens, size] for "token_embed"."""

    shape: list[int]
    data: bytes

    def values(self) -> list[float]:
        """Return all elements, row by row."""
        numbers = array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    def rows(self) -> list[list[float]]:
        """Return the elements of each token's vector, or of the only vector."""
        values, size = self.values(), self.shape[-1]
        return [values[start : start + size] for start in range(0, len(values), size)]


class PoolerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model's pooling configuration, the default of requests.

    Attributes:
        pooling: as in `PoolingSpec`.
        normalize: whether embeddings have length 1.
        size: elements of an embedding.
        matryoshka: lengths to which embeddings may be cut; [] for any, None if the model does not support it.
        labels: names of the classification head's outputs; [] without a head.
        activation: function applied to those outputs.
        task: the default task.
        prompt: text in front of each text that is embedded.
        dimensions: default number of an embedding's elements; None for all.
    """

    pooling: Pooling
    normalize: bool
    size: int
    matryoshka: list[int] | None = None
    labels: list[str] = msgspec.field(default_factory=list)
    activation: Activation = "none"
    task: Task = "embed"
    prompt: str = ""
    dimensions: int | None = None


def pooler_info(info: ModelInfo) -> PoolerInfo | None:
    """Return the served model's pooling configuration; None if it has none."""
    return info.facts(NAME, PoolerInfo)


@dataclass(slots=True)
class PooledOutput:
    """The result of one request, as front ends get it."""

    request_id: str
    pooled: Pooled
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class PoolingOutput:
    """`data` is one vector, or one for each token."""

    data: PooledData


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a whole prompt, of length 1 if normalized."""

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


Result = TypeVar("Result")


@dataclass(slots=True)
class VectorRequestOutput(Generic[Result]):
    """Result of a method of `LLM` for one prompt, or for one pair of texts."""

    request_id: str
    outputs: Result
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(VectorRequestOutput[PoolingOutput]):
    """Result of `LLM.encode` for one prompt."""

    __slots__ = ()


class EmbeddingRequestOutput(VectorRequestOutput[EmbeddingOutput]):
    """Result of `LLM.embed` for one prompt."""

    __slots__ = ()


class ClassificationRequestOutput(VectorRequestOutput[ClassificationOutput]):
    """Result of `LLM.classify` for one prompt."""

    __slots__ = ()


class ScoringRequestOutput(VectorRequestOutput[ScoringOutput]):
    """Result of `LLM.score` for one pair."""

    __slots__ = ()
