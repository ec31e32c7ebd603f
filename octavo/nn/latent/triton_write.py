"""Rotate queries, normalize and rotate latents, and store the latents, in one launch on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit
def latent_write_kernel(
    q,
    latents,
    norm,
    cos_sin,
    positions,
    slot_mapping,
    cache,
    eps,
    q_token_stride,
    q_head_stride,
    latent_stride,
    block_stride,
    cell_stride,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PAGE: tl.constexpr,
    KEPT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Process some heads' queries of one token, or, as the last program of the token, its latent.

    Queries are rotated in place. The latent is stored, with KEPT also in place.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    i_valid = i < HALF
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * (2 * HALF) + i, mask=i_valid, other=0.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + i, mask=i_valid, other=0.0)
    GROUPS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    if group < GROUPS:
        h = group * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        valid = (h < HEADS) & i_valid[None, :]
        place = q + token * q_token_stride + h * q_head_stride + NOPE + i[None, :]
        low = tl.load(place, mask=valid, other=0.0).to(tl.float32)
        high = tl.load(place + HALF, mask=valid, other=0.0).to(tl.float32)
        kind = q.dtype.element_ty
        tl.store(place, (low * cos[None, :] - high * sin[None, :]).to(kind), mask=valid)
        tl.store(place + HALF, (high * cos[None, :] + low * sin[None, :]).to(kind), mask=valid)
    else:
        c = tl.arange(0, BLOCK_RANK)
        c_valid = c < RANK
        source = latents + token * latent_stride
        x = tl.load(source + c, mask=c_valid, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        x = x * inverse * tl.load(norm + c, mask=c_valid, other=0.0).to(tl.float32)
        # Other names than above: the compiler wants one type of a variable.
        even = tl.load(source + RANK + i, mask=i_valid, other=0.0).to(tl.float32)
        odd = tl.load(source + RANK + HALF + i, mask=i_valid, other=0.0).to(tl.float32)
        first = even * cos - odd * sin
        second = odd * cos + even * sin
        if KEPT:
            kept = latents.dtype.element_ty
            tl.store(source + c, x.to(kept), mask=c_valid)
            tl.store(source + RANK + i, first.to(kept), mask=i_valid)
            tl.store(source + RANK + HALF + i, second.to(kept), mask=i_valid)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            stored = cache.dtype.element_ty
            target = cache + slot // PAGE * block_stride + slot % PAGE * cell_stride
            tl.store(target + c, x.to(stored), mask=c_valid)
            tl.store(target + RANK + i, first.to(stored), mask=i_valid)
            tl.store(target + RANK + HALF + i, second.to(stored), mask=i_valid)
