"""`TextHook`: the interface of a feature's front-end half. Every method has a do-nothing default.

`TEXT` in a feature's `text.py` is a subclass of it. In call order, its methods convert fields of an HTTP body to
sampling parameters, read the prompt forms that the feature adds, encode the input of its engine half, and add that
half's results to the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.info import ModelInfo
from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.features import parts
from octavo.text.answers.reasoning import ReasoningFormat
from octavo.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.protocol import EngineClient
    from octavo.text.prompts.message_parts import GivenPart
    from octavo.text.prompts.prompt import Prompt


@dataclass(frozen=True, slots=True)
class TextContext:
    """The front end's parts that features use.

    Attributes:
        reasoning: the model's marks of reasoning; None if it has none.
    """

    tokenizer: Tokenizer
    info: ModelInfo
    reasoning: ReasoningFormat | None = None


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in a feature's own form, converted to token ids.

    Attributes:
        prompt: the token ids, with `PLACEHOLDER` for other content.
        keys: as in `GenerateRequest`.
        option: input of the feature's engine half.
    """

    prompt: Prompt
    keys: list[int | bytes]
    option: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Idle:
    """A field of a request that has no effect on this model, with its value and the reason."""

    field: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class AddedModel:
    """A model that a feature adds to the served one; requests may name it as their model.

    Attributes:
        root: the files that it is made from.
        parent: name of the model that it is derived from; None for the served model.
        options: added to `GenerateRequest.options` of requests that name it.
    """

    name: str
    root: str
    options: Mapping[str, msgspec.Raw]
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class ReadArgument:
    """What an argument of the Python API asks for.

    Attributes:
        calls: methods of the engine half to call first, each with its arguments; see `EngineClient.call`.
        options: the engine half's input for each prompt; None for none.
    """

    calls: list[tuple[str, dict[str, Any]]]
    options: list[msgspec.Raw | None]


class TextHook:
    """The text half of a feature. It keeps no state of requests and may be called from any thread.

    Attributes:
        name: the feature's name, also the key of its option in a request.
        params: fields of `SamplingParams` that only this feature reads. They are reset before the request is sent.
        text_params: the `params` that need a tokenizer.
        body_fields: fields of HTTP bodies that only this feature reads.
        prompt_fields: keys of a prompt object that select this feature's form.
        part_fields: types of message parts that this feature reads -> the field of such a part that has its data. A
            prompt with them has a `Mixture` under the first of `prompt_fields`.
        shown_as: types of `part_fields` -> the type under which chat templates know such parts, such as "image".
        arguments: arguments of `LLM.generate` and its like that only this feature reads.
    """

    name: ClassVar[str] = ""
    params: ClassVar[tuple[str, ...]] = ()
    text_params: ClassVar[tuple[str, ...]] = ()
    body_fields: ClassVar[tuple[str, ...]] = ()
    prompt_fields: ClassVar[tuple[str, ...]] = ()
    part_fields: ClassVar[Mapping[str, str]] = MappingProxyType({})
    shown_as: ClassVar[Mapping[str, str]] = MappingProxyType({})
    arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: TextContext) -> None:
        self.context = context

    @property
    def present(self) -> bool:
        """Whether the engine core has the feature."""
        return self.name in self.context.info.features

    @property
    def added_tokens(self) -> int:
        """Most token ids beyond the model's vocabulary in requests that use the feature. Its engine half checks each
        request's."""
        return 0

    def require(self, what: str, param: str) -> None:
        """Raise UnsupportedError, which names `what`, if the engine core lacks the feature."""
        if not self.present:
            raise UnsupportedError(f"This engine has no {what}; leave it out.", param=param)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        """Return fields of `SamplingParams` from an HTTP body; {} if it does not use the feature.

        Args:
            body: a parsed body; its attributes are the request's fields.
            max_bytes: maximum size of a schema.

        Raises:
            InvalidRequestError: a field is invalid.
        """
        return {}

    def idle(self, body: Any) -> list[Idle]:
        """Return the body's fields that have no effect on this model."""
        return []

    @property
    def threads(self) -> Executor | None:
        """Where a server calls `read_prompt`; None for the threads of all features, which must not be kept waiting."""
        return None

    def read_prompt(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        """Read a prompt that has one of `prompt_fields`.

        Args:
            truncated: whether the request sets a truncation.

        Raises:
            InvalidRequestError: it can't be served.
        """
        raise NotImplementedError

    def check_parts(self, given: Sequence[GivenPart]) -> None:
        """Check the parts of messages before the chat template is rendered, which may drop what it does not know.

        Raises:
            InvalidRequestError: this model can't read them.
        """

    @property
    def unshown(self) -> Collection[str]:
        """Types of `shown_as` that the model's chat template does not know: marks stand for such parts."""
        return ()

    def read_argument(self, name: str, value: Any, count: int) -> ReadArgument:
        """Read one of `arguments` of a call of the Python API with `count` prompts; its value is not None.

        Raises:
            InvalidRequestError: it is invalid.
        """
        raise NotImplementedError

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        """Return the engine half's input for this request, encoded; None if the request does not use the feature.

        Args:
            text: the prompt; None if it was given as token ids.

        Raises:
            InvalidRequestError: the request can't be served.
        """
        return None

    def taken_out(self, params: SamplingParams) -> dict[str, Any]:
        """Return the changes that remove this feature's parameters before the request is sent to the engine core.

        Called only if one of `self.params` is set.
        """
        return dict.fromkeys(self.params)

    @property
    def attached(self) -> str:
        """Media types of files that users of the chat page may attach to a message, separated by commas; "" for none.
        The page sends them as parts of the types `image_url`, `video_url` and `audio_url`."""
        return ""

    def start_rows(self) -> list[tuple[str, str]]:
        """Return rows, a label and a text each, for the table that a server prints at its start."""
        return []

    async def models(self, engine: EngineClient) -> list[AddedModel]:
        """Return the models that the feature adds, as of now."""
        return []

    def models_in(self, body: Any) -> Sequence[str]:
        """Return the added models that fields of a request's body name, apart from `model`; None for no body.

        They are looked for by `find_model`. The engine half refuses a request for those that are not found.
        """
        return ()

    async def find_model(self, engine: EngineClient, name: str) -> AddedModel | None:
        """Return the added model of this name; None if there is none. `models` need not have listed it.

        If it is removed before the request arrives at the engine core, the engine half refuses the request with an
        InvalidRequestError whose `param` is "model".
        """
        return None

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        """Add `data`, sent by the engine half at the end of a choice, to the choice's last output."""


def load_hooks(context: TextContext) -> tuple[TextHook, ...]:
    """Return the text halves of all features whose folders exist."""
    return tuple(module.TEXT(context) for _, module in parts("text"))


def num_prompts(body: Any) -> int:
    """Return the number of prompts in a body: a list of texts or token ids, or several conversations."""
    prompts = getattr(body, "prompt", None) or getattr(body, "messages", None)
    if isinstance(prompts, list) and all(isinstance(one, str | list) for one in prompts):
        return len(prompts)
    return 1


def encoded(option: Any, param: str) -> msgspec.Raw:
    """Encode an option.

    Raises:
        InvalidRequestError: it has an integer of more than 64 bits; `param` is the field that it is from.
    """
    try:
        return msgspec.Raw(msgspec.msgpack.encode(option))
    except OverflowError:
        raise InvalidRequestError(f"{param} has a whole number of more than 64 bits.", param=param) from None
