"""Normalization of the arguments of `LLM` and `AsyncLLM`. Unsupported arguments are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.params import OutputKind, SamplingParams
from octavo.text.chat.content_format import ContentFormat
from octavo.text.hooks import TextHook
from octavo.text.prompts.prompt import Prompt

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]

# vLLM's tokenization_kwargs -> arguments of Octavo's preparers
_TOKENIZATION = {
    "add_special_tokens": "add_special_tokens",
    "truncate_prompt_tokens": "truncate",
    "truncation_side": "side",
}
_REMEDIES = {
    "lora_request": "adapters are not supported; merge the adapter into the weights and load the result",
    "trace_headers": "only a server traces requests; leave it out",
    "data_parallel_rank": "a request can't choose its replica; leave it out",
    "timeout": "a call in this process can't be interrupted; leave it out",
}
_WRITTEN = (
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "template_kwargs",
    "content_format",
)


def as_list(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list."""
    if isinstance(prompts, str | Mapping):
        return [cast("Prompt", prompts)]  # checked when it is prepared
    if not isinstance(prompts, Sequence):
        raise TypeError(
            "prompts must be a text, token ids, an object with 'prompt' or 'prompt_token_ids', or a list of these; "
            f"got {type(prompts).__name__}"
        )
    return cast("list[Prompt]", [prompts] if prompts and isinstance(prompts[0], int) else list(prompts))


def one_each(value: Any, count: int, name: str) -> list[Any]:
    """Return one value for all prompts, or a list with one for each, as a list of `count`."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts.", param=name, value=len(value))
    return list(value)


def sampling_of(params: Params, default: SamplingParams, count: int) -> list[SamplingParams]:
    """Return each prompt's parameters, validated again because they may have changed since their creation."""
    found = one_each(params or default, count, "sampling_params")
    odd = next((one for one in found if not isinstance(one, SamplingParams)), None)
    if odd is not None:
        hint = "; for these there is LLM.beam_search" if type(odd).__name__ == "BeamSearchParams" else ""
        raise TypeError(f"sampling_params must be SamplingParams, or a list of them; got {type(odd).__name__}{hint}")
    return [one.clone(output_kind=OutputKind.FINAL_ONLY) for one in found]


def refuse(**given: Any) -> None:
    """Refuse known but unsupported arguments, unless their value requests nothing.

    Raises:
        UnsupportedError: names the argument, the value and the remedy.
    """
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if any(one not in (None, 0, {}) for one in values):
            raise UnsupportedError(f"{_REMEDIES[name]}.", param=name, value=value)


@dataclass(frozen=True, slots=True)
class FeatureArguments:
    """What a call's arguments ask of features.

    Attributes:
        calls: feature, method and arguments of each `EngineClient.call` to make first.
        options: feature -> option, for each prompt.
    """

    calls: list[tuple[str, str, dict[str, Any]]]
    options: list[dict[str, msgspec.Raw]]


def feature_arguments(hooks: Sequence[TextHook], count: int, **given: Any) -> FeatureArguments:
    """Read arguments of a call with `count` prompts that features claim.

    Raises:
        InvalidRequestError: a feature refuses one.
        UnsupportedError: no feature claims one, and it asks for something.
    """
    found = FeatureArguments([], [{} for _ in range(count)])
    for name, value in given.items():
        hook = next((hook for hook in hooks if name in hook.arguments), None)
        if hook is None or value is None:
            refuse(**{name: value})
            continue
        read = hook.read_argument(name, value, count)
        found.calls.extend((hook.name, method, args) for method, args in read.calls)
        for options, option in zip(found.options, read.options, strict=True):
            options |= {} if option is None else {hook.name: option}
    return found


def tokenization(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert `tokenization_kwargs` to arguments of a preparer."""
    unknown = next((name for name in given or () if name not in _TOKENIZATION), None)
    if unknown is not None:
        raise UnsupportedError(
            f"tokenization_kwargs takes {', '.join(_TOKENIZATION)}; leave {unknown!r} out.",
            param="tokenization_kwargs",
            value=unknown,
        )
    return {_TOKENIZATION[name]: value for name, value in (given or {}).items()}


def with_sampling(prompts: Prompt | Sequence[Prompt], given: Mapping[str, Any] | None) -> list[Prompt]:
    """Return the prompts, each with `mm_processor_kwargs` of a call, unless it has some of its own.

    Raises:
        UnsupportedError: one has nothing that they have an effect on.
    """
    found = as_list(prompts)
    if not given:
        return found
    if any(not isinstance(prompt, Mapping) or "multi_modal_data" not in prompt for prompt in found):
        raise UnsupportedError(
            "mm_processor_kwargs has no effect on a prompt of text alone. Leave it out, or put it into the prompts "
            "with videos.",
            param="mm_processor_kwargs",
        )
    return [cast("Prompt", {"mm_processor_kwargs": given, **cast("dict[str, Any]", prompt)}) for prompt in found]


def conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return one conversation or several as a list."""
    several = bool(messages) and isinstance(messages, Sequence) and not isinstance(messages[0], Mapping)
    return cast("list[Messages]", list(messages) if several else [messages])


def written_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `LLM.chat` that affect the prompt, in the template renderer's form.

    Raises:
        TypeError: an argument affects something else, or is unknown.
    """
    options = dict(given)
    options["content_format"] = options.pop("chat_template_content_format", "auto")
    check_chat(options["content_format"], options.get("tools"))
    options["template_kwargs"] = options.pop("chat_template_kwargs", None)
    odd = next((name for name in options if name not in _WRITTEN), None)
    if odd is not None:
        raise TypeError(f"enqueue_chat() got an unexpected keyword argument {odd!r}")
    return options


def no_running_reset() -> UnsupportedError:
    """Return the error for a request to drop the KV cache of running requests."""
    return UnsupportedError(
        "reset_running_requests is not supported: running requests keep their KV cache. Abort them first.",
        param="reset_running_requests",
        value=True,
    )


def check_chat(content_format: str, tools: Sequence[Any] | None) -> None:
    """Refuse values that no chat template accepts."""
    if content_format not in get_args(ContentFormat):
        raise InvalidRequestError(
            f"chat_template_content_format must be one of {', '.join(get_args(ContentFormat))}.",
            param="chat_template_content_format",
            value=content_format,
        )
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(
                f"tools[{number}] must be an object with 'type' and 'function', in OpenAI's form; got "
                f"{type(tool).__name__}.",
                param="tools",
                value=tool,
            )
