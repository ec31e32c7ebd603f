"""`compute`: turn a laid-out step into hidden states. Eager, recorded, warm-up, calibration and encoder steps use
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from octavo.models.model import EncoderModel, Model
from octavo.nn.step import StepInput
from octavo.worker.hooks import Hooks
from octavo.worker.parts import Forward

NO_HOOKS = Hooks()


def compute(
    model: Model | EncoderModel,
    step: StepInput,
    hooks: Hooks = NO_HOOKS,
    payload: Mapping[str, Any] | None = None,
    forward: Forward | None = None,
) -> Tensor:
    """Embed the step's tokens, let hooks overwrite embeddings, and run the layers.

    Args:
        forward: in place of the model's.

    Returns:
        [T, hidden_size] before the final norm, or [S, hidden_size] of `step.hidden_rows`.
    """
    run = model.forward if forward is None else forward
    hooks.bind(step)
    fed = payload is not None and hooks.feed(payload)
    if fed:
        step.input_ids.clamp_(min=0)  # -1 marks positions whose embedding is given in place of a token
    x = model.embed(step)
    if fed and payload is not None:
        hooks.embed(x, payload)
    taps, rows = getattr(model, "taps", None), step.hidden_rows
    if rows is None or taps is None or not taps.last:
        return run(x, step)
    step.hidden_rows = None  # the last layer's states are kept of all tokens
    hidden = run(x, step)
    step.hidden_rows = rows
    return hidden.index_select(0, rows)
