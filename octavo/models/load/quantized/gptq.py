"""GPTQ (https://arxiv.org/abs/2210.17323), in the layout of AutoGPTQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.load.quantized.integers import Integers, unpack
from octavo.models.load.quantized.method import Method, Module, Settings

BITS = (2, 3, 4, 8)


class GPTQ(Method):
    """`qweight` [K * bits / 32, N] is packed along inputs, `qzeros` [G, N * bits / 32] along outputs; `scales` [G, N].

    `g_idx` [K] is each input's group, which is not in ascending order if columns were quantized in the order of their
    activations ("desc_act"). Version 1 stores zero points less one.
    """

    name = "GPTQ"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError for other numbers of bits."""
        bits = settings.get("bits")
        if bits not in BITS:
            raise ConfigError(
                f"quantization_config.bits is {bits!r}; Octavo reads {self.name} checkpoints of "
                f"{', '.join(map(str, BITS))} bits. Serve another checkpoint of the model."
            )
        self._bits = int(bits)
        self._offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("qweight", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        words, outputs = module.shape("qweight")
        return outputs, words * 32 // self._bits_of(module)

    def matrix(self, module: Module) -> Integers:
        bits, (outputs, inputs) = self._bits_of(module), self.shape(module)
        scales = module.tensor("scales")
        groups = scales.shape[0]
        if scales.shape != (groups, outputs):
            raise module.wrong("scales", f"has shape {list(scales.shape)}, for {outputs} outputs")
        words = module.tensor("qzeros")
        if words.shape != (groups, -(-outputs * bits // 32)):
            raise module.wrong("qzeros", f"has shape {list(words.shape)}, for {groups} groups and {outputs} outputs")
        zeros = unpack(words, bits, outputs) + self._offset & (1 << bits) - 1
        values = unpack(module.tensor("qweight").T, bits, inputs)
        return Integers(values, scales.T, zeros.T, bits, group_order(module, "g_idx", inputs, groups))

    def _bits_of(self, module: Module) -> int:
        """Return a module's number of bits: GPTQModel's setting "dynamic" may give modules numbers of their own."""
        if not module.has("g_idx"):
            return self._bits
        (inputs,), (words, _) = module.shape("g_idx"), module.shape("qweight")
        bits = next((bits for bits in BITS if words * 32 == inputs * bits), 0)
        if not bits:
            raise module.wrong("qweight", f"has {words} words for {inputs} inputs, which is no number of bits")
        return bits


def group_order(module: Module, suffix: str, inputs: int, groups: int) -> Tensor | None:
    """Return each input's group, if groups are not runs of adjacent inputs in ascending order.

    Raises:
        ModelFileError: the tensor does not give a group for each input.
    """
    if module.has(suffix):
        order = module.tensor(suffix).long()
        if order.shape != (inputs,) or not bool(((order >= 0) & (order < groups)).all()):
            raise module.wrong(suffix, f"does not give one of {groups} groups for each of {inputs} inputs")
        if not torch.equal(order, torch.arange(inputs) // -(-inputs // groups)):
            return order
    check_groups(module, "scales", inputs, groups)
    return None


def check_groups(module: Module, suffix: str, inputs: int, groups: int) -> None:
    """Raise ModelFileError if the groups of the scales don't divide the inputs."""
    if inputs % groups:
        raise module.wrong(suffix, f"has {groups} groups, which don't divide {inputs} inputs")
