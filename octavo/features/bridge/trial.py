"""A trial of a module without weights: what its attention layers are, and whether Octavo can compute them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from octavo.features.bridge.architecture import refusal
from octavo.features.bridge.attention import STEP, NoStepError
from octavo.features.bridge.halves import halves
from octavo.nn.attention.base import AttentionSpec

_TOKENS = 8
_USED = {"scaling", "sliding_window", "softcap", "is_causal"}
_WITHOUT_EFFECT = {
    "dropout",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
}
"""Options of attention functions that change nothing here: positions are in the queries and keys already."""


@dataclass(frozen=True, slots=True)
class BridgedAttention:
    """An attention layer: the path of its module, and what it computes."""

    path: str
    spec: AttentionSpec


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial found.

    Attributes:
        attention: the layers in the order of their calls.
        hidden_size: of the states that the base model returns.
        vocab_size: columns of the logits.
        recordable: no data passes between host and device in a step.
    """

    attention: tuple[BridgedAttention, ...]
    hidden_size: int
    vocab_size: int
    recordable: bool


def run_trial(model: PreTrainedModel, name: str) -> Trial:
    """Compute a step on the meta device, where tensors have shapes but no data.

    Args:
        name: the architecture, for errors.

    Raises:
        ConfigError: Octavo can't compute the module; the text says why.
    """
    if not getattr(model.config, "is_causal", True):
        raise refusal(name, "is_causal is false in its config, so it attends in both directions")
    paths = {}
    meta = copy.deepcopy(model).to("meta").to(torch.bfloat16)
    for path, module in meta.named_modules():
        paths[module] = path
    embedding = meta.get_input_embeddings()
    body, head = halves(meta)
    calls, transfers = _Calls(paths), _Transfers()
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    try:
        with torch.inference_mode(), transfers:
            x = embedding(ids)
            states = body(inputs_embeds=x, position_ids=positions, use_cache=False, **{STEP: calls}).last_hidden_state
            logits = head(inputs_embeds=states, use_cache=False).logits
    except _UnsupportedError as error:
        raise refusal(name, str(error)) from error
    except NoStepError as error:
        raise refusal(
            name,
            f"its {error} does not pass its keyword arguments on to its attention function",
        ) from error
    except Exception as error:
        raise refusal(
            name,
            "its module can't be tried without weights, which happens if it reads results of the device while it "
            f"computes, or needs other inputs than tokens and positions ({type(error).__name__}: {_short(error)})",
        ) from error
    if not calls.layers:
        raise refusal(name, "it has no attention layer")
    if states.shape[-1] != x.shape[-1]:
        raise refusal(name, f"its embeddings have {x.shape[-1]} elements and its hidden states {states.shape[-1]}")
    return Trial(tuple(_alike(calls.layers, name)), states.shape[-1], logits.shape[-1], not transfers.found)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 160 else f"{text[:160]}..."


def _alike(layers: Sequence[BridgedAttention], name: str) -> Iterator[BridgedAttention]:
    """Yield the layers; raise ConfigError if they differ in what the KV cache is shaped after."""
    sizes = {(one.spec.num_heads, one.spec.num_kv_heads, one.spec.head_dim) for one in layers}
    if len(sizes) > 1:
        listed = ", ".join(f"{heads} of {kv} with {dim} channels" for heads, kv, dim in sorted(sizes))
        raise refusal(name, f"its layers have attention heads of different sizes ({listed})")
    yield from layers


class _UnsupportedError(Exception):
    """The module computes something that Octavo's attention doesn't."""


class _Calls:
    """A step that notes its attention layers and computes nothing.

    Attributes:
        layers: in the order of the calls.
    """

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._paths = paths
        self.layers: list[BridgedAttention] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        path = self._paths[module]
        if any(one.path == path for one in self.layers):
            raise _UnsupportedError(f"{path} attends more than once in a step, which needs several KV caches")
        if mask is not None:
            raise _UnsupportedError(f"{path} computes an attention mask of its own")
        if k.shape[2] != _TOKENS or v.shape[2] != _TOKENS or q.shape[2] != _TOKENS:
            raise _UnsupportedError(f"{path} attends to other positions than the step's")
        _check(path, module, options)
        width = max(q.shape[-1], v.shape[-1])
        scale = options.get("scaling")
        spec = AttentionSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=width,
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
        )
        self.layers.append(BridgedAttention(path, spec))
        return q.new_empty(1, _TOKENS, q.shape[1], v.shape[-1])


def _check(path: str, module: nn.Module, options: Mapping[str, Any]) -> None:
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise _UnsupportedError(f"{path} attends in both directions, as encoders do, and Octavo runs decoders so")
    others = [name for name, value in options.items() if value is not None and name not in _USED | _WITHOUT_EFFECT]
    if others:
        raise _UnsupportedError(f"{path} passes {', '.join(others)} to its attention, which Octavo's attention lacks")


class _Transfers(TorchDispatchMode):
    """Notices copies from the host, which can't be recorded in a graph.

    Attributes:
        found: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            given = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            self.found |= isinstance(made, Tensor) and made.is_meta and not all(one.is_meta for one in given)
        return made
