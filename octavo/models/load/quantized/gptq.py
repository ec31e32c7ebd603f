"""GPTQ (https://arxiv.org/abs/2210.17323), in the layout of AutoGPTQ and GPTQModel."""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.load.quantized.integers import Integers, unpack
from octavo.models.load.quantized.method import SCALE_DTYPES, WORDS, Method, Module, Settings
from octavo.nn.weights import Index

BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` -> what is added to stored zero points."""


class GPTQ(Method):
    """`qweight` [K * bits / 32, N] is packed along inputs, `qzeros` [G, N * bits / 32] along outputs; `scales` [G, N].

    `g_idx` [K] is each input's group, which is not in ascending order if columns were quantized in the order of their
    activations ("desc_act"). Version 1 stores zero points less one.
    """

    name = "GPTQ"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError for other numbers of bits and formats."""
        bits = settings.get("bits")
        if bits not in BITS:
            raise ConfigError(
                f"quantization_config.bits is {bits!r}; Octavo reads {self.name} checkpoints of "
                f"{', '.join(map(str, BITS))} bits. Serve another checkpoint of the model."
            )
        self._bits = int(bits)
        version = _version(settings)
        if version not in _VERSIONS:
            raise ConfigError(
                f"quantization_config.checkpoint_format is {version!r}; Octavo reads {' and '.join(_VERSIONS)} of "
                f"{self.name}. Serve another checkpoint of the model."
            )
        self._offset = _VERSIONS[version]
        self._is_symmetric = settings.get("sym") is True
        self._in_order_of_activations = bool(settings.get("desc_act"))

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("qweight", names) | self._with("qzeros", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        words, outputs = module.sizes("qweight")
        return outputs, words * 32 // self._bits_of(module)

    def matrix(self, module: Module) -> Integers:
        bits, (outputs, inputs) = self._bits_of(module), self.shape(module)
        scales = module.stored("scales", SCALE_DTYPES, None, outputs)
        groups = len(scales)
        words = module.stored("qzeros", WORDS, groups, -(-outputs * bits // 32))
        zeros = self._zeros(unpack(words, bits, outputs), bits)
        values = unpack(module.stored("qweight", WORDS, None, outputs).T, bits, inputs)
        needs_order = self._in_order_of_activations and groups > 1
        order = group_order(module, ("scales", "g_idx"), inputs, groups, needed=needs_order)
        return Integers(values, scales.T, zeros.T, bits, order)

    def cut(self, module: Module, index: Index) -> Module | None:
        dims = dict.fromkeys(("qweight", "qzeros", "scales"), (1, 0)) | {"g_idx": (None, 0)}
        cuts = self._cut_evenly(module, index, dims)
        if cuts is None:
            return None
        given = own_groups(module, "g_idx", index[1], self.shape(module)[1], module.shape("scales")[0])
        return None if given is None else module.part(cuts, given)

    def _zeros(self, stored: Tensor, bits: int) -> Tensor:
        """Return zero points, of those that are stored.

        Some symmetric checkpoints name version 1, but store zero points as version 2 does: all in the middle.
        """
        is_version_2 = self._is_symmetric and bool((stored == 1 << (bits - 1)).all())
        return stored if is_version_2 else stored + self._offset & (1 << bits) - 1

    def _bits_of(self, module: Module) -> int:
        """Return a module's number of bits: GPTQModel's "dynamic" and AutoRound's "extra_config" may give modules
        numbers of their own."""
        words, outputs = module.sizes("qweight")
        if module.has("g_idx"):
            suffix, count = "qweight", math.prod(module.shape("g_idx"))
        else:
            suffix, words, count = "qzeros", module.sizes("qzeros")[1], outputs
        fitting = [bits for bits in BITS if words == -(-count * bits // 32)]
        if not fitting:
            raise module.wrong(suffix, f"has {words} words for {count} integers, which is no number of bits")
        return self._bits if self._bits in fitting else fitting[0]


def _version(settings: Settings) -> str:
    """Return the name of the layout, which older checkpoints have under other names."""
    if settings.get("is_marlin_format"):
        return "marlin"
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq")


def group_order(module: Module, suffixes: tuple[str, str], inputs: int, groups: int, *, needed: bool) -> Tensor | None:
    """Return each input's group, if groups are not runs of adjacent inputs in ascending order.

    Some tools leave the tensor zero if inputs are in order.

    Args:
        suffixes: of the scales, and of the tensor with the groups.
        needed: the checkpoint's configuration says that inputs are in another order.

    Raises:
        ModelFileError: the tensor is needed, and missing, or it does not give a group for each input, or groups don't
            divide the inputs.
    """
    scales, suffix = suffixes
    if needed or module.has(suffix):
        order = module.tensor(suffix).long()
        if order.shape != (inputs,) or not bool(((order >= 0) & (order < groups)).all()):
            raise module.wrong(suffix, f"does not give one of {groups} groups for each of {inputs} inputs")
        is_unset = not needed and not bool(order.any())
        if not is_unset and not torch.equal(order, torch.arange(inputs) // -(-inputs // groups)):
            return order
    check_groups(module, scales, inputs, groups)
    return None


def own_groups(module: Module, suffix: str, inputs: slice, total: int, groups: int) -> dict[str, Tensor] | None:
    """Return the tensor with each input's group for a part of the inputs, whose groups are counted from 0; {} if that
    is the stored one; None if the part has some inputs of a group only because inputs are in another order.

    Args:
        total: inputs of the whole matrix.
        groups: of the whole matrix.
    """
    begin, end, _ = inputs.indices(total)
    if (begin, end) == (0, total) or not module.has(suffix):
        return {}
    order = module.tensor(suffix)
    if order.shape != (total,) or not torch.equal(order.long(), torch.arange(total) // -(-total // groups)):
        return None
    return {suffix: order[begin:end] - order[begin]}


def check_groups(module: Module, suffix: str, inputs: int, groups: int) -> None:
    """Raise ModelFileError if the groups of the scales don't divide the inputs."""
    if inputs % max(groups, 1) or not groups:
        raise module.wrong(suffix, f"has {groups} groups, which don't divide {inputs} inputs")
