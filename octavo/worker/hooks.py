"""`WorkerHook`: the interface through which a feature takes part in computing; each method has a do-nothing default."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.futures import done, mapped
from octavo.core.output import StepOutput
from octavo.core.plan import NewRow, StepPlan
from octavo.device.base import Device
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import EncoderModel, Model
from octavo.nn.build import Build
from octavo.nn.step import StepInput
from octavo.sampling.allowed import Allowed, in_common
from octavo.worker.blocks import Blocks
from octavo.worker.drafts import Drafting, Drafts

if TYPE_CHECKING:
    from octavo.worker.worker import Worker

Findings = Callable[[], tuple[Mapping[int, bytes], Mapping[int, str]]]
"""Wait for a feature's results: row -> encoded bytes, and row -> error."""

Variant = tuple[Hashable, ...]
"""One value per hook that overrides `variant`, in their order; `ORDINARY` if all are None."""

ORDINARY: Variant = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of a runner: requests at once, tokens of a request, tokens of a step, drafts of a row."""

    num_slots: int
    max_model_len: int
    max_step_tokens: int
    max_drafts: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Memory that features need besides the model's, in bytes.

    Attributes:
        weights: already allocated.
        workspace: of the largest step.
        block: for each block of the KV cache.
    """

    weights: int = 0
    workspace: int = 0
    block: int = 0

    def __add__(self, other: Reserved) -> Reserved:
        return Reserved(self.weights + other.weights, self.workspace + other.workspace, self.block + other.block)


@dataclass(frozen=True, slots=True)
class Site:
    """Context of a loaded model, for features that add layers or weights.

    Attributes:
        build: how the model's layers are made: dtype, device, scheme, attention backend.
        checkpoint: opens the files that the model's weights are from. Raises UnsupportedError if they were received as
            tensors.
        device: for transfers, streams and events.
        blocks: the KV cache, where a feature's own pages are (`schedule/pages.py`). Its memory is freed before `attach`
            is called again.
        room: limits of the runner; None for an encoder's.
        rank, ranks: this process's number among the ranks of the model, and how many there are. Each rank keeps a part
            of every KV page.
        neighbours: how many of them, itself included, are on this machine.
    """

    build: Build
    checkpoint: Callable[[], Checkpoint]
    device: Device
    blocks: Blocks
    room: Capacity | None = None
    rank: int = 0
    ranks: int = 1
    neighbours: int = 1


class WorkerHook:
    """The worker half of a feature. It keeps its own state per slot and never sees the runner.

    `payload` is the engine half's entry under `name` for this step, or None. Overriding a method never disables
    recorded steps (CUDA graphs, native decoding) for all steps. A single step is computed without a recording if it has
    a payload for a hook with `embed` or `after_forward`, or if its variant is not recorded; a payload for a hook with
    `apply` only makes its sampling unrecorded.

    Order of calls in a step: `add`, `lay_out`, `variant`, `select`, `inputs`, `additions`, `embed`, `after_forward`,
    `allowed`, `apply`, `drawn`, `propose`, `after_sample`.
    """

    name: str = ""
    last_stage_only: bool = False
    """It takes part only where tokens are sampled: other stages of a pipeline go without it."""
    added_tokens: int = 0
    """Most columns of logits beyond the model's vocabulary, in steps with rows that have `NewRow.added_tokens`. The
    hook computes them, with minus infinity for other rows. Only without ranks or drafts."""

    tree: DraftTree | None = None
    """The shape of drafts that branch: a row with more than `tree.chain` of them, which only the engine half allows,
    has all of the tree."""

    looks_ahead: bool = False
    """Its `inputs` may have `StepInput.ahead`."""

    def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
        """Load what the feature needs besides the model, before the memory that is left becomes the KV cache.

        Called once, when the model's weights are loaded, for models with a KV cache.

        Args:
            worker: of the model; a `Companion` of it can load another model.
            limits: sequences at once, and tokens of a step, at most.

        Raises:
            ConfigError: it can't be used with this model.
        """
        return Reserved()

    def restage(self, checkpoint: Checkpoint) -> Callable[[], None] | None:
        """Read the feature's part of new weights of the model, in any thread, while steps run with the current ones.

        Returns:
            Function that puts them in place, called between steps; None if the checkpoint has none of it.

        Raises:
            ConfigError, ModelFileError: they are not of the feature's form.
        """
        return None

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        """Wrap the layers of the loaded model, load weights. Called again, with this model or another one, when a
        sleeping engine wakes up."""

    def buffers(self, max_rows: int, max_tokens: int) -> Mapping[str, Tensor]:
        """Allocate the memory that `lay_out` fills, once and at fixed addresses, so that recorded steps can read it.

        Called after `attach`, before anything is recorded.

        Args:
            max_rows, max_tokens: bounds of a step, padding included.

        Returns:
            Name of an optional field of `StepInput` -> [max_tokens, ...] tensor, which becomes this field of every
            step, cut to its tokens. Buffers for the hook's own layers need not be returned.
        """
        return {}

    def variants(self) -> Sequence[Hashable]:
        """Return the values of `variant`, other than None, to record steps for."""
        return ()

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        """Start the state of a request that took this slot. `options`: its encoded options for this feature."""

    def lay_out(self, plan: StepPlan, payload: Any) -> None:
        """Fill the buffers for the plan's rows and tokens, which are in the plan's order.

        Called for every step before it is computed or replayed. Results for padding are never used.
        """

    def variant(self, payload: Any) -> Hashable | None:
        """Return the variant of the model that computes this step; None for the model as loaded."""
        return None

    def select(self, variant: Hashable | None) -> None:
        """Make the wrapped layers compute this variant from now on; called before they compute or are recorded."""

    def only_row(self, row: int | None, count: int = 0) -> None:
        """The logits that are computed next are `count` rows, all of the prompt of this row of the plan. None: they
        are those of the plan again, in its order, as after `lay_out`."""

    def detach(self) -> None:
        """Drop all references to the memory of `Site.blocks`, which is about to be freed. No step follows before
        `attach`."""

    def embed(self, x: Tensor, payload: Any) -> None:
        """Overwrite embeddings in `x` [T, H], the input of the first layer. Called only with a payload."""

    def inputs(self, num_tokens: int, payload: Any) -> Mapping[str, Tensor]:
        """Return optional fields of `StepInput` for a step with embeddings of `embed`, whose other steps lack them.

        Called only with a payload, before the attention backend prepares the step; on all stages of a pipeline.
        """
        return {}

    def additions(self, count: int, payload: Any) -> Sequence[Tensor]:
        """Return `StepInput.additions` of a step of `count` tokens; on every stage of a pipeline. Called only with a
        payload, for one feature at most."""
        return ()

    def after_forward(self, hidden: Tensor, payload: Any) -> Findings | None:
        """Read `hidden` [T, H], the output of `Model.forward`. Called only with a payload.

        Returns:
            The results of requests that end with their prompt; None for none.
        """
        return None

    def allowed(self, slots: Sequence[int], payload: Any) -> Allowed | None:
        """Return the allowed tokens of rows of logits; row i belongs to `slots[i]`. Called only with a payload.

        Cheaper than `apply`, since the samplers apply the masks themselves. A slot with k drafts has 1 + k consecutive
        rows: for the token after no draft, after the first draft, and so on. The engine half knows the drafts if it
        has `EngineHook.on_drafts`; otherwise it must not allow any (`EngineHook.drafts`). What is drawn after more
        drafts than were proposed, or after one that is impossible, is never used.
        """
        return None

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Any) -> Mapping[int, str]:
        """Change rows of logits [S, vocab] in place; row i belongs to `slots[i]`, as in `allowed`. Called only with a
        payload.

        Returns:
            Row -> error text, for requests that can't be sampled and end.
        """
        return {}

    def drawn(self, plan: StepPlan, tokens: Tensor, length: Tensor, order: Tensor | None) -> None:
        """Follow a plan's tokens, which were drawn and appended. Must not wait for the device.

        Args:
            order: [T] int64, the step's tokens in the order of their positions, if drafts branched; see `Drawn`.
            tokens: [slots, max_model_len], the tokens of each slot, on the device; not to be changed.
            length: [slots], number of known tokens, likewise.
        """

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        """Return tokens that may follow those just drawn; None leaves it to the next hook, or to none.

        Called if the plan has `proposals`, as a result of the engine half's `max_drafts` and `drafts`. Must not wait
        for the device. The next step computes the drafts, draws the model's own token after each, and keeps those that
        agree (`sampling/verify.py`): drafts change how many tokens a step yields, never which. Rejected positions are
        computed again; `drafting.length` tells a drafter with a cache of its own how much of it is still valid.
        """
        return None

    def after_sample(self, plan: StepPlan, output: StepOutput) -> None:
        """Update state after the step's tokens have arrived."""

    def call(self, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """Do what the engine half asks for, through `Pages.call`. Called between steps, in order with them.

        Returns:
            A value of built-in types, or a future of one. This must not wait: work that takes long goes to a thread.
        """
        raise InvalidRequestError(f"The feature {self.name!r} has no method {method!r}.", param="method", value=method)

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        """Keep pages of the KV cache. Called for a feature with a `Tier`, in any thread, by one at a time. Must not
        wait for I/O. A large store makes several calls.

        Args:
            names: one a page, each of the same length; see `cache/tier.py`. All ranks of a divided model get the same:
                where they share storage, add `Site.rank`.
            pages: [n, page bytes] uint8 in the host's memory, the hook's own from now on. On a GPU it is pinned memory,
                which is scarce and slow to allocate, and is reused once it is released: copy what is kept, in a thread.

        Returns:
            The indices of pages that could not be kept, when all others can be loaded.
        """
        raise NotImplementedError

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        """Load what `store` was given under these names; likewise: on a GPU also where the result of another load is
        set. So hold no lock there that this takes.

        Args:
            room: returns [n, page bytes] uint8, to be filled. Call it once, in a thread: on a GPU, without `rooms`, it
                may allocate pinned memory, which takes longer than a step.

        Returns:
            The indices of pages that could not be loaded, when nothing writes to the room any more.
        """
        raise NotImplementedError

    def rooms(self, page_bytes: int) -> tuple[int, int]:
        """Return how many pages a room has and how many rooms there are. Their memory is reserved; loads allocate none.

        What has more pages than a room is loaded by several calls of `load`, with consecutive names each; if one of
        them fails, so has all. At most as many are under way at once as there are rooms. Called after `buffers`.
        Without rooms, each load is one call, and its memory is allocated when it begins.
        """
        return 0, 0


class Hooks:
    """The worker halves of all features, called in order as one hook."""

    def __init__(self, hooks: Sequence[WorkerHook] = ()) -> None:
        self._hooks = tuple(hooks)
        self.preparing = _with_own(hooks, "prepare")
        """The hooks that load weights besides the model's."""
        self.added_tokens = max((hook.added_tokens for hook in hooks), default=0)
        self.tree = next((hook.tree for hook in hooks if hook.tree is not None), None)
        self.looks_ahead = any(hook.looks_ahead for hook in hooks)
        self._laying_out = _with_own(hooks, "lay_out")
        self._varying = _with_own(hooks, "variant")
        self._narrowing = _with_own(hooks, "only_row")
        self._embedding = _with_own(hooks, "embed")
        self._adding = _with_own(hooks, "additions")
        self._stating = _with_own(hooks, "inputs")
        self._reading = _with_own(hooks, "after_forward")
        self._allowing = _with_own(hooks, "allowed")
        self._changing = _with_own(hooks, "apply")
        self.drawing = _with_own(hooks, "drawn")
        """The hooks that follow the tokens drawn."""
        self._proposing = _with_own(hooks, "propose")
        self._following = _with_own(hooks, "after_sample")
        self.tiers = {hook.name: hook for hook in _with_own(hooks, "load")}
        """The hooks that keep pages, by name."""
        self._inputs: dict[str, Tensor] = {}

    def attach(self, model: Model | EncoderModel, site: Site, max_rows: int, max_tokens: int) -> None:
        """Attach all hooks and collect their buffers."""
        optional = {field.name for field in fields(StepInput) if field.default is None}
        for hook in self._hooks:
            hook.attach(model, site)
        for hook in self._hooks:
            for name, buffer in hook.buffers(max_rows, max_tokens).items():
                if name not in optional or name in self._inputs:
                    raise AssertionError(f"feature {hook.name!r} can't provide {name!r}: unknown or already provided")
                self._inputs[name] = buffer

    def add(self, new: Sequence[NewRow]) -> None:
        """Start the state of requests that took slots."""
        for row in new:
            for hook in self._hooks:
                hook.add(row.slot, row.options.get(hook.name))

    def lay_out(self, plan: StepPlan) -> None:
        for hook in self._laying_out:
            hook.lay_out(plan, plan.payload.get(hook.name))

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        """Call the hook of this name; see `WorkerPort.call_hook`. Raises what its `call` raises."""
        hook = next((hook for hook in self._hooks if hook.name == feature), None)
        if hook is None:
            raise UnsupportedError(f"The worker does not have the feature {feature!r}.")
        value = hook.call(method, args)
        return mapped(value if isinstance(value, Future) else done(value), lambda result: [result])

    def bind(self, step: StepInput) -> None:
        """Set the hooks' buffers as fields of a step's input."""
        for name, buffer in self._inputs.items():
            setattr(step, name, buffer[: step.num_tokens])

    def add_inputs(self, step: StepInput, payload: Mapping[str, Any]) -> None:
        """Set the fields that hooks with a payload have for this step, in the steps of its other cache groups, too."""
        for hook in _concerned(self._stating, payload):
            for name, value in hook.inputs(step.num_tokens, payload[hook.name]).items():
                for one in (step, *step.others):
                    setattr(one, name, value)

    @property
    def varies(self) -> bool:
        """Whether a hook has variants of the model, such as with and without adapters."""
        return bool(self._varying)

    def variants(self) -> list[Variant]:
        """Return all variants to record, the ordinary one first."""
        each = [(None, *hook.variants()) for hook in self._varying]
        return [_variant(values) for values in itertools.product(*each)]

    def variant(self, payload: Mapping[str, Any]) -> Variant:
        """Return the variant of a step with this payload."""
        if not self._varying:
            return ORDINARY
        return _variant(tuple(hook.variant(payload.get(hook.name)) for hook in self._varying))

    def select(self, variant: Variant) -> None:
        if self._varying:
            for hook, one in zip(self._varying, variant or itertools.repeat(None), strict=False):
                hook.select(one)

    def only_row(self, row: int | None, count: int = 0) -> None:
        for hook in self._narrowing:
            hook.only_row(row, count)

    def detach(self) -> None:
        """Let all hooks drop the KV cache; the layers compute the model as loaded."""
        self.select(ORDINARY)
        for hook in self._hooks:
            hook.detach()

    def embed(self, x: Tensor, payload: Mapping[str, Any]) -> None:
        for hook in _concerned(self._embedding, payload):
            hook.embed(x, payload[hook.name])

    def additions(self, count: int, payload: Mapping[str, Any]) -> Sequence[Tensor]:
        """Return what the hooks with a payload add to the residual stream after the first layers."""
        found = [
            one for hook in _concerned(self._adding, payload) if (one := hook.additions(count, payload[hook.name]))
        ]
        assert len(found) < 2, "two features add to the residual stream"
        return found[0] if found else ()

    def after_forward(self, hidden: Tensor, payload: Mapping[str, Any]) -> dict[str, Findings]:
        """Return name -> results of the hooks with a payload."""
        found = {
            hook.name: hook.after_forward(hidden, payload[hook.name]) for hook in _concerned(self._reading, payload)
        }
        return {name: findings for name, findings in found.items() if findings is not None}

    def allowed(self, slots: Sequence[int], payload: Mapping[str, Any]) -> Allowed | None:
        """Return the tokens that all hooks with a payload allow; None if all tokens are allowed."""
        parts = [hook.allowed(slots, payload[hook.name]) for hook in _concerned(self._allowing, payload)]
        return in_common([part for part in parts if part is not None])

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Mapping[str, Any]) -> dict[int, str]:
        """Let the hooks with a payload change the logits in place; return row -> error text."""
        failed: dict[int, str] = {}
        for hook in _concerned(self._changing, payload):
            failed.update(hook.apply(logits, slots, payload[hook.name]))
        return failed

    def drawn(self, plan: StepPlan, tokens: Tensor, length: Tensor, order: Tensor | None) -> None:
        for hook in self.drawing:
            hook.drawn(plan, tokens, length, order)

    def propose(self, drafting: Drafting, payload: Mapping[str, Any]) -> Drafts | None:
        """The drafts of the first hook that proposes some."""
        proposed = (hook.propose(drafting, payload.get(hook.name)) for hook in self._proposing)
        return next((drafts for drafts in proposed if drafts is not None), None)

    def after_sample(self, plan: StepPlan, output: StepOutput) -> None:
        for hook in self._following:
            hook.after_sample(plan, output)

    def feed(self, payload: Mapping[str, Any]) -> bool:
        """Return whether a hook has embeddings for a step with this payload."""
        return bool(payload) and any(_concerned(self._embedding, payload))

    def read_hidden(self, payload: Mapping[str, Any]) -> bool:
        """Return whether a hook reads all hidden states of a step with this payload."""
        return bool(payload) and any(_concerned(self._reading, payload))

    def change_logits(self, payload: Mapping[str, Any]) -> bool:
        """Return whether a hook changes the logits of a step with this payload, other than by masks."""
        return bool(payload) and any(_concerned(self._changing, payload))


def _with_own(hooks: Sequence[WorkerHook], method: str) -> list[WorkerHook]:
    """Return the hooks that override a method."""
    return [hook for hook in hooks if getattr(type(hook), method) is not getattr(WorkerHook, method)]


def _concerned(hooks: Sequence[WorkerHook], payload: Mapping[str, Any]) -> list[WorkerHook]:
    return [hook for hook in hooks if payload.get(hook.name) is not None] if payload else []


def _variant(values: Variant) -> Variant:
    return ORDINARY if all(value is None for value in values) else values


def gather(findings: Mapping[str, Findings]) -> tuple[dict[int, dict[str, bytes]], dict[int, str]]:
    """Wait for all results; return row -> feature name -> bytes, and row -> error text."""
    found: dict[int, dict[str, bytes]] = {}
    errors: dict[int, str] = {}
    for name, wait in findings.items():
        made, failed = wait()
        errors.update(failed)
        for row, data in made.items():
            found.setdefault(row, {})[name] = data
    return found, errors
