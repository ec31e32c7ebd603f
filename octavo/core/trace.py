"""`TraceLine`: what a trace says of one request. Traces are lines of JSON and hold no text and no token ids.

The first four fields have the names and units of the traces that Mooncake published (arXiv:2407.00079), so those can be
read, too.
"""

from __future__ import annotations

import msgspec

PUBLISHED_BLOCK = 512
"""Tokens of a block in Mooncake's traces, whose lines don't say it."""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: its arrival, in milliseconds after the trace's beginning.
        input_length, output_length: tokens of its prompt, and of its longest answer.
        hash_ids: a number for each block of the prompt; the last block may be partly filled. It depends on the block
            and all before it, so prompts with a common prefix begin with the same numbers.
        block_size: tokens of a block.
        max_tokens: as the request asked; None for the rest of the context.
        n: answers to the prompt.
        priority: as in `GenerateRequest`.
        finish: why the longest answer ended, a `FinishReason`; "" if unknown.
        answer_ids: numbers of the full blocks after the prompt's full ones, up to the end of the first answer. They
            tell whether a later prompt continues it.
        cached: tokens of the prompt that the engine found in its KV cache.
        ttft, latency: milliseconds from the arrival to the first token, and to the end.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    block_size: int = PUBLISHED_BLOCK
    max_tokens: int | None = None
    n: int = 1
    priority: int = 0
    finish: str = ""
    answer_ids: list[int] = []
    cached: int | None = None
    ttft: float | None = None
    latency: float | None = None
