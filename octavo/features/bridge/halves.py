"""A causal language model of transformers in two parts: the base model, and what turns its states into logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from octavo.core.errors import ConfigError


class FinalStates(BaseModelOutputWithPast):  # type: ignore[misc] # transformers' types are not read
    """The output of a base model that has states only: whatever else a family's output has is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class GivenStates(nn.Module):
    """Stands for a base model whose states were computed before."""

    @property
    def decoder(self) -> GivenStates:
        """The part that OPT's language model calls in place of the whole."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> FinalStates:
        return FinalStates(last_hidden_state=inputs_embeds)


def halves(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Take the base model out; return it, and the rest.

    The rest's `forward(inputs_embeds=states).logits` are the logits of final states, with all that the family does to
    them.
    """
    body: nn.Module = model.base_model
    if body is model or getattr(model, model.base_model_prefix, None) is not body:
        raise ConfigError(
            f"{type(model).__name__} can't be computed by transformers' modules in Octavo: it has no base model under "
            f"its base_model_prefix ({model.base_model_prefix!r}). Serve another model."
        )
    setattr(model, model.base_model_prefix, GivenStates())
    rest: nn.Module = model
    return body, rest
