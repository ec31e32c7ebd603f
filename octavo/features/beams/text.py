"""`BeamSearchText`: reads a search from a request and reports beams' log-probabilities in answers."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput
from octavo.core.params import FEATURE_PARAMS, RANGES, SamplingParams
from octavo.text.hooks import TextHook, encoded

MAX_BEAMS = 64
_EXCLUDED = (
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "repetition_detection",
    *(name for name in FEATURE_PARAMS if name not in ("beam_width", "extra_args")),
)


class BeamSearchText(TextHook):
    """Claims `beam_width` and `length_penalty`, and over HTTP `use_beam_search`."""

    name = "beams"
    params = ("beam_width",)
    body_fields = ("use_beam_search", "length_penalty")

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        penalty = getattr(body, "length_penalty", None)
        if getattr(body, "use_beam_search", None):  # as many beams as answers
            found = {"beam_width": body.choices, "length_penalty": penalty, "temperature": 0.0}
            if body.repetition_penalty is None:  # the model's default is for sampling
                found["repetition_penalty"] = 1.0
            return found
        if penalty not in (None, 1.0):
            text = "length_penalty needs use_beam_search; set it or leave it out."
            raise InvalidRequestError(text, param="length_penalty", value=penalty)
        return {}

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        if params.beam_width is None:
            return None
        _check(params, params.beam_width)
        self.require("beam search", "beam_width")
        return encoded([params.beam_width, params.length_penalty], "beam_width")

    def taken_out(self, params: SamplingParams) -> dict[str, Any]:
        return {"beam_width": None, "length_penalty": 1.0, "temperature": 1.0}  # greedy requests have one choice

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        output.cumulative_logprob = msgspec.msgpack.decode(data, type=float)


def _check(params: SamplingParams, width: int) -> None:
    """Raise InvalidRequestError if a field is out of range or can't be combined with a search."""
    low, high = RANGES["length_penalty"].low, RANGES["length_penalty"].high
    if not 1 <= width <= MAX_BEAMS:
        text = f"beam_width must be in [1, {MAX_BEAMS}], got {width}."
        raise InvalidRequestError(text, param="beam_width", value=width)
    if params.n > width:
        text = f"n must be at most beam_width={width}, got {params.n}."
        raise InvalidRequestError(text, param="n", value=params.n)
    if not RANGES["length_penalty"].holds(params.length_penalty):
        text = f"length_penalty must be in [{low:g}, {high:g}], got {params.length_penalty}."
        raise InvalidRequestError(text, param="length_penalty", value=params.length_penalty)
    odd = [name for name in _EXCLUDED if getattr(params, name) not in (None, [], {}, 0, 0.0)]
    odd += ["repetition_penalty"] if params.repetition_penalty != 1 else []
    if odd:
        text = f"{odd[0]} can't be combined with beam search; leave one of them out."
        raise InvalidRequestError(text, param=odd[0], value=getattr(params, odd[0]))


TEXT = BeamSearchText
