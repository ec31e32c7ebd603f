"""`EngineHook`: the seam through which a feature takes part in planning; each method has a do-nothing default."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, internal_error
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import Request

log = logging.getLogger(__name__)


class EngineHook:
    """The engine half of a feature. It keeps its own state by request and never sees the scheduler."""

    name: str = ""
    opt_in: bool = False
    """Whether requests without options for it mean nothing to it: of their tokens it is not told, and of steps in which
    only requests without options compute single tokens it is neither asked nor told."""
    admits_for_good: bool = False
    """Whether a request that computes single tokens is never held up by it: then it need not be asked each time."""

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

    def on_release(self, request: Request) -> None:
        """The request has ended; forget it. After a failure this may be said twice."""


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


def released(hooks: Sequence[EngineHook], request: Request) -> None:
    """`on_release` of all hooks. The request has ended: a failure is logged and changes nothing."""
    for hook in hooks:
        try:
            hook.on_release(request)
        except Exception:
            log.exception("the feature %r failed to forget request %s", hook.name, request.id)
