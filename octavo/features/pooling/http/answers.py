"""Response bodies. A field that is UNSET is left out of the JSON."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class VectorUsage(msgspec.Struct, frozen=True):
    """Tokens read for one HTTP request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or base64 of float32 numbers, little-endian."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class PoolingItem(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one input: one vector, or one for each token; or base64 of the numbers, row by row."""

    object: str = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class ClassItem(msgspec.Struct, frozen=True, kw_only=True):
    """The most likely label of one input, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class RerankDocument(msgspec.Struct, frozen=True):
    text: str


class RerankItem(msgspec.Struct, frozen=True, kw_only=True):
    """One document; `index` is its place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    search_units: int = 1


class RerankMeta(msgspec.Struct, frozen=True):
    """Metadata that Cohere's clients read."""

    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits = BilledUnits()


class Reranking(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /rerank`, best first."""

    id: str
    model: str
    results: list[RerankItem]
    usage: VectorUsage
    meta: RerankMeta = RerankMeta()
    warnings: list[str] | UnsetType = UNSET
