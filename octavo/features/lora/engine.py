"""`LoraEngine`: the engine half. It brings adapters to the device for requests, and tells the worker half which row of
a step has which."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError
from octavo.core.plan import PlanDraft
from octavo.core.request import GenerateRequest
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.lora.activation import activated_at
from octavo.features.lora.layout import most_blocks
from octavo.features.lora.names import Names
from octavo.features.lora.payload import NAME, AdapterEntry, LoraStep, RankTargets
from octavo.features.lora.requests import CHANGES, LoraInfo, decode, not_loaded
from octavo.features.lora.residency import Residency
from octavo.features.lora.settings import LoraSettings
from octavo.features.lora.weights import AdapterWeights, State
from octavo.schedule.hooks import EngineHook
from octavo.schedule.pages import Pages
from octavo.schedule.request import Request

log = logging.getLogger(__name__)

_BASE = -1
_LONG_WAIT_S = 1.0
"""Waits from this on are logged."""
_REPEATED = {
    (general, experts): LoraStep(general=general, experts=experts)
    for general in (False, True)
    for experts in (False, True)
}


class LoraEngine(EngineHook):
    """Adapters for requests. `clock`: seconds."""

    name = NAME
    opt_in = True
    admits_for_good = True

    def __init__(self, settings: LoraSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._names: Names
        self._residency: Residency
        self._vocabulary = self._changes_at_start = 0
        self._any_pinned = False
        self._of: dict[Request, AdapterWeights] = {}
        """The adapter of each request that is not released, and has one."""
        self._starts: dict[Request, int] = {}
        """Where activated adapters begin in these requests."""
        self._inactive = 0
        self._since: dict[Request, float] = {}
        """When requests began to wait."""
        self._pinning: list[tuple[AdapterWeights, Future[Any]]] = []
        self._unloading: list[tuple[set[AdapterWeights], Future[Any]]] = []
        self._leaving: list[AdapterWeights] = []
        """Retired weights that are still used, or on their way."""
        self._found: list[AdapterWeights] = []
        """Adapters that the last turn found, for requests that come next."""
        self._tokens: Counter[str] = Counter()
        self._waited_s = 0.0
        self._repeated: LoraStep | None = None

    def attach(self, pages: Pages) -> None:
        settings = self._settings
        ranks = [msgspec.convert(one, RankTargets) for one in pages.call("targets", {}).result()]
        targets, shares = ranks[0].targets, {one.share for one in ranks}
        self._residency = Residency(pages, settings.most_on_device, settings.most_on_host, self._clock)
        self._names = Names(
            settings,
            targets,
            partial(most_blocks, targets, shares=shares),
            pages.num_blocks,
            self._retire,
            replaceable=ranks[0].replaceable,
        )
        for module in settings.modules():
            self._names.add(module)
        self._changes_at_start = self._names.changes
        self._vocabulary = next((one.parts[0].inputs for one in targets if one.embedding), 0)
        info = LoraInfo(
            max_rank=settings.highest_rank,
            max_adapters=settings.most_on_device,
            adapters=len(self._names),
            updates=settings.allow_runtime_lora_updating,
            added_tokens=settings.lora_extra_vocab_size,
        )
        self.info = msgspec.Raw(msgspec.msgpack.encode(info))

    # Calls

    @property
    def changed(self) -> bool:
        """Whether names came or went since the start, or one was pinned."""
        return self._any_pinned or self._names.changes > self._changes_at_start

    def call(self, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """See `requests.py`."""
        match method:
            case "list":
                return {"adapters": self._names.all()}
            case "find":
                return self._names.find(_text(args, "name"))
            case "load":
                flags = {key: bool(args.get(key, False)) for key in ("in_place", "again")}
                return self._names.load(_text(args, "name"), _text(args, "path"), **flags)
            case "unload":
                return self._unload(_text(args, "name"))
            case "pin":
                return self._pin(_text(args, "name"), pinned=bool(args.get("pinned", True)))
        return super().call(method, args)

    def _unload(self, name: str) -> Future[Any]:
        known = self._names.get(name)
        if known is None:
            raise not_loaded(name)
        before = set(self._leaving)
        self._names.unload(name)
        future: Future[Any] = Future()
        self._unloading.append((set(self._leaving) - before, future))
        self._answer_unloads()
        return future

    def _pin(self, name: str, *, pinned: bool) -> Any | Future[Any]:
        known = self._names.get(name)
        if known is None:
            raise not_loaded(name)
        known.weights.pinned = pinned
        self._any_pinned = True
        if not pinned or known.weights.state is State.DEVICE:
            return {}
        known.weights.error = None
        future: Future[Any] = Future()
        self._pinning.append((known.weights, future))
        return future

    @property
    def awaits(self) -> bool:
        return self._residency.reads_any

    def turn(self) -> None:
        """Take in what threads have done, and go on with what no request asks for."""
        self._read_found()
        self._found = self._names.poll()
        self._residency.poll()
        if self._pinning:
            self._pinning = [
                (weights, future) for weights, future in self._pinning if not self._pinned(weights, future)
            ]
        if self._leaving:
            self._free_retired()

    def _read_found(self) -> None:
        """Begin to read adapters that were found, while front ends hear of it and send the requests.

        Not at once in an idle engine: a thread that reads would delay the answer. A step delays it in any case.
        """
        found, self._found = self._found, []
        for weights in found:
            if not weights.retired:
                self._residency.prefetch(weights)

    def _pinned(self, weights: AdapterWeights, future: Future[Any]) -> bool:
        """Take a pinned adapter further to the device; return whether it is there, or has failed."""
        if weights.error is not None:
            future.set_exception(weights.error)
        elif weights.state is State.DEVICE:
            future.set_result({})
        else:
            self._residency.bring(weights, None)
        return future.done()

    def _retire(self, weights: AdapterWeights) -> None:
        """No name leads to these weights any more."""
        weights.pinned = False
        after = self._names.get(weights.label)
        for pinned, future in [one for one in self._pinning if one[0] is weights]:
            self._pinning.remove((pinned, future))
            if after is None:
                future.set_exception(EngineStateError(f"The adapter {weights.label!r} was unloaded."))
            else:
                self._pinning.append((after.weights, future))
        self._leaving.append(weights)
        self._free_retired()

    def _free_retired(self) -> None:
        self._leaving = [one for one in self._leaving if one.requests or not self._residency.remove(one)]
        self._answer_unloads()

    def _answer_unloads(self) -> None:
        for weights, future in list(self._unloading):
            if weights.isdisjoint(self._leaving):
                self._unloading.remove((weights, future))
                future.set_result({})

    # A request

    def namespace(self, spec: GenerateRequest) -> str:
        weights = self._weights_of(spec)
        if self._settings.lora_extra_vocab_size:
            self._check_tokens(spec, self._vocabulary + weights.added_tokens)
        return str(weights.uid) if weights.changes_keys and not weights.manifest.invocation else ""

    def _check_tokens(self, spec: GenerateRequest, size: int) -> None:
        """Raise InvalidRequestError if a request has tokens that its adapter lacks. Front ends know only the most that
        adapters may add."""
        params = spec.params
        given: dict[str, Iterable[int]] = {"prompt": spec.tokens, "stop_token_ids": params.stop_token_ids or ()}
        given |= {"logit_bias": params.logit_bias or (), "allowed_token_ids": params.allowed_token_ids or ()}
        given["logprob_token_ids"] = params.logprob_token_ids or ()
        for field, tokens in given.items():
            odd = max(tokens, default=0)
            if odd >= size:
                text = f"Token id {odd} is out of vocabulary: with this adapter, ids go from 0 to {size - 1}."
                raise InvalidRequestError(text, param=field, value=odd)

    def added_tokens(self, spec: GenerateRequest) -> int:
        return self._weights_of(spec).added_tokens

    def revision(self, request: Request) -> str:
        """The files may have changed since they were read before, without a name that came or went."""
        weights = self._of.get(request)
        return weights.version if weights is not None and weights.changes_keys and request not in self._starts else ""

    def mark(self, request: Request) -> tuple[int, str] | None:
        weights, start = self._of.get(request), self._starts.get(request)
        if weights is None or start is None or not weights.changes_keys:
            return None
        return start, f"{weights.uid} {weights.version}"

    def held_blocks(self, spec: GenerateRequest) -> int:
        weights = self._weights_of(spec)
        return 0 if activated_at(weights.manifest.invocation, spec.tokens) is None else weights.num_blocks

    def _weights_of(self, spec: GenerateRequest) -> AdapterWeights:
        try:
            selection = decode(spec.options[NAME])
        except msgspec.DecodeError as error:
            raise InvalidRequestError(
                f"The adapters of the request have another form: {error}", param="model"
            ) from None
        return self._names.weights_of(selection)

    def on_add(self, request: Request) -> None:
        weights = self._weights_of(request.spec)
        invocation = weights.manifest.invocation
        start = activated_at(invocation, request.spec.tokens)
        if start is None:
            self._inactive += not request.index
            return
        if invocation:
            self._starts[request] = start
        self._of[request] = weights
        weights.requests.add(request)
        self._residency.touch(weights)
        self._residency.prefetch(weights)
        self._residency.load_ahead(weights)

    def admit(self, request: Request, num_tokens: int) -> int:
        weights = self._of.get(request)
        if weights is None:
            return num_tokens
        if weights.refused and (error := weights.refused.pop(request, None)) is not None:
            raise error
        if weights.state is State.DEVICE and not (weights.closed and request.slot < 0):
            if self._since:
                self._no_longer_waits(request, weights)
            return num_tokens
        self._since.setdefault(request, self._clock())
        return self._residency.bring(weights, request)

    def _no_longer_waits(self, request: Request, weights: AdapterWeights) -> None:
        since = self._since.pop(request, None)
        if since is not None:
            waited = self._clock() - since
            self._waited_s += waited
            level = logging.INFO if waited > _LONG_WAIT_S else logging.DEBUG
            log.log(level, "request %s waited %.0f ms for the adapter %s", request.id, 1000 * waited, weights.label)

    def waits_for(self, request: Request) -> str:
        since, weights = self._since.get(request), self._of.get(request)
        if since is None or weights is None:
            return ""
        state = "leaves for another adapter" if weights.closed else weights.state
        return f"adapter {weights.label} ({state}, {1000 * (self._clock() - since):.0f} ms)"

    def reclaim(self, num_blocks: int, request: Request) -> None:
        self._residency.reclaim(num_blocks, self._of.get(request))

    def on_release(self, request: Request) -> None:
        weights = self._of.pop(request, None)
        if weights is None:
            return
        self._since.pop(request, None)
        self._starts.pop(request, None)
        weights.requests.discard(request)
        weights.refused.pop(request, None)
        self._count(self._tokens, request, weights)
        self._residency.touch(weights)
        if weights.stale and not weights.read_by_steps:
            self._residency.evict(weights)
        if weights.retired:
            self._free_retired()
        elif weights.parts and not weights.requests and weights.state is State.DISK:
            self._names.forget_sum(weights)

    # A step

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        if self._found:
            self._read_found()
        if draft.repeats:
            if self._repeated is not None:
                draft.payload[NAME] = self._repeated
            return
        self._repeated = None
        if not self._of:
            return
        found = [self._of.get(request) for request in rows]
        used = {weights for weights in found if weights is not None}
        self._residency.in_steps = used
        if not used:
            return
        entries = [self._entry(weights) for weights in used if not weights.announced]
        kind = any(weights.general for weights in used), any(weights.experts for weights in used)
        indices = [_BASE if weights is None else weights.index for weights in found]
        draft.payload[NAME] = LoraStep(entries, indices, *kind, self._skipped(draft, rows))
        self._repeated = _REPEATED[kind]
        for weights in used:
            weights.hasty = False
            self._residency.touch(weights)

    def _skipped(self, draft: PlanDraft, rows: Sequence[Request]) -> list[int] | None:
        """Return how many of each row's tokens come before its adapter begins; None if none do."""
        if not self._starts:
            return None
        skipped = [
            min(max(self._starts.get(request, 0) - (request.num_computed - count), 0), count)  # counted with this step
            for request, count in zip(rows, draft.num_tokens, strict=True)
        ]
        return skipped if any(skipped) else None

    def _entry(self, weights: AdapterWeights) -> AdapterEntry:
        assert weights.lease is not None, f"a row has the adapter {weights.label}, which is not on the device"
        weights.announced = True
        return AdapterEntry(weights.index, weights.uid, list(weights.lease.held))

    # The engine

    def on_failure(self) -> None:
        self._residency.renounce()

    def on_park(self) -> None:
        self._residency.park()

    def on_weights(self) -> None:
        """Gains were computed with the former weights."""
        self._residency.weights_replaced()
        for one in self._residency.everything:
            if one.gains:
                self._residency.outdate(one)

    def _count(self, tokens: Counter[str], request: Request, weights: AdapterWeights) -> None:
        for name in weights.names:
            tokens[name] += request.num_output

    def metrics(self) -> Sequence[FeatureMetric]:
        tokens = Counter(self._tokens)
        for request, weights in self._of.items():
            self._count(tokens, request, weights)
        residency = self._residency
        places = {"device": len(residency.resident), "host": residency.num_on_host, "known": len(self._names)}
        return (
            _gauge("lora_adapters", "LoRA adapters in the device's memory, in the host's, and known.", places, "place"),
            _gauge("lora_blocks", "KV blocks that hold LoRA adapters.", residency.num_blocks),
            _counter(CHANGES, "Times that an adapter's name was added, removed or replaced.", self._names.changes),
            _counter("lora_reads", "LoRA adapters read from disk.", residency.reads),
            _counter("lora_loads", "LoRA adapters loaded into the device's memory.", residency.loads),
            _counter("lora_read_seconds", "Seconds to read LoRA adapters, until they can be loaded.", residency.read_s),
            _counter("lora_load_seconds", "Seconds to load LoRA adapters into the device's memory.", residency.load_s),
            _counter("lora_evictions", "LoRA adapters evicted from the device's memory.", residency.evictions),
            _counter("lora_wait_seconds", "Seconds that requests waited for LoRA adapters.", self._waited_s),
            _counter(
                "lora_inactive_requests",
                "Requests that the base model answers, since their prompts lack the adapter's invocation tokens.",
                self._inactive,
            ),
            _counter("lora_tokens", "Tokens generated, by LoRA adapter.", dict(tokens), "adapter"),
        )


def _gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> FeatureMetric:
    return _metric(name, "gauge", text, value, label)


def _counter(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> FeatureMetric:
    return _metric(name, "counter", text, value, label)


def _metric(name: str, kind: str, text: str, value: float | Mapping[str, float], label: str) -> FeatureMetric:
    values = dict(value) if isinstance(value, Mapping) else {"": value}
    return FeatureMetric(name, kind, text, label, values)


def _text(args: Mapping[str, Any], key: str) -> str:
    value = args.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{key} must be a text that is not empty.", param=key, value=value)
    return value


def build_engine(context: FeatureContext) -> LoraEngine | None:
    settings = context.settings_of(LoraSettings)
    if not settings.enabled:
        return None
    if context.whole_prompts:
        raise ConfigError(f"{context.model_name} is an encoder, which has no adapters. Leave out --enable-lora.")
    folder = settings.lora_dir
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise ConfigError(
            f"--lora-dir {folder}: there is no such folder on the engine's machine. Correct the path or make it."
        )
    return LoraEngine(settings)
