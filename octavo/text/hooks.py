"""`TextHook`: the seam through which a feature takes part in the front end. Every method has a do-nothing default.

A feature's `text.py` has a subclass named `Text`. In the order in which they are called, its methods make sampling
parameters from the fields of an HTTP body, read the forms of prompts that the feature adds, encode what its engine
half needs, and put what that half sends back into the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    from octavo.text.prompts.prompt import Prompt


@dataclass(frozen=True, slots=True)
class TextContext:
    """What a feature may know of the front end.

    Attributes:
        reasoning: how the model marks reasoning; None if it does not.
    """

    tokenizer: Tokenizer
    info: ModelInfo
    reasoning: ReasoningFormat | None = None


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in a feature's own form, made into one of token ids.

    Attributes:
        prompt: the token ids, with `PLACEHOLDER` where no token stands.
        keys: as in `GenerateRequest`.
        option: for the feature's engine half.
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


class TextHook:
    """The text half of a feature. It keeps no state of requests: any thread may call it.

    Attributes:
        name: the name of the feature, which its option in a request has as well.
        params: fields of `SamplingParams` that only this feature reads. They are reset before the request travels.
        text_params: those of `params` that mean nothing without a tokenizer.
        body_fields: fields of HTTP bodies that only this feature reads.
        prompt_fields: keys of a prompt object that make it one of this feature's.
    """

    name: ClassVar[str] = ""
    params: ClassVar[tuple[str, ...]] = ()
    text_params: ClassVar[tuple[str, ...]] = ()
    body_fields: ClassVar[tuple[str, ...]] = ()
    prompt_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: TextContext) -> None:
        self.context = context

    @property
    def present(self) -> bool:
        """Whether the engine core has the feature."""
        return self.name in self.context.info.features

    def require(self, what: str, param: str) -> None:
        """Raise UnsupportedError, which says `what` is missing, if the engine core lacks the feature."""
        if not self.present:
            raise UnsupportedError(f"This engine has no {what}; leave it out.", param=param)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        """Return fields of `SamplingParams` from an HTTP body; {} if it asks for nothing.

        Args:
            body: a parsed body; its attributes are the request's fields.
            max_bytes: the size to which a schema is limited.

        Raises:
            InvalidRequestError: a field is wrong.
        """
        return {}

    def idle(self, body: Any) -> list[Idle]:
        """Return the body's fields that have no effect on this model."""
        return []

    def read_prompt(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        """Read a prompt that has one of `prompt_fields`. `truncated`: the request asks to shorten it.

        Raises:
            InvalidRequestError: it can't be served.
        """
        raise NotImplementedError

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        """Return what the engine half needs for this request, encoded; None if the request does not use the feature.

        Args:
            text: the prompt; None if it was given as token ids.

        Raises:
            InvalidRequestError: the request asks for something that can't be had.
        """
        return None

    def taken_out(self, params: SamplingParams) -> dict[str, Any]:
        """Return the changes that leave this feature's parameters out of what travels to the engine core.

        Called only if one of `self.params` is set.
        """
        return dict.fromkeys(self.params)

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        """Put `data`, which the engine half sent with the end of a choice, into the choice's last output."""


def load_hooks(context: TextContext) -> tuple[TextHook, ...]:
    """The text halves of all features whose folders are present."""
    return tuple(module.Text(context) for _, module in parts("text"))


def encoded(option: Any, param: str) -> msgspec.Raw:
    """Encode an option.

    Raises:
        InvalidRequestError: a number in it is too large for the wire; `param` is the field it came from.
    """
    try:
        return msgspec.Raw(msgspec.msgpack.encode(option))
    except OverflowError:
        raise InvalidRequestError(f"{param} has a whole number of more than 64 bits.", param=param) from None
