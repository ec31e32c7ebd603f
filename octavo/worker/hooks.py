"""`WorkerHook`: the seam through which a feature takes part in computing; each method has a do-nothing default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from octavo.core.output import StepOutput
from octavo.models.model import Encoding, Model
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

    def attach(self, model: Model | Encoding) -> None:
        """The model is loaded; wrap what must be wrapped."""

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        """A request took this slot, with its options for this feature."""

    def before_forward(self, step: StepInput, payload: Any) -> None:
        """The batch is laid out; the model has not run."""

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


def follows_steps(hook: WorkerHook) -> bool:
    """Whether it must be told of each step's batch, and not only change logits when there is a payload for it."""
    kind = type(hook)
    return kind.before_forward is not WorkerHook.before_forward or kind.after_sample is not WorkerHook.after_sample


def what_is_allowed(hooks: Sequence[WorkerHook], slots: Sequence[int], payload: Mapping[str, Any]) -> Allowed | None:
    """What every hook that has a payload allows; None if none of them forbids anything."""
    parts = [hook.allowed(slots, payload[hook.name]) for hook in hooks if payload.get(hook.name) is not None]
    return in_common([part for part in parts if part is not None])


def changes_logits(hooks: Sequence[WorkerHook], payload: Mapping[str, Any]) -> bool:
    """Whether a hook will do more to a step with this payload than forbid tokens."""
    return any(payload.get(hook.name) is not None and type(hook).apply is not WorkerHook.apply for hook in hooks)


def apply_hooks(
    hooks: Sequence[WorkerHook], logits: Tensor, slots: Sequence[int], payload: Mapping[str, Any]
) -> dict[int, str]:
    """`WorkerHook.apply` of each hook that has a payload; all their errors by row."""
    failed: dict[int, str] = {}
    for hook in hooks:
        if payload.get(hook.name) is not None:
            failed.update(hook.apply(logits, slots, payload[hook.name]))
    return failed


def find(hooks: Sequence[WorkerHook], hidden: Tensor, payload: Mapping[str, Any]) -> dict[str, Findings]:
    """`WorkerHook.after_forward` of each hook that has a payload, by its name."""
    found = {
        hook.name: hook.after_forward(hidden, payload[hook.name])
        for hook in hooks
        if payload.get(hook.name) is not None
    }
    return {name: findings for name, findings in found.items() if findings is not None}


def reads_hidden(hooks: Sequence[WorkerHook], payload: Mapping[str, Any]) -> bool:
    """Whether a hook will look at all hidden states of a step with this payload."""
    return any(
        payload.get(hook.name) is not None and type(hook).after_forward is not WorkerHook.after_forward
        for hook in hooks
    )


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
