"""The attention function that transformers' modules call, and the places in them that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.nn.attention.layer import PagedAttention
from octavo.nn.step import StepInput

NAME = "octavo"
"""The function's name among transformers' attention functions."""
STEP = "octavo_step"
"""The keyword by which a module passes the step on to its attention function."""
PLACE = "octavo_attention"
"""The attribute of an attention module that holds its `PagedAttention`."""


class Attends(Protocol):
    """The step of a forward pass: one that is computed, or a trial."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        """Return attention of q [1, heads, T, d] over k and v [1, kv heads, T, d]: [1, T, heads, v's d]."""
        ...


class NoStepError(Exception):
    """An attention module did not pass its keyword arguments on."""


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do; the step says how."""
    step: Attends | None = options.pop(STEP, None)
    if step is None:
        raise NoStepError(type(module).__name__)
    return step.attend(module, query, key, value, attention_mask, options), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step over the paged KV cache."""

    step: StepInput

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        layer: PagedAttention = getattr(module, PLACE)
        size, width = v.shape[-1], layer.spec.head_dim
        q, k, v = (_heads(x, width, v.dtype) for x in (q, k, v))
        attended: Tensor = layer(q, k, v, self.step)[None]
        return attended if size == width else attended[..., :size]


def _heads(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return x [1, heads, T, d] as [T, heads, width], with zeros in further channels: they add nothing to products."""
    heads = x[0].transpose(0, 1).to(dtype)
    return heads if x.shape[-1] == width else F.pad(heads, (0, width - x.shape[-1]))
