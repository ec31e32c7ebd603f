"""Facts about NVIDIA GPUs, and what an engine does with their memory. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
UTILIZATION = 0.92
"""Default fraction of the memory for weights, activations, graphs and KV cache."""
GRAPHS = GIB
"""Bytes for CUDA graphs."""
CONTEXT = 600 << 20
"""Bytes that CUDA and its libraries take, about."""
_LARGE = 60 * GIB
"""GPUs of this size easily hold the logits of 1,024 sequences and the activations of 8,192 tokens, some 4 GiB."""


def default_limits(memory: int) -> tuple[int, int]:
    """Return the default limits of running sequences and of tokens in one step, for a GPU with this memory."""
    return (1024, 8192) if memory >= _LARGE else (256, 2048)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, by its maker's data sheet.

    Attributes:
        memory: bytes that programs see.
        bandwidth: of the memory, bytes a second; 0 if unknown.
        flops: of dense products in 16 bits with sums in float32, a second; 0 if unknown.
        host_bandwidth: of its link to the host, bytes a second, about what copies reach; 0 if unknown.
    """

    name: str
    memory: int
    bandwidth: float = 0.0
    flops: float = 0.0
    host_bandwidth: float = 0.0


def _gpu(name: str, gib: float, tb_s: float, tflops: float, host_gb_s: float) -> Gpu:
    return Gpu(name, int(gib * GIB), tb_s * 1e12, tflops * 1e12, host_gb_s * 1e9)


GPUS = {
    "b200": _gpu("B200", 178.0, 8.0, 2250, 54),
    "h200": _gpu("H200", 139.8, 4.8, 989, 54),
    "h100": _gpu("H100", 79.1, 3.35, 989, 54),
    "h100-pcie": _gpu("H100 PCIe", 79.1, 2.0, 756, 54),
    "a100": _gpu("A100 80GB", 79.1, 2.04, 312, 25),
    "a100-40": _gpu("A100 40GB", 39.4, 1.555, 312, 25),
    "l40s": _gpu("L40S", 44.4, 0.864, 362, 25),
    "l4": _gpu("L4", 22.0, 0.3, 121, 25),
    "a10": _gpu("A10", 22.0, 0.6, 125, 25),
    "rtx6000": _gpu("RTX PRO 6000", 94.9, 1.79, 504, 54),
    "5090": _gpu("RTX 5090", 31.4, 1.79, 210, 54),
    "4090": _gpu("RTX 4090", 23.5, 1.01, 165, 25),
    "3090": _gpu("RTX 3090", 23.5, 0.936, 71, 25),
    "4060ti": _gpu("RTX 4060 Ti 16GB", 15.6, 0.288, 44, 12),
}
"""Word -> GPU."""


def known_as(name: str) -> Gpu | None:
    """Return the GPU that a driver calls by this name; None if it is not among `GPUS`."""
    plain = name.lower().replace(" ", "").replace("-", "")
    found = [gpu for gpu in GPUS.values() if gpu.name.lower().replace(" ", "") in plain]
    return max(found, key=lambda gpu: len(gpu.name), default=None)
