"""The loader: walk the model and load the tensors that each layer needs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.core.errors import ModelFileError
from octavo.device.transfer import move
from octavo.models.load.checkpoint import Checkpoint
from octavo.nn.quant.base import QuantizingAtLoad
from octavo.nn.shard import local_shape
from octavo.nn.weights import QuantizedBlocks, Wanted, WeightLayer

logger = logging.getLogger(__name__)

Placed = Callable[[WeightLayer], None]

# Scales of FP8 keys and values; read separately if the KV cache is in FP8.
_SCALES = (".k_scale", ".v_scale")
_SAMPLE = 64
"""Rows that are compared at each of some places."""
# Buffers in older checkpoints that are computed, not learned.
_NOT_WEIGHTS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", "embeddings.position_ids")


class HasModules(Protocol):
    """A model, as far as the loader walks it."""

    def modules(self) -> Iterator[nn.Module]: ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of loading.

    Attributes:
        nbytes: memory of the model's weights in their final form.
        unread: tensors of the checkpoint that no layer wanted.
    """

    nbytes: int
    unread: tuple[str, ...]


def load_weights(
    model: HasModules, checkpoint: Checkpoint, *, unneeded: tuple[str, ...] = (), placed: Placed = lambda layer: None
) -> LoadReport:
    """Load every layer's tensors, a few layers at a time, so that little more memory than the model's is used.

    Unread tensors are logged as a warning, since they often mean that the checkpoint has parts that Octavo's model
    lacks.

    Args:
        unneeded: prefixes of names that may be unread without a warning.
        placed: called with each layer that is loaded, in the thread that has loaded it.

    Raises:
        ModelFileError: a tensor is missing, unreadable or of another shape than its layer needs.
    """
    layers = list(weight_layers(model))
    _fill(layers, checkpoint, placed)
    read = {want.name for layer in layers for want in layer.wanted() if _present(want, checkpoint)}
    unread = _unread(checkpoint.names(), read.union(*(layer.superseded for layer in layers)))
    unread = tuple(name for name in unread if not unneeded or not name.startswith(unneeded))
    if unread:
        logger.warning(
            "%d tensors in %s were not used by the model: %s", len(unread), checkpoint.origin, _listed(unread)
        )
    if getattr(model, "score", None) is None:  # classifiers don't use their head
        _warn_of_own_heads(layers, checkpoint)
    return LoadReport(sum(layer.nbytes for layer in layers), unread)


def _warn_of_own_heads(layers: Sequence[WeightLayer], checkpoint: Checkpoint) -> None:
    """Log a warning for a head that shares the embeddings by the config, but has weights of its own."""
    for head in layers:
        source = head.source
        if source is None or not head.superseded:
            continue
        (want,), name = source.wanted(), head.superseded[0]
        if {name, want.name} <= checkpoint.names() and _differ(name, want, checkpoint):
            logger.warning(
                "the model's config has tie_word_embeddings=true, but %s in %s differs from %s, which serves as both. "
                'Say --hf-overrides {"tie_word_embeddings": false} to use it',
                name,
                checkpoint.origin,
                want.name,
            )


def _differ(name: str, want: Wanted, checkpoint: Checkpoint) -> bool:
    """Return whether a matrix is another one than that of `want`, beyond rounding, judged by some of their rows."""
    if checkpoint.shape(name) != checkpoint.shape(want.name):
        return True
    rows = want.spec.shape[0]
    for begin in (0, rows // 3, rows // 2, max(0, rows - _SAMPLE)):
        index = (slice(begin, min(begin + _SAMPLE, rows)),)
        other, own = (checkpoint.tensor(one, want.spec, index).float() for one in (name, want.name))
        if (other - own).norm() > 0.1 * own.norm():
            return True
    return False


def _fill(layers: Sequence[WeightLayer], checkpoint: Checkpoint, placed: Placed) -> None:
    """Load each layer on one thread, several layers at once.

    Splitting every small operation over the threads instead would synchronize them thousands of times: not faster on an
    idle machine, and up to forty times slower if another process uses one of the cores.
    """
    threads = torch.get_num_threads()
    own = [layer for layer in layers if layer.source is None]
    sharers = {layer.source: layer for layer in layers if layer.source is not None}
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="octavo-load") as pool:
            done = [pool.submit(_fill_one, layer, sharers.get(layer), checkpoint, placed) for layer in own]
            try:
                for future in done:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


def _fill_one(layer: WeightLayer, sharer: WeightLayer | None, checkpoint: Checkpoint, placed: Placed) -> None:
    layer.fill(lambda want: _pull(want, layer, checkpoint))
    if sharer is not None:
        sharer.place([])
    placed(layer)


def weight_layers(model: HasModules) -> Iterator[WeightLayer]:
    """Yield the layers with weights, in the order of registration."""
    return (module for module in model.modules() if isinstance(module, WeightLayer))


def replace_weights(model: HasModules, other: HasModules, *, in_place: bool) -> None:
    """Replace a model's weights by those of another model of the same spec.

    Args:
        in_place: copy them to the addresses of the old ones, which recorded graphs read. Otherwise move them from the
            other model, which must not be used any more.
    """
    for mine, its in zip(weight_layers(model), weight_layers(other), strict=True):
        for own, other_part in zip(mine.holders, its.holders, strict=True):
            _replace(own, other_part, in_place=in_place)
        mine.replaced()


def _replace(mine: object, its: object, *, in_place: bool) -> None:
    for name, tensor in vars(its).items():
        if isinstance(tensor, Tensor):
            if in_place:
                getattr(mine, name).copy_(tensor)
            else:
                setattr(mine, name, tensor)


def wanted_bytes(model: HasModules) -> int:
    """Return the size in bytes of all tensors that the model needs, before any is loaded: of those that are quantized
    when they are loaded, afterwards."""
    layers = weight_layers(model)
    return sum(_kept_bytes(layer, want) for layer in layers for want in layer.wanted() if not want.optional)


def plain_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the size in bytes of all tensors of a checkpoint in this dtype; 0 for one that generates tensors."""
    shapes = (checkpoint.shape(name) for name in checkpoint.names())
    return sum(math.prod(shape) * dtype.itemsize for shape in shapes if shape is not None)


def _kept_bytes(layer: WeightLayer, want: Wanted) -> int:
    shape, scheme = local_shape(want.spec.shape, want.index), getattr(layer, "scheme", None)
    kept = scheme.kept_bytes(shape) if isinstance(scheme, QuantizingAtLoad) else None
    return math.prod(shape) * want.spec.dtype.itemsize if kept is None else kept


def _pull(want: Wanted, layer: WeightLayer, checkpoint: Checkpoint) -> Tensor | QuantizedBlocks | None:
    if not _present(want, checkpoint):
        return None
    if not checkpoint.has(want.name):
        raise ModelFileError(f"Layer {layer.path or 'root'} needs tensor {want.name}, which {checkpoint.origin} lacks.")
    shape = checkpoint.shape(want.name)
    if shape is not None and shape != want.spec.shape:
        raise ModelFileError(
            f"Tensor {want.name} in {checkpoint.origin} has shape {list(shape)}, "
            f"but the model's config makes it {list(want.spec.shape)}."
        )
    blocks = checkpoint.blocks(want.name, codes=want.codes, index=want.index) if want.blocks else None
    if blocks is not None:
        return blocks
    tensor = checkpoint.tensor(want.name, want.spec, want.index)
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        raise ModelFileError(
            f"Tensor {want.name} in {checkpoint.origin} is {tensor.dtype}, but the model's config has no "
            "quantization_config that says what its values are. Get the checkpoint again, with its config.json."
        )
    if tensor.dtype.is_floating_point != want.spec.dtype.is_floating_point:
        raise ModelFileError(
            f"Tensor {want.name} in {checkpoint.origin} is {tensor.dtype}, but the model needs {want.spec.dtype}."
        )
    return want.spec.converted(move(tensor, layer.device))


def _present(want: Wanted, checkpoint: Checkpoint) -> bool:
    return not want.optional or want.name in checkpoint.names()


def _unread(stored: Set[str], known: Set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in stored if name not in known and not name.endswith(_NOT_WEIGHTS + _SCALES)))


def _listed(names: tuple[str, ...], limit: int = 20) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
