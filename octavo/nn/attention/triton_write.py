"""Storing keys and values in a paged cache, on a GPU: alone, or fused with norms and rotation."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.attention.triton_fp8 import narrow
from octavo.nn.ops.triton_overlap import follow


@triton.jit
def write_kernel(
    k,
    v,
    cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Store one token's keys and values; nothing for a token with a negative slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        h = tl.arange(0, BLOCK_H)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        valid = (h < HEADS) & (d < D)
        target = cache + slot // PAGE * block_stride + slot % PAGE * cell_stride + h * kv_head_stride + d
        keys = tl.load(k + token * k_token_stride + h * k_head_stride + d, mask=valid, other=0.0)
        values = tl.load(v + token * v_token_stride + h * v_head_stride + d, mask=valid, other=0.0)
        tl.store(target, keys, mask=valid)
        tl.store(target + value_stride, values, mask=valid)


@triton.jit
def _rotated(low, high, cos, sin):
    """Return both halves of heads, rotated; fused explicitly, since compilers choose which product is rounded."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def _turned(source, h_valid, i, norm, cos, sin, eps, HALF: tl.constexpr, NORMED: tl.constexpr):
    """Return both halves of some heads, normalized if NORMED, then rotated, in float32."""
    valid = h_valid & (i < HALF)
    low = tl.load(source + i, mask=valid, other=0.0).to(tl.float32)
    high = tl.load(source + i + HALF, mask=valid, other=0.0).to(tl.float32)
    if NORMED:
        square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        inverse = tl.rsqrt(square + eps)[:, None]
        low = low * inverse * tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        high = high * inverse * tl.load(norm + i + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    return _rotated(low, high, cos, sin)


@triton.jit
def rotate_write_kernel(
    qkv,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slot_mapping,
    cache,
    cache_scales,
    eps,
    token_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORMED: tl.constexpr,
    KEPT: tl.constexpr,
    FORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Process some heads of one token: rotate queries in place; rotate and store keys; store values.

    With KEPT, also rotate keys in place. An FP8 cache (FORM, `triton_fp8.py`) is given as bytes.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * (2 * HALF) + i, mask=i < HALF, other=0.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + i, mask=i < HALF, other=0.0)
    QUERY_GROUPS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    source = qkv + token * token_stride
    kind = qkv.dtype.element_ty
    if group < QUERY_GROUPS:
        h = group * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        place = source + h * (2 * HALF)
        low, high = _turned(place, h < HEADS, i, q_norm, cos, sin, eps, HALF, NORMED)
        valid = (h < HEADS) & (i < HALF)
        tl.store(place + i, low.to(kind), mask=valid)
        tl.store(place + i + HALF, high.to(kind), mask=valid)
    else:
        h = (group - QUERY_GROUPS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        keys = source + (HEADS + h) * (2 * HALF)
        values = source + (HEADS + KV_HEADS + h) * (2 * HALF)
        valid = (h < KV_HEADS) & (i < HALF)
        low, high = _turned(keys, h < KV_HEADS, i, k_norm, cos, sin, eps, HALF, NORMED)
        if KEPT:
            tl.store(keys + i, low.to(kind), mask=valid)
            tl.store(keys + i + HALF, high.to(kind), mask=valid)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            low_value = tl.load(values + i, mask=valid, other=0.0)
            high_value = tl.load(values + i + HALF, mask=valid, other=0.0)
            target = cache + slot // PAGE * block_stride + slot % PAGE * cell_stride + h * kv_head_stride + i
            if FORM > 0:
                key_unit = 1.0 / tl.load(cache_scales + h, mask=h < KV_HEADS, other=1.0)
                value_unit = 1.0 / tl.load(cache_scales + KV_HEADS + h, mask=h < KV_HEADS, other=1.0)
                tl.store(target, narrow(low * key_unit, FORM), mask=valid)
                tl.store(target + HALF, narrow(high * key_unit, FORM), mask=valid)
                low_code = narrow(low_value.to(tl.float32) * value_unit, FORM)
                high_code = narrow(high_value.to(tl.float32) * value_unit, FORM)
                tl.store(target + value_stride, low_code, mask=valid)
                tl.store(target + value_stride + HALF, high_code, mask=valid)
            else:
                stored = cache.dtype.element_ty
                tl.store(target, low.to(stored), mask=valid)
                tl.store(target + HALF, high.to(stored), mask=valid)
                tl.store(target + value_stride, low_value.to(stored), mask=valid)
                tl.store(target + value_stride + HALF, high_value.to(stored), mask=valid)


@triton.jit
def rotate_write_rows_kernel(
    qkv,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slot_mapping,
    cache,
    cache_scales,
    eps,
    token_stride,
    block_stride,
    value_stride,
    kv_head_stride,
    cell_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORMED: tl.constexpr,
    KEPT: tl.constexpr,
    FORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Do what `rotate_write_kernel` does, with the same results, for many tokens: BLOCK_H heads of one token, queries,
    keys and values alike, so that programs are few and load much at once."""
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    inside = i < HALF
    valid = (h < HEADS + 2 * KV_HEADS) & inside
    is_query, is_value = h < HEADS, h >= HEADS + KV_HEADS
    place = qkv + token * token_stride + h * (2 * HALF) + i
    low_given = tl.load(place, mask=valid, other=0.0)
    high_given = tl.load(place + HALF, mask=valid, other=0.0)
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * (2 * HALF) + i, mask=inside, other=0.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + i, mask=inside, other=0.0)
    low, high = low_given.to(tl.float32), high_given.to(tl.float32)
    if NORMED:
        square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        inverse = tl.rsqrt(square + eps)[:, None]
        q_low = tl.load(q_norm + i, mask=inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + i + HALF, mask=inside, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + i, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + i + HALF, mask=inside, other=0.0).to(tl.float32)
        low = low * inverse * tl.where(is_query, q_low, k_low)
        high = high * inverse * tl.where(is_query, q_high, k_high)
    low_turned, high_turned = _rotated(low, high, cos, sin)
    kind = qkv.dtype.element_ty
    in_place = valid & (h < HEADS + KV_HEADS if KEPT else is_query)
    tl.store(place, low_turned.to(kind), mask=in_place)
    tl.store(place + HALF, high_turned.to(kind), mask=in_place)
    low_kept = tl.where(is_value, low_given.to(tl.float32), low_turned)
    high_kept = tl.where(is_value, high_given.to(tl.float32), high_turned)
    row = tl.maximum(h - HEADS, 0)
    stored = valid & (h >= HEADS) & (slot >= 0)
    of_head = row // KV_HEADS * value_stride + row % KV_HEADS * kv_head_stride
    target = cache + slot // PAGE * block_stride + slot % PAGE * cell_stride + of_head + i
    if FORM > 0:
        unit = 1.0 / tl.load(cache_scales + row, mask=(h >= HEADS) & (h < HEADS + 2 * KV_HEADS), other=1.0)
        tl.store(target, narrow(low_kept * unit, FORM), mask=stored)
        tl.store(target + HALF, narrow(high_kept * unit, FORM), mask=stored)
    else:
        tl.store(target, low_kept.to(cache.dtype.element_ty), mask=stored)
        tl.store(target + HALF, high_kept.to(cache.dtype.element_ty), mask=stored)
