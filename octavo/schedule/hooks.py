"""`EngineHook`: the seam through which a feature takes part in planning; each method has a do-nothing default."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from octavo.cache.cache import KVCache
from octavo.cache.lease import Lease
from octavo.cache.tier import Tier
from octavo.core.errors import InvalidRequestError, OctavoError, internal_error
from octavo.core.output import FinishReason, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import GenerateRequest
from octavo.core.stats import FeatureMetric
from octavo.schedule.pages import Pages
from octavo.schedule.request import Request
from octavo.schedule.watcher import Watcher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a sequence in lockstep: its tokens, and data for the feature's text half."""

    tokens: list[int]
    reason: FinishReason
    found: dict[str, bytes] | None = None


class Lockstep(ABC):
    """How the sequences of one request take their steps together; see `schedule/siblings.py`.

    Attributes:
        width: number of sequences, at least the request's `n`.
        param: the request's field that sets `width`, for errors.
        params: sampling parameters of each sequence, set by `begin`; they request `logprobs`.
    """

    width: int
    param: str
    params: SamplingParams

    @abstractmethod
    def begin(self, max_tokens: int, stop_ids: frozenset[int]) -> None:
        """Start the rule for an accepted request; no output will be longer than `max_tokens`."""

    @abstractmethod
    def step(self, outputs: Sequence[list[int]], found: Sequence[TokenLogprobs]) -> list[tuple[int, int]] | None:
        """Return the next sequences as (index of the sequence that is continued, next token); None at the end.

        Args:
            outputs: each sequence's tokens so far, without the prompt.
            found: each sequence's most likely next tokens.
        """

    @abstractmethod
    def endings(self) -> list[Ending]:
        """Return how each sequence ends, at least one entry; sequences beyond the list take the last entry."""


NO_ROOM = -1
"""What `EngineHook.admit` returns for a request that lacks a shared resource."""


class EngineHook:
    """The engine half of a feature. It keeps its own state per request and never sees the scheduler."""

    name: str = ""
    opt_in: bool = False
    """Skip the hook for requests without options for it: `on_commit` is not called for their tokens, and no method is
    called for steps in which only such requests compute single tokens."""
    tasks: tuple[str, ...] = ()
    """Tasks that it adds; see `ModelInfo.tasks`."""
    info: msgspec.Raw | None = None
    """Facts about the model for the feature's other parts; see `ModelInfo.feature_info`."""
    tier: Tier | None = None
    """Where it keeps KV blocks besides the device; the worker half moves them (`WorkerHook.load` and `store`)."""
    watcher: Watcher | None = None
    """Learns what the scheduler decides about all requests, with or without options for the feature."""
    sends_options: bool = True
    """The worker half gets the request's option (`WorkerHook.add`). False for a large one that it does not need."""
    admits_for_good: bool = False
    """`admit` never delays a request that computes single tokens, so it is not called for each of them."""
    max_drafts: int = 0
    """Most draft tokens that the worker half proposes after one sampled token; 0 for none. Buffers are sized by it."""
    max_chain: int = 0
    """Length of the longest chain of drafts; 0 means `max_drafts`. A request that gets more drafts than this gets all
    `max_drafts`, which form a tree (`WorkerHook.tree`)."""
    writes_ahead: bool = False
    """The worker half writes to the KV blocks of the tokens that it proposes, so they are reserved with the drafts."""

    @property
    def changed(self) -> bool:
        """Whether calls have changed what an engine that starts with the same settings does not know. Then a replica
        that dies is not started again, since it would differ from the others."""
        return False

    def call(self, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """Do what another part of the feature asks for, through `EngineClient.call`. Called between steps.

        If other engines must not lack what this changes, `changed` must be true from then on.

        Returns:
            A value of built-in types, or a future of one. This must not wait: work that takes long goes to a thread.

        Raises:
            InvalidRequestError: there is no such method, or it refuses the arguments. The caller gets this error, or
                any other of `core.errors`; the same holds for the future's.
        """
        raise InvalidRequestError(f"The feature {self.name!r} has no method {method!r}.", param="method", value=method)

    def lockstep(self, spec: GenerateRequest) -> Lockstep | None:
        """Return the rule that keeps the request's sequences in lockstep; None if they are independent.

        Called when the request arrives, only if it has options for this feature.
        """
        return None

    def admit(self, request: Request, num_tokens: int) -> int:
        """Return how many of `num_tokens` the request may compute now; 0 makes it wait, and others may pass it.

        `NO_ROOM` makes it wait, too, but no other request is admitted before it: it lacks something that others would
        take away as soon as it becomes free.

        Raises:
            InvalidRequestError: the request can't be served; it ends with this error.
        """
        return num_tokens

    def attach(self, pages: Pages) -> None:
        """Get access to KV blocks for the feature's own data. Called once, before any request."""

    def namespace(self, spec: GenerateRequest) -> str:
        """Return what else the KV of a new request depends on, such as its adapter; "" for nothing.

        Requests share KV only within one namespace. Called when the request arrives, only if it has options for this
        feature; changes nothing.

        Raises:
            InvalidRequestError: the request can't be served; it is refused.
        """
        return ""

    def revision(self, request: Request) -> str:
        """Return what the KV that a request is about to compute depends on besides `namespace`, and that may change
        while it waits, such as the content of its adapter's files; "" for nothing.

        Called, only if the request has options for this feature, before `admit`, each time its prefix is looked up. If
        `admit` then admits it, this must not change until it has lost its slot.
        """
        return ""

    def mark(self, request: Request) -> tuple[int, str] | None:
        """Return the prompt position from which on the KV depends on something besides `namespace`, and on what; None
        if there is none. Before it, the request shares KV with requests that lack the mark.

        Called like `revision`, and under the same condition.
        """
        return None

    def held_blocks(self, spec: GenerateRequest) -> int:
        """Return the KV blocks that the feature holds for the request while it runs, besides the request's own.

        A request that can't fit even alone is refused. Called likewise.
        """
        return 0

    def added_tokens(self, spec: GenerateRequest) -> int:
        """Return how many token ids beyond the model's vocabulary the request may use; `namespace` checks that it has
        no others. Called likewise. The worker half declares the most (`WorkerHook.added_tokens`)."""
        return 0

    def unbroken(self, spec: GenerateRequest) -> Sequence[tuple[int, int]]:
        """Return [start, end) ranges of prompt positions, ascending and disjoint, each computed in one step: none ends
        between them, whose tokens may so attend to each other. A step may begin there, after a cached prefix.

        A request with a range longer than a step is refused. Called likewise.
        """
        return ()

    def on_add(self, request: Request) -> None:
        """A sequence with options for this feature was accepted and waits. `on_release` is its end."""

    def waits(self, request: Request) -> bool:
        """Whether a request that `admit` made wait still does: asked first, since looking up a prefix takes longer."""
        return False

    def reclaim(self, num_blocks: int, request: Request) -> None:
        """Release leases of up to `num_blocks` blocks that no launched step reads, for a request that lacks them.

        Called before other requests are preempted. Don't release what `request` itself is waiting for.
        """

    @property
    def awaits(self) -> bool:
        """Whether a thread works on something with which `turn` goes on: an idle engine then calls it each
        millisecond."""
        return False

    def turn(self) -> None:
        """Take in what threads have done. Called before each plan, and from time to time while the engine is idle: soon
        after calls of features were answered."""

    def on_failure(self) -> None:
        """Launched steps are lost, and the worker half may not have seen their payloads. Leases are as they were."""

    def on_park(self) -> None:
        """All blocks lose their contents; nothing is in flight and no request has a slot. Release all leases."""

    def on_reset(self) -> None:
        """Cached contents are forgotten, as after `on_park`; running requests keep their blocks."""

    def on_weights(self) -> None:
        """The model's weights were replaced, after `on_park` if the KV cache was dropped. Nothing is in flight."""

    def waits_for(self, request: Request) -> str:
        """Return what the feature makes a waiting request wait for, for display; "" for nothing."""
        return ""

    def metrics(self) -> Sequence[FeatureMetric]:
        """Return the feature's gauges and counters, as of now."""
        return ()

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        """Add `draft.payload[name]`, or set `draft.needs_feedback`. If `draft.repeats`, `rows` equals that of the
        previous call."""

    def before_sample(self, plan: StepPlan, rows: Sequence[Request]) -> Any:
        """Return the worker half's payload for sampling; None for none.

        Called once per plan while its forward pass runs: after its `on_plan` and before the next plan's.
        """
        return None

    def drafts(self, request: Request) -> int | None:
        """Return the most drafts that may follow the next sampled token of the request; None sets no bound.

        The smallest bound of all features holds, or the largest `max_drafts` if none of them sets one. Called only if
        some feature has `max_drafts`, then for every request, and possibly more than once a step. While all bounds
        are 0, steps stay as cheap as without the feature. A feature whose worker half masks or changes logits must
        return 0 for its requests, unless it does so for every draft; see `on_drafts` and `WorkerHook.allowed`.
        """
        return None

    def on_drafts(self, request: Request, drafts: Sequence[int]) -> int:
        """Read the drafts that the request's next row verifies; return how many of the first ones may be accepted.

        Called after `on_commit` of the token before them, and before `on_plan` or, for a plan with `needs_feedback`,
        before `before_sample` of the step that verifies them. That step drops the others if it was not launched yet;
        it may also lack budget for some, see `StepPlan.num_drafts`.
        """
        return len(drafts)

    def on_verify(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Process the result of a row with room for `num_drafts` drafts: its first `num_accepted` were accepted.

        Fewer than `num_drafts` may have been proposed. Called before `on_commit`, whatever the request's options.
        """

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """Process tokens that were just appended. Return True to end the request with its output complete.

        Accepted drafts are appended, and passed to this method, one by one: those after the end are dropped.
        """
        return False

    def result(self, request: Request) -> bytes | None:
        """Return the data for the feature's text half at the end of the request; see `TextHook.answer`.

        Called only if the request has options for this feature.
        """
        return None

    def on_finish(self, request: Request, lease: Callable[[], Lease]) -> None:
        """The request has ended, and its KV blocks are about to be given back.

        Called for each choice that has blocks, before `on_release`, when all its steps have run; not after an error.

        Args:
            lease: call it to keep the blocks beyond the request, until the hook releases what it returns. While they
                are held, requests lack them: bound how many leases are held at once.
        """

    def on_release(self, request: Request) -> None:
        """Drop the state of a request that has ended. After a failure this may be called twice."""


def most_drafts(hooks: Sequence[EngineHook]) -> int:
    """Return how many drafts one row can have."""
    return max((hook.max_drafts for hook in hooks), default=0)


def lockstep_of(spec: GenerateRequest, hooks: Sequence[EngineHook]) -> Lockstep | None:
    """Return the lockstep rule that a feature sets for a new request; None if none does."""
    wanted = (hook.lockstep(spec) for hook in hooks if hook.name in spec.options)
    return next((one for one in wanted if one is not None), None) if spec.options else None


def namespaced(spec: GenerateRequest, hooks: Sequence[EngineHook], life: str) -> GenerateRequest:
    """Return the request in the namespace that its features make.

    Args:
        life: of this engine, unguessable: no user's namespace, and none of another engine, can equal those made here.
    """
    found = [(hook.name, hook.namespace(spec)) for hook in hooks if hook.name in spec.options]
    if not any(name for _, name in found):
        return spec
    return structs.replace(spec, namespace=repr((life, found, spec.namespace)))


def extended(spec: GenerateRequest, hooks: Sequence[EngineHook]) -> GenerateRequest:
    """Return the request with the `added_tokens` and the `unbroken` ranges of its features."""
    own = [hook for hook in hooks if hook.name in spec.options]
    added = max((hook.added_tokens(spec) for hook in own), default=0)
    ranges = sorted(each for hook in own for each in hook.unbroken(spec))
    return structs.replace(spec, added_tokens=added, unbroken=ranges) if added or ranges else spec


def revised(request: Request, hooks: Sequence[EngineHook]) -> str:
    """Return the namespace of a request with the `revision` of these hooks."""
    found = [(hook.name, hook.revision(request)) for hook in hooks if hook.name in request.spec.options]
    changed = [one for one in found if one[1]]
    return repr((request.spec.namespace, changed)) if changed else request.spec.namespace


def marked(request: Request, hooks: Sequence[EngineHook], life: str) -> Sequence[tuple[int, bytes]]:
    """Return the marks that these hooks make in a request's prompt. `life`: see `namespaced`."""
    found = [(hook.name, hook.mark(request)) for hook in hooks if hook.name in request.spec.options]
    return [(mark[0], repr((life, name, mark[1])).encode()) for name, mark in found if mark is not None]


def held_blocks(spec: GenerateRequest, hooks: Sequence[EngineHook]) -> int:
    """Return the blocks that features hold for the request while it runs."""
    return sum(hook.held_blocks(spec) for hook in hooks if hook.name in spec.options)


def added(hooks: Sequence[EngineHook], choices: Sequence[Request]) -> None:
    """Call `on_add` for the sequences of a request that was accepted. Failures are logged."""
    for hook in hooks:
        for request in choices:
            try:
                if hook.name in request.spec.options:
                    hook.on_add(request)
            except Exception:
                log.exception("feature %r failed to note request %s", hook.name, request.id)


def measured(hook: EngineHook) -> Sequence[FeatureMetric]:
    """Return a feature's metrics; none if it fails, which is logged."""
    try:
        return hook.metrics()
    except Exception:
        log.exception("feature %r failed to return its metrics", hook.name)
        return ()


def reason(hooks: Sequence[EngineHook], request: Request) -> str:
    """Return what features make a waiting request wait for; "" for nothing."""
    texts = (hook.waits_for(request) for hook in hooks if hook.name in request.spec.options)
    return ", ".join(text for text in texts if text) if request.finish is None else ""


def told(hooks: Sequence[EngineHook], event: str) -> None:
    """Call a method without arguments of all hooks, such as `on_failure`. Failures are logged."""
    for hook in hooks:
        try:
            getattr(hook, event)()
        except Exception:
            log.exception("feature %r failed in %s", hook.name, event)


def hooks_of(request: Request, hooks: Sequence[EngineHook]) -> tuple[EngineHook, ...]:
    """Return the hooks that must be called for this request."""
    return tuple(hook for hook in hooks if not hook.opt_in or hook.name in request.spec.options)


def admitted(
    hooks: Sequence[EngineHook], request: Request, num_tokens: int
) -> tuple[int, InvalidRequestError | RuntimeError | None]:
    """Call `admit` of all hooks; return the number of tokens that all admit, and the error that ends the request.

    A hook that fails gives a RuntimeError. Only this request is affected, since none of it was planned yet.
    """
    for hook in hooks:
        try:
            num_tokens = min(num_tokens, hook.admit(request, num_tokens))
        except InvalidRequestError as error:
            return 0, error
        except OctavoError as error:
            return 0, RuntimeError(str(error))
        except Exception as exc:
            log.exception("feature %r failed to admit request %s; the request ends", hook.name, request.id)
            return 0, RuntimeError(internal_error(exc))
    return num_tokens, None


def committed(hooks: Sequence[EngineHook], request: Request, tokens: Sequence[int]) -> tuple[bool, str | None]:
    """Call `on_commit` of the request's hooks; return whether its output is complete, and the error of a failed hook.

    A failure affects only this request: its step has run, and other requests' tokens are not touched.
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
            log.exception("feature %r failed on a token of request %s; the request ends", hook.name, request.id)
            failed = internal_error(exc)
    return complete, failed


def results(hooks: Sequence[EngineHook], request: Request) -> dict[str, bytes]:
    """Return `result` of each feature that the request has options for. Failures are logged and left out."""
    found: dict[str, bytes] = {}
    for hook in hooks:
        try:
            if hook.name in request.spec.options and (data := hook.result(request)) is not None:
                found[hook.name] = data
        except Exception:
            log.exception("feature %r failed to return the result of request %s", hook.name, request.id)
    return found


def turning(hooks: Sequence[EngineHook]) -> tuple[EngineHook, ...]:
    """Return the hooks that override `turn`."""
    return tuple(hook for hook in hooks if type(hook).turn is not EngineHook.turn)


def finishing(hooks: Sequence[EngineHook]) -> tuple[EngineHook, ...]:
    """Return the hooks that override `on_finish`."""
    return tuple(hook for hook in hooks if type(hook).on_finish is not EngineHook.on_finish)


def finished(hooks: Sequence[EngineHook], request: Request, cache: KVCache) -> None:
    """`on_finish` of those it concerns. A failure is logged, and leases that the hook took are released."""
    known = min(request.num_computed, len(request.tokens))
    for hook in hooks_of(request, hooks):
        before = set(cache.leases)
        try:
            hook.on_finish(request, partial(cache.lease, request.table, hook.name, known, request.num_computed))
        except Exception:
            log.exception("the feature %r failed at the end of request %s", hook.name, request.id)
            for lease in [one for one in cache.leases if one.owner == hook.name and one not in before]:
                lease.release()


def released(hooks: Sequence[EngineHook], request: Request) -> None:
    """Call `on_release` of all hooks for a request that has ended. Failures are logged and have no other effect."""
    for hook in hooks:
        try:
            hook.on_release(request)
        except Exception:
            log.exception("feature %r failed to release request %s", hook.name, request.id)
