"""Probabilities of given next tokens, for decisions and scores by label."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.core.output import RequestOutput
from octavo.core.params import OutputKind, SamplingParams


def asking_for(tokens: Sequence[int]) -> SamplingParams:
    """Return sampling parameters that request the log-probabilities of at most `MAX_LOGPROB_TOKENS` tokens."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        detokenize=False,
        logprob_token_ids=list(tokens),
        output_kind=OutputKind.FINAL_ONLY,
    )


def logprobs_of(output: RequestOutput, tokens: Sequence[int]) -> list[float]:
    """Return the tokens' natural log-probabilities in the whole vocabulary, in the order of `tokens`."""
    (told,) = output.outputs[0].logprobs or [{}]
    return [told[token].logprob for token in tokens]


def shares_of(logprobs: Sequence[float]) -> list[float]:
    """Return the softmax over `logprobs`, which sums to 1."""
    peak = max(logprobs)  # avoids 0 / 0 if all tokens are extremely unlikely
    weights = [math.exp(one - peak) for one in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
