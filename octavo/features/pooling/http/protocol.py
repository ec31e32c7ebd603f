"""Request bodies: OpenAI's embeddings, Cohere's and Jina's rerank, and other servers' extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo.core.errors import InvalidRequestError
from octavo.features.pooling.http.encode import EmbedDtype, Endianness
from octavo.server.openai.fields import Inputs, Int, RequestId, Texts
from octavo.server.openai.protocol import Message


def _document(value: Any) -> Any:
    """Return a document's text: the document itself, or a field of an object."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    if isinstance(value, str):
        return value
    raise InvalidRequestError("must be a string, or an object with a string in its field 'text'.")


_TEXT_OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
Document = Annotated[str, BeforeValidator(_document), WithJsonSchema({"anyOf": [{"type": "string"}, _TEXT_OBJECT]})]


class VectorBody(BaseModel):
    """Common fields. `truncate_prompt_tokens` of -1 means the model's maximum."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    user: str | None = None
    priority: Int | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are not declared."""
        return self.model_extra or {}


class InputBody(VectorBody):
    """Texts or token ids in `input`, or one conversation in `messages`, rendered by the chat template."""

    input: Inputs | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`. `normalize` defaults to the model's own setting; `use_activation` is an alias.

    Numbers are returned as JSON ("float"), as base64, as bytes with their ranges in the header `metadata`, or as bytes
    alone; `embed_dtype` and `endianness` apply to all but the first.
    """

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: Int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class PoolingBody(EmbeddingBody):
    """`POST /pooling`: the result of a `task` for each input; by default the model's main task."""

    task: str | None = None


class ClassifyBody(InputBody):
    """`POST /classify`."""

    use_activation: bool | None = None


class PairsBody(VectorBody):
    """Fields of requests for scores. `use_activation`: false for the raw outputs of a cross-encoder's head."""

    use_activation: bool | None = None


class ScoreBody(PairsBody):
    """`POST /score`: one text with each of many, or pair by pair. Two pairs of field names are accepted."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    def sides(self) -> tuple[tuple[list[str], list[str]], tuple[str, str]]:
        """Return the texts and the names of their fields.

        Raises:
            InvalidRequestError: no pair of fields is complete.
        """
        documents = "documents" if self.items is None else "items"
        for names in (("text_1", "text_2"), ("queries", documents), ("data_1", "data_2")):
            first, second = getattr(self, names[0]), getattr(self, names[1])
            if first is not None and second is not None:
                return (first, second), names
            if first is not None or second is not None:
                lacking = names[0] if first is None else names[1]
                raise InvalidRequestError(f"{lacking} is required; add it to the request.", param=lacking)
        raise InvalidRequestError("text_1 and text_2 are required; add them to the request.", param="text_1")


class RerankBody(PairsBody):
    """`POST /rerank`: documents in the order of relevance to a query. `top_n` of 0 means all, and a
    `max_tokens_per_doc` of 0 whole documents."""

    query: str
    documents: Annotated[list[Document], Field(min_length=1)]
    top_n: Annotated[Int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[Int, Field(ge=0)] | None = None
