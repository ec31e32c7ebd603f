"""Selection of the backend for latent attention: the fastest one that supports device and dtype."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.core.errors import ConfigError
from octavo.native.program import Pool
from octavo.nn.attention.cpu import DTYPES
from octavo.nn.attention.kv_dtype import name_of
from octavo.nn.attention.select import reason_against_compiling
from octavo.nn.latent import native
from octavo.nn.latent.base import LatentBackend, LatentSpec
from octavo.nn.latent.cpu import TorchLatents
from octavo.nn.latent.native import NativeLatents
from octavo.nn.latent.reference import ReferenceLatents

log = logging.getLogger(__name__)

NAMES = ("native", "torch", "triton", "reference")
_OTHER_NAMES = {
    "triton_attn": "triton",
    "triton_mla": "triton",
    "torch_sdpa": "torch",
    "cpu_attn": "native",
    "cpu_mla": "native",
}
"""vLLM's names of backends -> the names here."""


@dataclass(frozen=True, slots=True)
class LatentRequest:
    """Requirements on a backend.

    Attributes:
        kv_dtype: dtype of stored latents.
        isa, libraries: as in `BackendRequest`.
    """

    device: torch.device
    dtype: torch.dtype
    spec: LatentSpec
    kv_dtype: torch.dtype
    isa: str = "auto"
    libraries: Sequence[str] = ()


def select_latents(name: str | None, request: LatentRequest) -> LatentBackend:
    """Return the backend called `name`, or by default the fastest one that supports the request.

    Raises:
        ConfigError: `name` is unknown or doesn't support the request, or the cache is to have another dtype than the
            model.
    """
    if request.kv_dtype != request.dtype:
        raise ConfigError(
            f"--kv-cache-dtype {name_of(request.kv_dtype)}: this model has latent attention, whose cache is in the "
            "model's dtype. Leave it out."
        )
    if name is not None:
        name = _OTHER_NAMES.get(name.lower(), name.lower())
    reasons = {each: _reason_against(each, request) for each in NAMES}
    chosen = next((each for each in NAMES if name in (None, each) and reasons[each] is None), None)
    if chosen is None:
        listed = "; ".join(f"{n}: {'usable' if why is None else why}" for n, why in reasons.items())
        raise ConfigError(
            f"The attention backend {name or 'for this device'!r} can't compute latent attention here. Leave the "
            f"choice out, or take one that can: {listed}."
        )
    if name is None and chosen == "torch":
        log.warning(
            "the model runs layer by layer in torch: the native backend of latent attention %s", reasons["native"]
        )
    return _make(chosen, request)


def _reason_against(name: str, request: LatentRequest) -> str | None:
    device, dtype = request.device.type, request.dtype
    if name == "reference":
        return None if dtype.is_floating_point else f"needs a floating-point dtype, not {dtype}"
    if name == "native":
        return native.reason_against(request.device, dtype, request.spec) or reason_against_compiling(
            request.isa, request.libraries
        )
    if dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    if name == "torch":
        return None if device == "cpu" else f"runs on cpu, not on {device}"
    if device != "cuda" and not (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"runs on cuda (or on cpu under TRITON_INTERPRET=1, for tests), not on {device}"
    return None if importlib.util.find_spec("triton") else "needs the package triton, which is not installed"


def _make(name: str, request: LatentRequest) -> LatentBackend:
    if name == "native":
        return NativeLatents(Pool(torch.get_num_threads(), request.isa))
    if name == "torch":
        return TorchLatents()
    if name == "reference":
        return ReferenceLatents()
    from octavo.nn.latent.triton import TritonLatents  # needs triton, which machines without a GPU may lack

    return TritonLatents(request.dtype, request.spec)
