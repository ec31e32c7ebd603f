from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.text.hooks import TextHook, encoded


class TallyText(TextHook):
    name = "tally"
    body_fields = ("tally",)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        word = getattr(body, "tally", None)
        if word is None:
            return {}
        if not isinstance(word, str):
            raise InvalidRequestError("tally must be a string.", param="tally", value=word)
        return {"feature_args": {self.name: word}}

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        word = (params.feature_args or {}).get(self.name)
        if word is None:
            return None
        self.require("tally", "tally")
        return encoded(word, "tally")

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        output.text += data.decode()


TEXT = TallyText
