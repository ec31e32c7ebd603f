"""How likely certain tokens are to come next: what decisions and scores by label are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.core.output import RequestOutput
from octavo.core.params import OutputKind, SamplingParams


def asking_for(tokens: Sequence[int]) -> SamplingParams:
    """The sampling of a request for their log-probabilities, at most `MAX_LOGPROB_TOKENS` of them."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        detokenize=False,
        logprob_token_ids=list(tokens),
        output_kind=OutputKind.FINAL_ONLY,
    )


def logprobs_of(output: RequestOutput, tokens: Sequence[int]) -> list[float]:
    """Natural logarithms of their probabilities among all tokens, in the order of `tokens`."""
    (told,) = output.outputs[0].logprobs or [{}]
    return [told[token].logprob for token in tokens]


def shares_of(logprobs: Sequence[float]) -> list[float]:
    """Their probabilities among each other: the softmax, which sums to 1."""
    peak = max(logprobs)  # without it tokens that are all most unlikely would be 0 / 0
    weights = [math.exp(one - peak) for one in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
