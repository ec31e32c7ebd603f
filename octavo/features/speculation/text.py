"""`SpeculationText`: reads `speculative` and `prediction` from requests, and adds counts of drafts to answers."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.output import CompletionOutput, VerifiedDrafts
from octavo.core.params import SamplingParams
from octavo.features.speculation.payload import NAME, DraftCounts, DraftInfo, SpeculationOption
from octavo.text.hooks import Idle, TextHook, encoded

_WHY = "the server does not draft; start it with --spec-method auto"


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's arguments for the feature."""

    speculative: bool | None = None
    prediction: str | None = None


class SpeculationText(TextHook):
    """Claims `speculative` (whether the request has drafts) and `prediction` (OpenAI's predicted output)."""

    name = NAME
    body_fields = ("speculative", "prediction")

    def start_rows(self) -> list[tuple[str, str]]:
        info = self.context.info.facts(NAME, DraftInfo)
        if info is None:
            return []
        where = " where that is faster" if info.adaptive else ""
        drafting = f"{info.method}: up to {info.most} tokens are drafted{where}; answers stay the same"
        return [("speculation", f"{drafting} (--spec-method none turns it off)")]

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        enabled, given = getattr(body, "speculative", None), getattr(body, "prediction", None)
        if enabled is not None and not isinstance(enabled, bool):
            raise InvalidRequestError("speculative must be true or false.", param="speculative", value=enabled)
        found: dict[str, Any] = {} if enabled is None else {"speculative": enabled}
        if given is not None:
            text = _predicted(given)
            if len(text.encode()) > max_bytes:
                raise InvalidRequestError(f"prediction must be at most {max_bytes} bytes long.", param="prediction")
            found["prediction"] = text
        return {"feature_args": {NAME: found}} if found and self.present else {}

    def idle(self, body: Any) -> list[Idle]:
        """Report fields without effect: both if the engine does not draft, `prediction` if its method reads none."""
        wishes = {"prediction": getattr(body, "prediction", None), "speculative": getattr(body, "speculative", None)}
        why, info = _WHY, self.context.info.facts(NAME, DraftInfo)
        if self.present:
            if info is None or info.predicts:
                return []
            why = f"the server drafts with {info.method}, which reads no predictions; lookup (--spec-method auto) does"
            del wishes["speculative"]
        return [Idle(name, value, why) for name, value in wishes.items() if value]

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        given = (params.feature_args or {}).get(NAME)
        if not self.present:
            if given is not None:
                self.require("speculative decoding", "feature_args")
            return None
        given = {} if given is None else given
        try:
            asked = msgspec.convert(given, _Asked)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f'feature_args[{NAME!r}] must be like {{"speculative": true, "prediction": "..."}}: {error}.',
                param="feature_args",
                value=given,
            ) from error
        expected = self.context.tokenizer.encode(asked.prediction, add_special_tokens=False) if asked.prediction else []
        size = self.context.info.vocab_size
        expected = list(itertools.takewhile(lambda token: token < size, expected))  # it can't write what it lacks
        return encoded(SpeculationOption(asked.speculative is not False, len(tokens), expected), "prediction")

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        counts = msgspec.msgpack.decode(data, type=DraftCounts)
        output.drafts = VerifiedDrafts(counts.accepted, counts.rejected)


def _predicted(given: Any) -> str:
    """Return the text of OpenAI's field: {"type": "content", "content": a text or a list of text parts}."""
    content = given.get("content") if isinstance(given, dict) and given.get("type", "content") == "content" else None
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = [part.get("text") for part in content if part.get("type", "text") == "text"]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise InvalidRequestError(
            'prediction must be {"type": "content", "content": TEXT}, with a string or text parts.',
            param="prediction",
            value=given,
        )
    return content


TEXT = SpeculationText
