"""`LogitsProcessorsText`: the text half. It forwards a request's arguments for processors."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.text.hooks import TextHook

_WHAT = "logits processors (--logits-processors) that could read extra_args (vllm_xargs over HTTP)"


class LogitsProcessorsText(TextHook):
    """Claims `extra_args`. With processors, every request gets an option, since they may accept any."""

    name = "logits_processors"
    params = ("extra_args",)
    body_fields = ("vllm_xargs",)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        given = getattr(body, "vllm_xargs", None)
        return {"extra_args": given} if given else {}

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        if params.extra_args:
            self.require(_WHAT, "extra_args")
        if not self.present:
            return None
        try:
            return msgspec.Raw(msgspec.msgpack.encode(params.extra_args))
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            text = f"extra_args must hold JSON values alone: {exc}."
            raise InvalidRequestError(text, param="extra_args") from None


TEXT = LogitsProcessorsText
