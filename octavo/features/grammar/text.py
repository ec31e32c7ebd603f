"""`GrammarText`: the text half. It reads the output constraint from a request."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.params import SamplingParams
from octavo.features.grammar.fields import FIELDS, output_form
from octavo.text.hooks import TextHook, encoded


class GrammarText(TextHook):
    """Claims `structured_outputs` and the equivalent fields of HTTP bodies."""

    name = "grammar"
    params = text_params = ("structured_outputs",)
    body_fields = FIELDS

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        form = output_form(body, max_bytes)
        return {} if form is None else {"structured_outputs": form}

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        form = params.structured_outputs
        if form is None:
            return None
        self.require("structured output", form.param)
        return encoded(form, form.param)


TEXT = GrammarText
