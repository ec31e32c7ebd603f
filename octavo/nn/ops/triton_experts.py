"""Kernels of the products of experts with sorted tokens, and of their sum; launched by `expert_products.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow


@triton.jit
def activation_of(x, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the activation of float32 values; see `ACTIVATIONS` in `activation.py` and `clamped_gate`."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "clamped":
        x = tl.minimum(x, limit)
        return x / (1.0 + tl.exp(-alpha * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive if ACTIVATION == "relu2" else positive


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up of float32 tensors, as `act_mul` and `clamped_gate` do."""
    if ACTIVATION == "clamped":
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    return activation_of(gate, alpha, limit, ACTIVATION) * up


@triton.jit
def weight_tile(
    w,
    expert,
    n,
    k,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Return [PARTS * WIDTH, DEPTH] of w [experts * PARTS, N, K]: the same outputs of each part."""
    if COPIES:
        tile = w.load([expert * PARTS, n, k]).reshape(PARTS * WIDTH, DEPTH)
    else:
        i = tl.arange(0, PARTS * WIDTH)
        output = tl.minimum(n + i % WIDTH, N - 1)
        at = k + tl.arange(0, DEPTH)
        place = w + (expert.to(tl.int64) * PARTS * N + i // WIDTH * N + output)[:, None] * K + at[None, :]
        if K % DEPTH == 0:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=(at < K)[None, :], other=0.0)
    return tile


@triton.jit
def rows_tile(x, row, start, k, K: tl.constexpr, END: tl.constexpr, DEPTH: tl.constexpr, COPIES: tl.constexpr):
    """Return the rows of x [*, K]: [rows, DEPTH] from column k on; columns from K to END are read as 0."""
    if COPIES:
        tile = x.load([start, k])
    else:
        at = k + tl.arange(0, DEPTH)
        place = x + row.to(tl.int64)[:, None] * K + at[None, :]
        if END <= K:
            tile = tl.load(place)
        else:
            tile = tl.load(place, mask=(at < K)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(
    acc,
    bias,
    weights,
    out,
    alpha,
    limit,
    expert,
    choice,
    start,
    rows,
    n,
    N: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Store the results of the sums acc [HEIGHT, WIDTH], or [HEIGHT, 2 * WIDTH] if GATED; see `grouped_kernel`."""
    PARTS: tl.constexpr = 2 if GATED else 1
    i = tl.arange(0, HEIGHT)
    column = n + tl.arange(0, WIDTH)
    inside = column < N
    own = bias + expert.to(tl.int64) * PARTS * N + column
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [HEIGHT, 2, WIDTH]), (0, 2, 1)))
        if WEIGHTED:
            factor = tl.load(weights + choice)[:, None]
            gate, up = gate * factor, up * factor
        if BIASED:
            gate += tl.load(own, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(own + N, mask=inside, other=0.0).to(tl.float32)[None, :]
        result = activated(gate, up, alpha, limit, ACTIVATION)
    else:
        result = acc
        if WEIGHTED:
            result *= tl.load(weights + choice)[:, None]
        if BIASED:
            result += tl.load(own, mask=inside, other=0.0).to(tl.float32)[None, :]
        if FIRST:
            result = activation_of(result, alpha, limit, ACTIVATION)
    target = start + i if FIRST else choice
    place = out + target.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=(i < rows)[:, None] & inside[None, :])


@triton.jit
def _multiply_tile(
    x,
    w,
    bias,
    weights,
    order,
    out,
    alpha,
    limit,
    expert,
    start,
    rows,
    n,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TURNED: tl.constexpr,
    COPIES: tl.constexpr,
    COPIES_ROWS: tl.constexpr,
):
    """Multiply `rows` choices, at most HEIGHT, by WIDTH outputs from n on; see `grouped_kernel`."""
    PARTS: tl.constexpr = 2 if GATED else 1
    i = tl.arange(0, HEIGHT)
    position = start + tl.minimum(i, rows - 1)
    choice = tl.load(order + position)
    row = choice // TOP_K if FIRST else position
    END: tl.constexpr = (K + DEPTH - 1) // DEPTH * DEPTH
    acc = tl.zeros([PARTS * WIDTH, HEIGHT] if TURNED else [HEIGHT, PARTS * WIDTH], tl.float32)
    for k in range(0, K, DEPTH):
        value = rows_tile(x, row, start, k, K, END, DEPTH, COPIES_ROWS)
        matrix = weight_tile(w, expert, n, k, N, K, PARTS, WIDTH, DEPTH, COPIES)
        if TURNED:
            acc = tl.dot(matrix, value.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(value, matrix.T, acc, input_precision="ieee")
    if TURNED:
        acc = acc.T
    store_tile(
        acc,
        bias,
        weights,
        out,
        alpha,
        limit,
        expert,
        choice,
        start,
        rows,
        n,
        N,
        HEIGHT,
        WIDTH,
        FIRST,
        GATED,
        ACTIVATION,
        BIASED,
        WEIGHTED,
    )


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_kernel(
    x,
    x_half,
    w,
    bias,
    weights,
    order,
    tiles,
    out,
    num_tiles,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TURNED: tl.constexpr,
    HALVES: tl.constexpr,
    COPIES: tl.constexpr,
    COPIES_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply a tile of at most HEIGHT choices, all of one expert, by WIDTH outputs of its matrix.

    FIRST: x has the tokens' rows; results are at the choices' places in the order, activated, and before that times
    their weights if WEIGHTED. With GATED, w [experts * 2, N, K] has gates and their operands. Otherwise x has the rows
    of these places, and results are at the choices themselves.

    Args:
        x_half: x for tiles of half the height.
        w: [experts, N, K] unless GATED.
        bias: [experts, N], or [experts, 2 * N] if GATED.
        SIDE_BY_SIDE: number of tiles that consecutive programs cover before the next block of outputs.
        TURNED: the matrix is the left operand of the matrix units, which suits few choices per tile.
        HALVES: compute a tile that is at most half full with half the height.
        COPIES, COPIES_ROWS: w, x are tensor descriptors.
    """
    follow(OVERLAPS)
    width = tl.cdiv(N, WIDTH)
    beside = tl.program_id(0) // (SIDE_BY_SIDE * width) * SIDE_BY_SIDE
    index = tl.program_id(0) % (SIDE_BY_SIDE * width)
    tile = beside + index % SIDE_BY_SIDE
    n = index // SIDE_BY_SIDE * WIDTH
    if tile >= num_tiles:
        return
    expert, start = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    rows = tl.load(tiles + 3 * tile + 2)
    if rows == 0:
        return
    if HALVES and rows <= HEIGHT // 2:
        _multiply_tile(
            x_half,
            w,
            bias,
            weights,
            order,
            out,
            alpha,
            limit,
            expert,
            start,
            rows,
            n,
            TOP_K,
            N,
            K,
            HEIGHT // 2,
            WIDTH,
            DEPTH,
            FIRST,
            GATED,
            ACTIVATION,
            BIASED,
            WEIGHTED,
            TURNED,
            COPIES,
            COPIES_ROWS,
        )
    else:
        _multiply_tile(
            x,
            w,
            bias,
            weights,
            order,
            out,
            alpha,
            limit,
            expert,
            start,
            rows,
            n,
            TOP_K,
            N,
            K,
            HEIGHT,
            WIDTH,
            DEPTH,
            FIRST,
            GATED,
            ACTIVATION,
            BIASED,
            WEIGHTED,
            TURNED,
            COPIES,
            COPIES_ROWS,
        )


@triton.jit
def _sum(
    rows,
    weights,
    experts,
    added,
    token,
    column,
    begin,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return the sum of a token's rows at these columns; see `sum_kernel`."""
    inside = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        choice = token * TOP_K + k
        if WHOLE:  # rows are read without waiting for the numbers of their experts
            value = tl.load(rows + choice * N + column, mask=inside, other=0.0, eviction_policy="evict_first")
            value = value.to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + choice)
        else:
            expert = tl.load(experts + choice) - begin
            mine = (expert >= 0) & (expert < OWNED)
            value = tl.load(rows + choice * N + column, mask=inside & mine, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.where(mine, tl.load(weights + choice), 0.0)
        total += value
    if ADDED:
        total += tl.load(added + token * N + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["begin"])
def sum_kernel(
    rows,
    weights,
    experts,
    added,
    out,
    begin,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum each token's rows [T, TOP_K, N] of experts in [begin, begin + OWNED), in the order of its choices.

    ADDED: plus `added` [T, N]. WHOLE: all experts are in that range.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _sum(rows, weights, experts, added, token, column, begin, OWNED, TOP_K, N, BLOCK, WEIGHTED, ADDED, WHOLE)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["begin"])
def sum_norm_kernel(
    rows,
    weights,
    experts,
    added,
    stream,
    norm,
    out,
    begin,
    eps,
    OWNED: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add a token's sum, as `sum_kernel` computes it, to stream [T, N], and store the stream's RMS norm in `out`."""
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    before = tl.load(stream + token * N + column, mask=inside, other=0.0)
    scale = tl.load(norm + column, mask=inside, other=0.0)  # no load moves to before a store
    total = _sum(rows, weights, experts, added, token, column, begin, OWNED, TOP_K, N, BLOCK, WEIGHTED, ADDED, WHOLE)
    total += before.to(tl.float32)
    value = total.to(stream.dtype.element_ty)
    tl.store(stream + token * N + column, value, mask=inside)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    scaled = wide * inverse * scale.to(tl.float32)
    tl.store(out + token * N + column, scaled.to(out.dtype.element_ty), mask=inside)
