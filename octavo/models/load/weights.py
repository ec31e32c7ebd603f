"""The loader: walks the model and pulls what each layer wants."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.core.errors import ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.nn.weights import Wanted, WeightLayer

logger = logging.getLogger(__name__)

# Buffers that older checkpoints carry along; they are computed, not learnt.
_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did.

    Attributes:
        tensors: how many were read.
        nbytes: memory that the model's weights now take, in their final form.
        seconds: wall time.
        unread: tensors of the checkpoint that no layer asked for.
    """

    tensors: int
    nbytes: int
    seconds: float
    unread: tuple[str, ...]


@torch.inference_mode(False)
@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: Checkpoint) -> LoadReport:
    """Give every layer its tensors, one layer at a time, so that little more than the model itself is in memory.

    Tensors that nobody asked for are logged as a warning: they often mean that the checkpoint holds something which
    the model, as Octavo understands it, leaves out.

    Raises:
        ModelFileError: a tensor is missing, unreadable or of another shape than its layer needs.
    """
    started = time.perf_counter()
    read: set[str] = set()
    superseded: set[str] = set()
    total = 0
    for layer in weight_layers(model):
        wanted = layer.wanted()
        layer.place([_pull(want, layer, checkpoint) for want in wanted])
        read.update(want.name for want in wanted)
        superseded.update(layer.superseded)
        total += layer.nbytes
    unread = _unread(checkpoint.names(), read | superseded)
    if unread:
        logger.warning(
            "%d tensors in %s were not used by the model: %s", len(unread), checkpoint.origin, _listed(unread)
        )
    num_read = len(read & checkpoint.names()) if checkpoint.names() else len(read)
    return LoadReport(num_read, total, time.perf_counter() - started, unread)


def weight_layers(model: nn.Module) -> Iterator[WeightLayer]:
    """The layers that own weights, in the order in which the model registered them."""
    return (module for module in model.modules() if isinstance(module, WeightLayer))


def _pull(want: Wanted, layer: WeightLayer, checkpoint: Checkpoint) -> Tensor | None:
    if want.optional and want.name not in checkpoint.names():
        return None
    if not checkpoint.has(want.name):
        raise ModelFileError(f"Layer {layer.path or 'root'} needs tensor {want.name}, which {checkpoint.origin} lacks.")
    shape = checkpoint.shape(want.name)
    if shape is not None and shape != want.spec.shape:
        raise ModelFileError(
            f"Tensor {want.name} in {checkpoint.origin} has shape {list(shape)}, "
            f"but the model's config makes it {list(want.spec.shape)}."
        )
    tensor = checkpoint.tensor(want.name, want.spec)
    if tensor.dtype.is_floating_point != want.spec.dtype.is_floating_point:
        raise ModelFileError(
            f"Tensor {want.name} in {checkpoint.origin} is {tensor.dtype}, but the model needs {want.spec.dtype}."
        )
    return tensor.to(layer.device, want.spec.dtype)


def _unread(stored: Set[str], known: Set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in stored if name not in known and not name.endswith(_NOT_WEIGHTS)))


def _listed(names: tuple[str, ...], limit: int = 20) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
