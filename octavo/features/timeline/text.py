"""`TimelineText`: adds to an answer which parts of its prompt were not cached, and why, if the request asks for it."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER
from octavo.features.timeline.story import NAME, PARAM, Found
from octavo.text.hooks import Idle, TextHook, encoded, num_prompts


class TimelineText(TextHook):
    """Claims `return_cache_misses`."""

    name = NAME
    body_fields = (PARAM,)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        asked = getattr(body, PARAM, None)
        if asked is not None and not isinstance(asked, bool):
            raise InvalidRequestError(f"{PARAM} must be true or false.", param=PARAM, value=asked)
        if asked and getattr(body, "prompt", None) and num_prompts(body) > 1:
            text = f"{PARAM} is for one prompt, and this request has several; send each in a request of its own."
            raise InvalidRequestError(text, param=PARAM, value=asked)
        return {"feature_args": {NAME: True}} if asked and self.present else {}

    def idle(self, body: Any) -> list[Idle]:
        asked = getattr(body, PARAM, None)
        if not asked or (self.present and (getattr(body, "prompt", None) or num_prompts(body) == 1)):
            return []
        several = "it is for one prompt; send a request for each conversation"
        why = several if self.present else "the server keeps no timelines; start it without --request-history 0"
        return [Idle(PARAM, asked, why)]

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        asked = (params.feature_args or {}).get(NAME)
        if asked is None:
            return None
        if asked is not True:
            text = f"feature_args[{NAME!r}] must be true, or left out."
            raise InvalidRequestError(text, param="feature_args", value=asked)
        self.require("timelines (--request-history 0)", PARAM)
        return encoded(True, PARAM)

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        found = msgspec.msgpack.decode(data, type=Found)
        misses = [_shown(miss) for miss in msgspec.to_builtins(found.misses)]
        if misses and found.before and PLACEHOLDER not in found.before:
            misses[0]["text_offset"] = len(self.context.tokenizer.decode(found.before, skip_special_tokens=False))
        output.extra = {**(output.extra or {}), "cache_misses": misses}


def _shown(miss: dict[str, Any]) -> dict[str, Any]:
    """Return a miss without the fields that say nothing."""
    ago = miss.pop("ago")
    return miss if ago is None else miss | {"evicted_seconds_ago": round(ago, 3)}


TEXT = TimelineText
