"""`EngineHook`: the seam through which a feature takes part in planning; each method has a do-nothing default."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, internal_error
from octavo.core.output import FinishReason, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import GenerateRequest
from octavo.schedule.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence in lockstep ends: with these tokens, and with data for the feature's text half."""

    tokens: list[int]
    reason: FinishReason
    found: dict[str, bytes] | None = None


class Lockstep(ABC):
    """How the sequences of one request take their steps together; see `schedule/siblings.py`.

    Attributes:
        width: how many sequences there are, at least the request's `n`.
        param: the request's field that sets `width`, for errors.
        params: how the worker samples each of them, set by `begin`; it asks for `logprobs`.
    """

    width: int
    param: str
    params: SamplingParams

    @abstractmethod
    def begin(self, max_tokens: int, stop_ids: frozenset[int]) -> None:
        """The request was taken; no output will be longer than `max_tokens`."""

    @abstractmethod
    def step(self, outputs: Sequence[list[int]], found: Sequence[TokenLogprobs]) -> list[tuple[int, int]] | None:
        """Return what the sequences become, as (sequence that is continued, next token); None at the end.

        Args:
            outputs: each sequence's tokens so far, without the prompt.
            found: the most likely next tokens of each.
        """

    @abstractmethod
    def endings(self) -> list[Ending]:
        """At the end, how the sequences end; at least one. Those for which there is none take the last."""


class EngineHook:
    """The engine half of a feature. It keeps its own state by request and never sees the scheduler."""

    name: str = ""
    opt_in: bool = False
    """Whether requests without options for it mean nothing to it: of their tokens it is not told, and of steps in which
    only requests without options compute single tokens it is neither asked nor told."""
    tasks: tuple[str, ...] = ()
    """What requests may ask for because of it; see `ModelInfo.tasks`."""
    info: msgspec.Raw | None = None
    """What its other parts may know of the model; see `ModelInfo.feature_info`."""
    admits_for_good: bool = False
    """Whether a request that computes single tokens is never held up by it: then it need not be asked each time."""

    def lockstep(self, spec: GenerateRequest) -> Lockstep | None:
        """Return how the request's sequences take their steps together; None if they are independent.

        Called when the request arrives, and only if it has options for this feature.
        """
        return None

    def admit(self, request: Request, num_tokens: int) -> int:
        """How many of `num_tokens` the request may compute now; 0 lets it wait and others pass it.

        Raises:
            InvalidRequestError: the request turned out to be one that can't be served; it ends with this error.
        """
        return num_tokens

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        """Add `draft.payload[name]`, or set `draft.needs_feedback`. If `draft.repeats`, rows are those of the call
        before."""

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Any:
        """Return what the worker half needs for sampling; None for nothing.

        Called once for each plan, after its `on_plan` and before that of the next, while the forward pass runs.
        """
        return None

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """These tokens were just appended. True ends the request: its output is complete."""
        return False

    def result(self, request: Request) -> bytes | None:
        """Return what goes to the feature's text half with the end of the request; see `TextHook.answer`.

        Called only if the request has options for this feature.
        """
        return None

    def on_release(self, request: Request) -> None:
        """The request has ended; forget it. After a failure this may be said twice."""


def lockstep_of(spec: GenerateRequest, hooks: Sequence[EngineHook]) -> Lockstep | None:
    """The lockstep that a feature wants for a new request; None if none does."""
    wanted = (hook.lockstep(spec) for hook in hooks if hook.name in spec.options)
    return next((one for one in wanted if one is not None), None) if spec.options else None


def hooks_of(request: Request, hooks: Sequence[EngineHook]) -> tuple[EngineHook, ...]:
    """Those to which the request may mean something."""
    return tuple(hook for hook in hooks if not hook.opt_in or hook.name in request.spec.options)


def admitted(
    hooks: Sequence[EngineHook], request: Request, num_tokens: int
) -> tuple[int, InvalidRequestError | RuntimeError | None]:
    """`admit` of all hooks: how many tokens all agree to, or why the request ends.

    That is a RuntimeError where a hook failed: the failure is the request's own, for nothing of it was planned.
    """
    for hook in hooks:
        try:
            num_tokens = min(num_tokens, hook.admit(request, num_tokens))
        except InvalidRequestError as error:
            return 0, error
        except Exception as exc:
            log.exception("the feature %r failed to admit request %s, which ends here", hook.name, request.id)
            return 0, RuntimeError(internal_error(exc))
    return num_tokens, None


def committed(hooks: Sequence[EngineHook], request: Request, tokens: Sequence[int]) -> tuple[bool, str | None]:
    """`on_commit` of those it concerns: whether one says that the output is complete, and the error of one that failed.

    A failure is the request's own: its step has run, and nobody else's tokens are touched.
    """
    complete = False
    failed: str | None = None
    options = request.spec.options
    for hook in hooks:
        if hook.opt_in and hook.name not in options:
            continue
        try:
            complete |= hook.on_commit(request, tokens)
        except Exception as exc:
            log.exception("the feature %r failed on a token of request %s, which ends here", hook.name, request.id)
            failed = internal_error(exc)
    return complete, failed


def results(hooks: Sequence[EngineHook], request: Request) -> dict[str, bytes]:
    """`result` of the features that the request has options for. A failure is logged and leaves that result out."""
    found: dict[str, bytes] = {}
    for hook in hooks:
        try:
            if hook.name in request.spec.options and (data := hook.result(request)) is not None:
                found[hook.name] = data
        except Exception:
            log.exception("the feature %r failed to give the result of request %s", hook.name, request.id)
    return found


def released(hooks: Sequence[EngineHook], request: Request) -> None:
    """`on_release` of all hooks. The request has ended: a failure is logged and changes nothing."""
    for hook in hooks:
        try:
            hook.on_release(request)
        except Exception:
            log.exception("the feature %r failed to forget request %s", hook.name, request.id)
