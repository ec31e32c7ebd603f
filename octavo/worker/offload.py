"""`Offload`: decoder layers whose weights stay in the host's memory and reach the device just before they are used.

Two rooms of device memory take turns: while a layer computes with the weights in one, those of the next such layer
arrive in the other. Each step copies all weights that are away, which is the least time that it takes. They are those
of layers at even distances, so that copies also run beside layers that are resident.

Tensors keep their identity and shape, and have fixed addresses in the rooms, so kernels and recorded graphs read them
as any others.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.config import ParallelConfig
from octavo.core.errors import ConfigError
from octavo.device.base import Device
from octavo.device.transfer import Feed, HostMemory, Link, Mark
from octavo.models.decoder import CausalLM
from octavo.models.load.weights import weight_layers
from octavo.models.model import LayeredModel
from octavo.nn.weights import WeightLayer

log = logging.getLogger(__name__)

_GIB = 1 << 30
_ROOMS = 2
_ALIGNED = 256
"""Bytes; kernels depend on no larger alignment."""


def spread(sizes: Sequence[int], freed: int) -> list[int]:
    """Choose layers to offload: as few as free this much of the device's memory, at even distances.

    Args:
        sizes: bytes of each layer's weights.
        freed: bytes, besides the rooms through which the weights pass.

    Returns:
        Their numbers, in order; [] if all layers together do not free as much.
    """
    for count in range(_ROOMS + 1, len(sizes) + 1):
        chosen = [(i + 1) * len(sizes) // count - 1 for i in range(count)]
        if freed_by([sizes[i] for i in chosen]) >= freed:
            return chosen
    return []


def freed_by(sizes: Sequence[int]) -> int:
    """Return the bytes of the device's memory that offloading layers of these sizes frees."""
    return sum(sizes) - _ROOMS * max(sizes, default=0)


class _Away(NamedTuple):
    """The weights of a `WeightLayer`.

    Attributes:
        tensors: each with the byte of `memory` where its storage begins.
    """

    memory: HostMemory
    tensors: list[tuple[Tensor, int]]


class Offload:
    """The layers of a model whose weights are away. The order of calls: `put_away` of each layer, `begin`, steps.

    Attributes:
        freed: bytes of the device's memory that they are expected to free.
    """

    def __init__(
        self, model: CausalLM, sizes: Sequence[int], gib: float, link: Link, free: int, neighbours: int = 1
    ) -> None:
        """
        Args:
            model: without weights.
            sizes: bytes that the weights of each of its layers will take.
            gib: GiB of the device's memory to free.
            free: bytes of the host's memory that were free before any rank loaded weights.
            neighbours: ranks of this machine, which take about as much each.

        Raises:
            ConfigError: the layers can't free as much, or the host has no memory for them.
        """
        chosen = spread(sizes, int(gib * _GIB))
        if not chosen:
            raise ConfigError(
                f"--cpu-offload-gb {gib:g}: all {len(sizes)} layers, without the room of {_ROOMS} that their weights "
                f"pass through, free {max(freed_by(sizes), 0) / _GIB:.2f} GiB. Lower it."
            )
        away = [sizes[i] for i in chosen]
        if neighbours * sum(away) > free:
            each = f" for each of {neighbours} GPUs" if neighbours > 1 else ""
            raise ConfigError(
                f"--cpu-offload-gb {gib:g}: the weights of {len(away)} layers take {sum(away) / _GIB:.2f} GiB of the "
                f"host's memory{each}, and {free / _GIB:.2f} GiB are free. Lower it."
            )
        self.freed = freed_by(away)
        self._model, self._device = model, model.device
        uses = Counter(id(one) for layer in model.layers for one in weight_layers(layer))
        uses.update(id(one) for rope in model.ropes for one in weight_layers(rope))
        self._layers = [
            (model.layers[i], [one for one in weight_layers(model.layers[i]) if uses[id(one)] == 1]) for i in chosen
        ]
        self._feed = link.feed()
        self._away: dict[WeightLayer, _Away] = {}
        for _, own in self._layers:
            for one in own:
                one.offloaded = True

    def put_away(self, layer: WeightLayer) -> None:
        """Move the weights of a layer that was just loaded to the host's memory, if it is offloaded. May be called from
        any thread."""
        if not layer.offloaded:
            return
        tensors = [value for holder in layer.holders for value in vars(holder).values() if isinstance(value, Tensor)]
        starts: dict[int, tuple[torch.UntypedStorage, int]] = {}
        size = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in starts:
                starts[storage.data_ptr()] = storage, size
                size += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        memory = self._feed.room(size)
        self._away[layer] = _Away(memory, [(one, starts[one.untyped_storage().data_ptr()][1]) for one in tensors])
        for storage, start in starts.values():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            memory.bytes[start : start + len(whole)].copy_(whole)
            storage.resize_(0)

    def begin(self) -> None:
        """Give the weights their places in the rooms, and have each forward pass bring them."""
        parts = [[self._away[one] for one in own] for _, own in self._layers]
        sizes = [sum(len(away.memory.bytes) for away in own) for own in parts]
        rooms = [torch.zeros(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(_ROOMS)]
        turns = _Turns(self._feed, [_placed(own, rooms[i % _ROOMS]) for i, own in enumerate(parts)])
        self._model.layers[0].register_forward_pre_hook(turns.begin)
        for number, (layer, _) in enumerate(self._layers):
            layer.register_forward_pre_hook(partial(turns.enter, number))
            layer.register_forward_hook(partial(turns.leave, number))
        log.info(
            "the weights of %d of %d layers, %.2f GiB, stay in the host's memory; each step copies them to the device",
            *(len(self._layers), len(self._model.layers), sum(sizes) / _GIB),
        )


def _placed(parts: Sequence[_Away], room: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Give a layer's tensors their places in a room; return what is copied where."""
    loads, begin = [], 0
    for memory, tensors in parts:
        target = room[begin : begin + len(memory.bytes)]
        for tensor, start in tensors:
            first = (begin + start) // tensor.element_size() + tensor.storage_offset()
            tensor.set_(room.untyped_storage(), first, tensor.shape, tensor.stride())
        begin += len(target)
        if len(target):
            loads.append((memory.bytes, target))
    return loads


class _Turns:
    """The copies of one forward pass after another."""

    def __init__(self, feed: Feed, loads: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """
        Args:
            loads: of each layer, what is copied where.
        """
        self._feed, self._loads = feed, loads
        self._sent: dict[int, Mark] = {}

    def begin(self, *_: Any) -> None:
        """Send the first layers' weights. A forward pass begins, so those of the last pass are used no more."""
        self._sent.clear()
        for number in range(_ROOMS):
            self._send(number)

    def enter(self, number: int, *_: Any) -> None:
        """Have a layer wait for its weights."""
        if number not in self._sent:  # a pass through some of the layers
            self._send(number)
        self._sent[number].wait()

    def leave(self, number: int, *_: Any) -> None:
        """Send the weights of the next layer but one after the work of this one, whose room they take."""
        if number + _ROOMS < len(self._loads):
            self._send(number + _ROOMS)

    def _send(self, number: int) -> None:
        self._sent[number] = self._feed.send(self._loads[number])


def settings_beside(gib: float, parallel: ParallelConfig, device: Device) -> ParallelConfig:
    """Return the settings of ranks with which layers can be offloaded.

    Args:
        gib: GiB of the device's memory to free; 0 for no offload.

    Raises:
        ConfigError: a device or a setting with which they can't.
    """
    if not gib:
        return parallel
    if not device.resident:
        raise ConfigError(
            f"--cpu-offload-gb {gib:g} frees memory of an NVIDIA GPU; on a CPU, all weights are in the host's memory. "
            "Leave it out."
        )
    if parallel.enable_dbo:
        raise ConfigError(
            f"--cpu-offload-gb {gib:g}: --enable-dbo computes each layer twice a step, whose weights would have to be "
            "there twice. Leave one of them out."
        )
    return dataclasses.replace(parallel, enable_dbo=False)


def offload_of(
    model: LayeredModel, size_of: Callable[[nn.Module], int], gib: float, link: Link, free: int, neighbours: int
) -> Offload:
    """Return the offload of a model without weights.

    Args:
        size_of: returns the bytes that a layer's weights will take.
        free, neighbours: see `Offload`.

    Raises:
        ConfigError: as `Offload`, or the model's layers are not Octavo's own.
    """
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"--cpu-offload-gb {gib:g}: the layers of this model are not Octavo's own, so their weights can't stay in "
            "the host's memory. Leave it out."
        )
    return Offload(model, [size_of(layer) for layer in model.layers], gib, link, free, neighbours)
