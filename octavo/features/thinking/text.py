"""`ThinkingText`: reads the budget from a request and checks whether the prompt ends within reasoning."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.params import SamplingParams
from octavo.features.thinking.budget import ThinkingBudget
from octavo.text.hooks import Idle, TextHook, encoded

log = logging.getLogger(__name__)

PARAM = "thinking_token_budget"
_TAIL = 16
"""Tokens at the end of a prompt to search for marks of reasoning."""


class ThinkingText(TextHook):
    """Claims the budget under its three names."""

    name = "thinking"
    params = text_params = (PARAM,)
    body_fields = (PARAM, "thinking_budget", "max_thinking_tokens")

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        given = self._given(body)
        if len(set(given.values())) > 1:
            text = f"{' and '.join(given)} must be the same."
            raise InvalidRequestError(text, param=next(iter(given)), value=given)
        for name, value in given.items():
            if value < -1:
                text = f"{name} must be non-negative or -1, got {value}."
                raise InvalidRequestError(text, param=name, value=value)
            return {PARAM: value}
        return {}

    def idle(self, body: Any) -> list[Idle]:
        """Report a budget as idle if the model has no marks of reasoning."""
        name, value = next(iter(self._given(body).items()), ("", -1))
        if self.context.reasoning is not None or value < 0:
            return []
        why = (
            "this model marks no reasoning that could be bounded. Leave it out, or start the server with "
            "--reasoning-parser if the model does reason"
        )
        return [Idle(name, value, why)]

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        budget, reasoning = params.thinking_token_budget, self.context.reasoning
        if budget is None or budget == -1:
            return None
        if budget < 0:
            text = f"{PARAM} must be non-negative or -1, got {budget}."
            raise InvalidRequestError(text, param=PARAM, value=budget)
        if reasoning is None:
            log.warning("a thinking budget has no effect: the model marks no reasoning (--reasoning-parser)")
            return None
        self.require("thinking budget", PARAM)
        size = self.context.info.vocab_size
        if max(self.context.tokenizer.encode(reasoning.end, add_special_tokens=False)) >= size:
            raise UnsupportedError(
                f"{PARAM} can't be kept by this model: it lacks a token of {reasoning.end}, which ends reasoning. "
                "Leave it out, or serve the model with its own tokenizer (--tokenizer).",
                param=PARAM,
                value=budget,
            )
        if text is None:
            text = self.context.tokenizer.decode(tokens[-_TAIL:], skip_special_tokens=False)
        is_open = text.rstrip().endswith(reasoning.begin)
        return encoded(ThinkingBudget(tokens=budget, begin=reasoning.begin, end=reasoning.end, open=is_open), PARAM)

    def _given(self, body: Any) -> dict[str, int]:
        values = ((name, getattr(body, name, None)) for name in self.body_fields)
        return {name: value for name, value in values if value is not None}


TEXT = ThinkingText
