"""Set the scales of FP8 keys and values, from the checkpoint or by measuring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import Model
from octavo.nn.attention.base import FusedBackend
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.step import StepInput
from octavo.nn.weights import TensorSpec
from octavo.worker.compute import compute
from octavo.worker.relay import NO_RELAY, Relay

SCALING_TOKENS = 512
"""Most random tokens with which scales are measured."""
HEADROOM = 4.0


def set_scales(
    model: Model,
    dtype: torch.dtype,
    attention: FusedBackend,
    block_size: int,
    stored: dict[str, Tensor],
    relay: Relay = NO_RELAY,
) -> str:
    """Set the scales of every layer. The layers' caches must be bound.

    Args:
        dtype: of the model's activations.
        stored: the result of `stored_scales`.

    Returns:
        The scales' origin, for display.
    """
    layers = model.attention_layers
    missing = [layer for layer in layers if layer.path not in stored]
    for layer in layers:
        heads = layer.spec.num_kv_heads
        scales = stored.get(layer.path, torch.ones(2, 1))
        layer.scales = scales.expand(2, heads).to(layer.cache.device, torch.float32).contiguous()
    alone = relay.first and relay.last
    if not missing and alone:  # else other stages may have to measure
        return "scales from the checkpoint"
    kind = layers[0].cache.dtype
    if kind == torch.float8_e5m2:
        return "scales of 1" if len(missing) == len(layers) else "scales from the checkpoint, else of 1"
    largest = torch.finfo(kind).max
    for layer, peaks in zip(layers, measured_peaks(model, dtype, attention, block_size, relay), strict=True):
        if layer.path not in stored:
            layer.scales = (peaks * (HEADROOM / largest)).clamp_(min=1e-6)
    if not missing:
        return "scales from the checkpoint"
    return "measured scales" if len(missing) == len(layers) else "scales from the checkpoint, else measured"


def stored_scales(layers: Iterable[PagedAttention], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return layer path -> [2, 1 or num_kv_heads] float32, for the layers with both scales in the checkpoint.

    Raises:
        ModelFileError: a scale is not a positive number, or their count is neither 1 nor the number of heads.
    """
    found = {}
    for layer in layers:
        pair = [_stored(layer, kind, checkpoint) for kind in ("k", "v")]
        scales = [scale for scale in pair if scale is not None]
        if len(scales) == len(pair):
            width = max(scale.numel() for scale in scales)
            found[layer.path] = torch.stack([scale.expand(width) for scale in scales])
    return found


def _stored(layer: PagedAttention, kind: str, checkpoint: Checkpoint) -> Tensor | None:
    """Return the scale stored under one of its two usual names; None if there is none."""
    for name in (f"{layer.path}.{kind}_scale", f"{layer.path}.{kind}_proj.{kind}_scale"):
        if name not in checkpoint.names():
            continue
        shape = checkpoint.shape(name) or ()
        scale = checkpoint.tensor(name, TensorSpec(shape, torch.float32)).float().flatten()
        if scale.numel() not in (1, layer.spec.num_kv_heads) or not bool(((scale > 0) & scale.isfinite()).all()):
            raise ModelFileError(
                f"Tensor {name} in {checkpoint.origin} should be one positive number, or one for each of "
                f"{layer.spec.num_kv_heads} heads, but is {scale.tolist()[:8]}; leave --kv-cache-dtype out."
            )
        return scale
    return None


@torch.inference_mode()
def measured_peaks(
    model: Model, dtype: torch.dtype, attention: FusedBackend, block_size: int, relay: Relay = NO_RELAY
) -> Iterator[Tensor]:
    """Yield each layer's largest absolute keys and values per head, [2, num_kv_heads], for random tokens.

    FP8 has the same relative precision over five decimal orders of magnitude, so a scale need not be exact: with
    headroom for four times the measured peaks, no typical value is clipped and no significant one underflows.
    """
    count = min(SCALING_TOKENS, model.spec.max_position)
    blocks = -(-count // block_size)
    device = model.attention_layers[0].cache.device
    ids = torch.randint(model.spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    order = torch.arange(count, device=device)
    step = StepInput(
        input_ids=ids.to(device),
        positions=order,
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=order,
        logit_rows=order[-1:],
        max_query_len=count,
        max_seq_len=count,
        query_lens=[count],
    )
    step.attn = attention.prepare(step, block_size)
    kept = [(layer.cache, layer.scales) for layer in model.attention_layers]
    for layer in model.attention_layers:
        shape = attention.cache_shape(layer.spec, blocks, block_size)
        layer.cache, layer.scales = torch.zeros(shape, dtype=dtype, device=device), None
    relay.receive(count)
    relay.send(compute(model, step))
    for layer, (cache, scales) in zip(model.attention_layers, kept, strict=True):
        peaks = attention.peaks(layer.cache)
        layer.cache, layer.scales = cache, scales
        yield peaks
