"""Selection of the attention backend for a device, dtype and layer: the fastest one that supports them."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.core.errors import ConfigError
from octavo.native.bindings import open_library
from octavo.native.build import NativeBuildError
from octavo.native.program import Pool
from octavo.nn.attention import native
from octavo.nn.attention.base import AttentionBackend, BackendFactory, BackendRequest
from octavo.nn.attention.cpu import DTYPES, TorchAttention
from octavo.nn.attention.kv_dtype import is_fp8
from octavo.nn.attention.libraries import flash_attn, flashinfer
from octavo.nn.attention.libraries.prompts import PromptLibrary
from octavo.nn.attention.reference import ReferenceAttention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Factory:
    """A `BackendFactory` made of two functions.

    Attributes:
        invariant: results do not depend on what else is in a step.
    """

    name: str
    reason_against: Callable[[BackendRequest], str | None]
    make_backend: Callable[[BackendRequest], AttentionBackend]
    invariant: bool = False

    def supports(self, request: BackendRequest) -> str | None:
        if request.invariant and not self.invariant:
            return "adds up in an order that depends on the batch (--batch-invariant)"
        return self.reason_against(request)

    def make(self, request: BackendRequest) -> AttentionBackend:
        return self.make_backend(request)


def _fp8_reason(request: BackendRequest) -> str | None:
    return "stores keys and values in the model's dtype, not in FP8" if is_fp8(request.kv_dtype) else None


def _int8(request: BackendRequest) -> bool:
    return request.kv_dtype == torch.int8


def _native_reason(request: BackendRequest) -> str | None:
    reason = _fp8_reason(request) or native.reason_against(
        request.device, request.dtype, request.spec, request.block_size
    )
    return reason_against_compiling(request.isa, request.libraries) if reason is None else reason


def reason_against_compiling(isa: str, libraries: Sequence[str]) -> str | None:
    """Compile the CPU kernels; return the reason why they can't be, after logging it; None if they can.

    Args:
        isa, libraries: as in `BackendRequest`.

    Raises:
        ConfigError: they can't be compiled for the instruction set that was asked for.
    """
    reason = None
    try:
        open_library(isa, libraries)
    except NativeBuildError as error:
        if isa != "auto":
            raise ConfigError(f"--cpu-isa {isa}: {error}. Leave it out to use the best one that works.") from error
        reason = f"could not be compiled: {error}"
        _advise(reason)
    return reason


@functools.cache
def _advise(reason: str) -> None:
    missing = "with a C++ compiler installed (for instance g++)"
    log.warning(
        "Octavo's CPU kernels %s. The model runs in plain torch, which is correct but several times slower; %s the "
        "next start uses the kernels. octavo doctor checks that.",
        reason,
        missing if "no C++ compiler" in reason else "once that is fixed",
    )


def _make_native(request: BackendRequest) -> AttentionBackend:
    return native.NativeAttention(Pool(torch.get_num_threads(), request.isa), int8=_int8(request))


def _torch_reason(request: BackendRequest) -> str | None:
    if request.device.type != "cpu":
        return f"runs on cpu, not on {request.device.type}"
    if request.dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {request.dtype}"
    return _fp8_reason(request)


def _reference_reason(request: BackendRequest) -> str | None:
    if (reason := _fp8_reason(request)) is not None:
        return reason
    return None if request.dtype.is_floating_point else f"needs a floating-point dtype, not {request.dtype}"


def _triton_reason(request: BackendRequest) -> str | None:
    interpreted = request.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if request.device.type != "cuda" and not interpreted:
        return f"runs on cuda (or on cpu under TRITON_INTERPRET=1, for tests), not on {request.device.type}"
    if _int8(request):
        return "stores keys and values in the model's dtype or in FP8, not in int8"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if request.dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {request.dtype}"
    return None if request.spec.head_dim <= 512 else f"has heads of up to 512 channels, not {request.spec.head_dim}"


def _invariant_reason(request: BackendRequest) -> str | None:
    if (reason := _triton_reason(request) or _fp8_reason(request)) is not None:
        return reason
    if request.dtype == torch.float32:
        return "computes in 16 bits"
    heads = request.spec.head_dim
    return None if heads <= 256 else f"has heads of up to 256 channels, not {heads}"


def _make_invariant(request: BackendRequest) -> AttentionBackend:
    from octavo.nn.attention.invariant import InvariantAttention

    return InvariantAttention(request.dtype, request.spec)


def _make_triton(request: BackendRequest) -> AttentionBackend:
    from octavo.nn.attention.triton import TritonAttention  # needs triton, which machines without a GPU may lack

    return TritonAttention(request.dtype, request.spec)


def _with_library(
    make_library: Callable[[BackendRequest], PromptLibrary],
) -> Callable[[BackendRequest], AttentionBackend]:
    """Return the factory function of the backend that attends prompts with this library."""

    def make(request: BackendRequest) -> AttentionBackend:
        from octavo.nn.attention.libraries.attention import LibraryAttention
        from octavo.nn.attention.triton import TritonAttention

        return LibraryAttention(make_library(request), TritonAttention(request.dtype, request.spec))

    return make


# A library precedes Octavo's kernels if it was measured to be faster and does not delay the start; see docs/gpu.md.
BACKENDS: tuple[BackendFactory, ...] = (
    Factory("native", _native_reason, _make_native, invariant=True),
    Factory("torch", _torch_reason, lambda request: TorchAttention(int8=_int8(request))),
    Factory("flash_attn", flash_attn.reason_against, _with_library(lambda _: flash_attn.FlashAttention3())),
    Factory("triton", _triton_reason, _make_triton),
    Factory("flashinfer", flashinfer.reason_against, _with_library(lambda r: flashinfer.FlashInfer(r.device))),
    Factory("invariant", _invariant_reason, _make_invariant, invariant=True),
    Factory("reference", _reference_reason, lambda request: ReferenceAttention(int8=_int8(request))),
)

OTHER_NAMES = {"triton_attn": "triton", "torch_sdpa": "torch", "cpu_attn": "native"}
"""vLLM's names of backends -> the names here."""


def select(name: str | None, request: BackendRequest) -> AttentionBackend:
    """Return the backend called `name`, or by default the fastest one that supports the request.

    Args:
        name: a name of `BACKENDS` or `OTHER_NAMES`, in any case; None for the default.

    Raises:
        ConfigError: `name` is unknown, or doesn't support this device, dtype or layer; the text lists all backends.
    """
    if name is not None:
        name = OTHER_NAMES.get(name.lower(), name.lower())
    for factory in BACKENDS:
        if name in (None, factory.name) and factory.supports(request) is None:
            return factory.make(request)
    reasons = {factory.name: factory.supports(request) for factory in BACKENDS}
    listed = "; ".join(f"{n}: {'usable' if why is None else why}" for n, why in reasons.items())
    if name is None:
        problem = f"No attention backend supports {request.device} with {request.dtype}."
    elif name in reasons:
        problem = f"The attention backend {name!r} can't be used here: it {reasons[name]}. Leave it out, or choose:"
    else:
        problem = f"There is no attention backend {name!r}; leave the choice out or take one of these."
    raise ConfigError(f"{problem} {listed}.")
