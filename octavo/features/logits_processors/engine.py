"""`ProcessorsEngine`: the engine half. It asks processors which requests they accept, and sends those tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.plan import PlanDraft, StepPlan
from octavo.features import FeatureContext
from octavo.features.logits_processors.load import LoadedProcessor, load
from octavo.features.logits_processors.payload import NAME, RowUpdate, Shares
from octavo.features.logits_processors.settings import LogitsProcessorsSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TrackedRequest:
    """A request accepted by processors, and how much of it the worker half has received in its current slot.

    `known` counts the output tokens received, -1 before the request itself. It advances only when a step returns, so
    that data lost with a failed step is sent again.
    """

    params: SamplingParams
    processors: list[int]
    known: int = -1
    num_preemptions: int = 0


class ProcessorsEngine(EngineHook):
    """Requests that no processor accepts cost one dictionary look-up a step."""

    opt_in = True
    admits_for_good = True

    def __init__(self, name: str, loaded: Sequence[LoadedProcessor]) -> None:
        self.name = name
        self._loaded = loaded
        self._parts: dict[Request, _TrackedRequest | None] = {}

    def admit(self, request: Request, num_tokens: int) -> int:
        """Admit all tokens; raise InvalidRequestError if a processor refuses the request."""
        option = request.spec.options.get(self.name)
        if option is not None and request not in self._parts:
            params = request.params.replace(extra_args=msgspec.msgpack.decode(option))
            wanting = [number for number, one in enumerate(self._loaded) if _accepts(one, params)]
            self._parts[request] = _TrackedRequest(params, wanting) if wanting else None
        return num_tokens

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        if self._parts and any(
            samples and self._parts.get(request) for samples, request in zip(draft.samples, rows, strict=True)
        ):
            draft.needs_feedback = True

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Shares | None:
        if not self._parts:
            return None
        shares = [
            self._share(request, part)
            for samples, request in zip(plan.samples, rows, strict=True)
            if samples and request.finish is None and (part := self._parts.get(request)) is not None
        ]
        return Shares(shares) if shares else None

    def drafts(self, request: Request) -> int | None:
        """Requests that it concerns have no drafts. Processors are shown the output without drafts."""
        return 0 if self.name in request.spec.options else None

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        part = self._parts.get(request)
        if part is not None:
            part.known = request.num_output - len(tokens)
        return False

    def on_release(self, request: Request) -> None:
        self._parts.pop(request, None)

    def _share(self, request: Request, part: _TrackedRequest) -> RowUpdate:
        if part.num_preemptions != request.num_preemptions:
            part.num_preemptions, part.known = request.num_preemptions, -1
        start = max(part.known, 0)
        share = RowUpdate(
            slot=request.slot,
            processors=part.processors,
            start=start,
            output=request.tokens[request.num_prompt + start :],
        )
        if part.known < 0:
            share.params, share.prompt = part.params, request.spec.tokens
        return share


def _accepts(loaded: LoadedProcessor, params: SamplingParams) -> bool:
    """Return whether the processor accepts the request; an exception fails this request alone."""
    try:
        if loaded.validate is not None:
            loaded.validate(params)
        return bool(loaded.processor.accepts(params))
    except ValueError as exc:
        text = exc.message if isinstance(exc, InvalidRequestError) else str(exc)
        raise InvalidRequestError(text, param="extra_args", value=params.extra_args) from exc
    except Exception as exc:  # a user's processor may raise anything
        log.exception("the logits processor %s failed on a request's parameters, which is refused", loaded.name)
        text = f"The logits processor {loaded.name} failed on the request's parameters: {type(exc).__name__}: {exc}"
        raise InvalidRequestError(text, param="extra_args", value=params.extra_args) from exc


def build_engine(context: FeatureContext) -> ProcessorsEngine | None:
    """Return None without processors; requests with arguments for them are then refused.

    Raises:
        ConfigError: the model generates no text, or a processor can't be loaded.
    """
    given = context.settings_of(LogitsProcessorsSettings).logits_processors
    if given and not context.generates:
        name = context.model_name
        raise ConfigError(f"--logits-processors {given[0]}: {name} computes embeddings, not text. Leave it out.")
    loaded = load(context)
    return ProcessorsEngine(NAME, loaded) if loaded else None
