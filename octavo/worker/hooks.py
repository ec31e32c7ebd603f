"""`WorkerHook`: the seam through which a feature takes part in computing; each method has a do-nothing default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from octavo.core.output import StepOutput
from octavo.core.plan import NewRow
from octavo.models.model import EncoderModel, Model
from octavo.nn.step import StepInput
from octavo.sampling.allowed import Allowed, in_common

Findings = Callable[[], tuple[Mapping[int, bytes], Mapping[int, str]]]
"""Waits for what a feature made of rows, encoded, and for the reasons why it could make nothing of others."""


class WorkerHook:
    """The worker half of a feature. It keeps its own state by slot and never sees the runner.

    `payload` is what the engine half put under `name` for this step; None if it put nothing. A hook takes part in what
    it overrides: one that overrides neither `before_forward` nor `after_sample` leaves recorded decoding as it is.
    """

    name: str = ""

    def attach(self, model: Model | EncoderModel) -> None:
        """The model is loaded; wrap what must be wrapped. It may go while the engine sleeps, unless a hook keeps it,
        and another come."""

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        """A request took this slot, with its options for this feature."""

    def before_forward(self, step: StepInput, payload: Any) -> None:
        """The batch is laid out; the model has not run."""

    def embed(self, x: Tensor, payload: Any) -> None:
        """Put embeddings of one's own into `x` [T, H], what the model is fed. Only called with a payload."""

    def after_forward(self, hidden: Tensor, payload: Any) -> Findings | None:
        """The model has run: `hidden` [T, H] is what `Model.forward` gave. Only called with a payload.

        Returns what goes back to the clients of requests that end with their prompt.
        """
        return None

    def allowed(self, slots: Sequence[int], payload: Any) -> Allowed | None:
        """Which tokens are possible in rows of logits; row i belongs to `slots[i]`. Only called with a payload.

        It costs less than to change logits: those who sample mind it by themselves.
        """
        return None

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Any) -> Mapping[int, str]:
        """Change the rows of logits [S, vocab] in place; row i belongs to `slots[i]`. Only called with a payload.

        Returns row -> why it can't be sampled, for requests that end here.
        """
        return {}

    def after_sample(self, step: StepInput, output: StepOutput) -> None:
        """The step's tokens are known."""


class Hooks:
    """The worker halves of all features, asked in their order as if they were one."""

    def __init__(self, hooks: Sequence[WorkerHook] = ()) -> None:
        self._hooks = tuple(hooks)
        self.follow_steps = any(map(_follows_steps, hooks))
        """Whether one must be told of each step's batch, and not only change logits when there is a payload for it."""

    def attach(self, model: Model | EncoderModel) -> None:
        for hook in self._hooks:
            hook.attach(model)

    def add(self, new: Sequence[NewRow]) -> None:
        """These requests took their slots."""
        for row in new:
            for hook in self._hooks:
                hook.add(row.slot, row.options.get(hook.name))

    def before_forward(self, step: StepInput, payload: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            hook.before_forward(step, payload.get(hook.name))

    def embed(self, model: Model, step: StepInput, payload: Mapping[str, Any]) -> Tensor:
        """What the model's layers are fed, [T, H]: embeddings of tokens, and those that hooks have instead."""
        if not self.feed(payload):
            return model.embed(step)
        step.input_ids.clamp_(min=0)  # placeholders are no rows of a table
        x = model.embed(step)
        for hook in self._with(payload):
            hook.embed(x, payload[hook.name])
        return x

    def after_forward(self, hidden: Tensor, payload: Mapping[str, Any]) -> dict[str, Findings]:
        """What those that have a payload make of `hidden` [T, H], by their names."""
        found = {hook.name: hook.after_forward(hidden, payload[hook.name]) for hook in self._with(payload)}
        return {name: findings for name, findings in found.items() if findings is not None}

    def allowed(self, slots: Sequence[int], payload: Mapping[str, Any]) -> Allowed | None:
        """What all that have a payload allow; None if none of them forbids anything."""
        parts = [hook.allowed(slots, payload[hook.name]) for hook in self._with(payload)]
        return in_common([part for part in parts if part is not None])

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Mapping[str, Any]) -> dict[int, str]:
        """Those that have a payload change the logits in place; all their errors by row."""
        failed: dict[int, str] = {}
        for hook in self._with(payload):
            failed.update(hook.apply(logits, slots, payload[hook.name]))
        return failed

    def after_sample(self, step: StepInput, output: StepOutput) -> None:
        for hook in self._hooks:
            hook.after_sample(step, output)

    def feed(self, payload: Mapping[str, Any]) -> bool:
        """Whether one has embeddings for a step with this payload."""
        return any(type(hook).embed is not WorkerHook.embed for hook in self._with(payload))

    def change_logits(self, payload: Mapping[str, Any]) -> bool:
        """Whether one will do more to a step with this payload than forbid tokens."""
        return any(type(hook).apply is not WorkerHook.apply for hook in self._with(payload))

    def read_hidden(self, payload: Mapping[str, Any]) -> bool:
        """Whether one will look at all hidden states of a step with this payload."""
        return any(type(hook).after_forward is not WorkerHook.after_forward for hook in self._with(payload))

    def _with(self, payload: Mapping[str, Any]) -> list[WorkerHook]:
        return [hook for hook in self._hooks if payload.get(hook.name) is not None] if payload else []


def _follows_steps(hook: WorkerHook) -> bool:
    kind = type(hook)
    return kind.before_forward is not WorkerHook.before_forward or kind.after_sample is not WorkerHook.after_sample


def gather(findings: Mapping[str, Findings]) -> tuple[dict[int, dict[str, bytes]], dict[int, str]]:
    """All that was found, row -> feature -> bytes, and errors by row; waits for it."""
    found: dict[int, dict[str, bytes]] = {}
    errors: dict[int, str] = {}
    for name, wait in findings.items():
        made, failed = wait()
        errors.update(failed)
        for row, data in made.items():
            found.setdefault(row, {})[name] = data
    return found, errors
