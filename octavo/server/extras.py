"""Undeclared fields of request bodies: each is refused, ignored, or named in a warning.

Silently ignoring a field would change the meaning of the request. So a field of an unsupported feature is refused by
name, unless its value requests the default behaviour. An unknown field is ignored with a warning in the answer; with
--strict-params it is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from octavo.core.errors import InvalidRequestError, UnsupportedError

Limited = tuple[str, tuple[Any, ...]]
"""The alternative to an unsupported field, and its neutral values."""

LEAVE_OUT = "leave it out"
_ADAPTERS = "name an adapter as the model, if the server has some, or merge it into the weights"
_SERVER_DRAFTS = "the server drafts for all requests, if it was started with --speculative-config: leave it out"
_IN_MESSAGES = "images are parts of messages"
_SAMPLER = "use temperature, top_p, top_k or min_p"
_NOTHING: tuple[Any, ...] = (None, [], {}, "")

_LACKING: dict[str, Limited] = {
    **dict.fromkeys(("lora_request", "lora_path", "lora_name", "lora", "loras", "adapter_id"), (_ADAPTERS, _NOTHING)),
    **dict.fromkeys(
        (
            "speculative_config",
            "speculative_model",
            "num_speculative_tokens",
            "num_draft_tokens",
            "draft_model",
            "speculative.n_max",
            "speculative.n_min",
        ),
        (_SERVER_DRAFTS, (*_NOTHING, 0)),
    ),
    **dict.fromkeys(
        (
            "image",
            "images",
            "image_data",
            "image_url",
            "audio_data",
            "video_data",
            "mm_data",
            "multi_modal_data",
            "media_io_kwargs",
            "mm_processor_kwargs",
        ),
        (_IN_MESSAGES, _NOTHING),
    ),
    **dict.fromkeys(
        (
            "dry_multiplier",
            "dynamic_temperature",
            "dynatemp_range",
            "epsilon_cutoff",
            "eta_cutoff",
            "mirostat",
            "mirostat_mode",
            "no_repeat_ngram_size",
            "penalty_alpha",
            "smoothing_factor",
            "top_a",
            "watermark",
            "xtc_probability",
        ),
        (_SAMPLER, (None, 0, False)),
    ),
    **dict.fromkeys(("tfs_z", "typical_p", "guidance_scale"), (_SAMPLER, (None, 1))),
    "top_n_sigma": (_SAMPLER, (None, 0, -1)),
    "num_beams": ("set use_beam_search and n", (None, 1)),
}
_NEEDLESS = {"guided_decoding_backend": "there is one backend"}
_HINTS = {
    "do_sample": "temperature 0 is greedy",
    "extra_body": "send its fields at the top of the body",
    "format": "response_format says the output's form",
    "options": "send its fields at the top of the body",
    "system": "send a message with the role system",
}
_OTHER_NAMES = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}


def check_undeclared(
    body: BaseModel, *, strict: bool, known: Mapping[str, Limited] | None = None, claimed: Collection[str] = ()
) -> list[str]:
    """Return warnings about the fields of `body` that its model does not declare.

    Args:
        strict: refuse unknown fields.
        known: more fields that may only have certain values.
        claimed: fields that are read, though the model does not declare them.

    Raises:
        InvalidRequestError: an unknown field, if `strict`.
        UnsupportedError: a field asks for a feature that this version lacks.
    """
    warnings = []
    limited = _LACKING | (dict(known) if known else {})
    for name, value in (body.model_extra or {}).items():
        if name in claimed:
            continue
        if name in _NEEDLESS:
            warnings.append(f"`{name}` was ignored: {_NEEDLESS[name]}.")
            continue
        if name not in limited:
            warnings.append(_unknown(body, name, value, strict=strict))
            continue
        remedy, neutral = limited[name]
        if not any(_same(value, one) for one in neutral):
            raise UnsupportedError(f"{name} is not supported by this version; {remedy}.", param=name, value=value)
    return warnings


def _unknown(body: BaseModel, name: str, value: Any, *, strict: bool) -> str:
    """Return the warning about an unknown field, with a suggestion."""
    fields = type(body).model_fields
    other = _OTHER_NAMES.get(name)
    near = [other] if other in fields else difflib.get_close_matches(name, fields, n=1, cutoff=0.75)
    hint = f"; did you mean {near[0]}?" if near else f": {_HINTS[name]}." if name in _HINTS else "."
    if strict:
        raise InvalidRequestError(f"{name} is not a known parameter{hint}", param=name, value=value)
    return f"The unknown field `{name}` was ignored{hint}"


def _same(value: Any, neutral: Any) -> bool:
    """Equality that distinguishes booleans from numbers, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
