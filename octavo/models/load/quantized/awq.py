"""AWQ (https://arxiv.org/abs/2306.00978), in the layouts "gemm" and "gemv" of AutoAWQ."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.models.load.quantized.gptq import check_groups
from octavo.models.load.quantized.integers import Integers, unpack
from octavo.models.load.quantized.method import SCALE_DTYPES, WORDS, Method, Module, Settings
from octavo.nn.weights import Index

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of the layout "gemm" holds each of its eight outputs."""


class AWQ(Method):
    """Four bits. "gemm": `qweight` [K, N / 8] and `qzeros` [G, N / 8] are packed along outputs, in another order. The
    rows of `scales` [G, N] say how many groups there are: AutoRound's "extra_config" may give modules their own sizes.
    "gemv": `qweight` [N, K / 8] and `qzeros` [N, ...] are packed along inputs and groups, padded; `scales` likewise."""

    name = "AWQ"
    suffixes = ("qweight", "qzeros", "scales")

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError for other numbers of bits and layouts."""
        bits = settings.get("bits", settings.get("w_bit"))
        layout = str(settings.get("version", "gemm")).lower()
        if bits != 4 or layout not in ("gemm", "gemv"):
            raise ConfigError(
                f"quantization_config has bits={bits!r} and version={layout!r}; Octavo reads AWQ checkpoints of 4 bits "
                "in the layouts gemm and gemv. Serve another checkpoint of the model."
            )
        self._by_rows = layout == "gemv"
        self._group = settings.get("group_size", settings.get("q_group_size", 128))
        if type(self._group) is not int or self._group < -1 or self._group == 0:
            raise ConfigError(
                f"quantization_config.group_size is {self._group!r}, not a number of inputs, or -1 for all. Get the "
                "checkpoint's config.json again."
            )

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("qweight", names) | self._with("qzeros", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        rows, words = module.sizes("qweight")
        return (rows, words * 8) if self._by_rows else (words * 8, rows)

    def matrix(self, module: Module) -> Integers:
        outputs, inputs = self.shape(module)
        words, zeros = module.stored("qweight", WORDS, None, None), module.stored("qzeros", WORDS, None, None)
        scales = module.stored("scales", SCALE_DTYPES, None, None)
        groups = self._groups_of_rows(module, inputs) if self._by_rows else len(scales)
        check_groups(module, "scales", inputs, groups)
        if self._by_rows:
            values, zeros, scales = unpack(words, 4), unpack(zeros, 4)[:, :groups], scales[:, :groups]
        else:
            values, zeros, scales = _in_order(words).T.contiguous(), _in_order(zeros).T, scales.T
        for suffix, given in (("qzeros", zeros), ("scales", scales)):
            if given.shape != (outputs, groups):
                raise module.wrong(suffix, f"is for {list(given.shape)} outputs and groups, not [{outputs}, {groups}]")
        return Integers(values, scales, zeros, 4)

    def _groups_of_rows(self, module: Module, inputs: int) -> int:
        """Return the number of groups of the layout "gemv", whose scales are padded."""
        size = max(1, inputs if self._group == -1 else min(self._group, inputs))
        if inputs % size:
            raise module.wrong("qweight", f"has {inputs} inputs, which groups of {self._group} don't divide")
        return inputs // size

    def cut(self, module: Module, index: Index) -> Module | None:
        if self._by_rows:  # its groups are padded
            cuts = self._cut_evenly(module, index, {"qweight": (0, 1), "qzeros": (0, None), "scales": (0, None)})
            whole = index[1].indices(self.shape(module)[1])[:2] == (0, self.shape(module)[1])
            return None if cuts is None or not whole else module.part(cuts, {})
        cuts = self._cut_evenly(module, index, dict.fromkeys(self.suffixes, (1, 0)))
        return None if cuts is None else module.part(cuts, {})


def _in_order(words: Tensor) -> Tensor:
    """Return the integers of words [R, C] of the layout "gemm": [R, C * 8]."""
    nibbles = unpack(words, 4).view(len(words), -1, 8)
    return nibbles[..., list(_ORDER)].flatten(1)
