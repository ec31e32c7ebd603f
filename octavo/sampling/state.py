"""The sampler's view of a row: its parameters as tensors, prepared once, and its tokens so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.errors import InvalidRequestError
from octavo.core.output import TokenLogprobs
from octavo.core.params import LogprobsMode, SamplingParams
from octavo.core.plan import NewRow
from octavo.sampling.allowed import Words, words_of
from octavo.sampling.logprobs import LogprobsReport, WantedLogprobs

_MAX_BIAS = 100.0
_MOST_CANDIDATES = 256
"""Largest top_k for which only the most likely tokens of each rank are gathered."""


@dataclass(frozen=True, slots=True)
class PreparedParams:
    """One request's sampling parameters, ready for use in a batch.

    Attributes:
        greedy: take the most likely token.
        plain: greedy, without processors and reports.
        drawn: without processors, filters and reports, except for `min_tokens`.
        filters: [4] float64: temperature, top_k (0 for all), top_p, min_p.
        filtered: whether any of top_k, top_p and min_p applies.
        seed: [1] int64.
        bias_ids, bias_values: [b] int64 and [b] float32.
        banned_ids: [s] int64, tokens not sampled before `min_tokens`.
        logprobs: report options for each token; None for no report.
        prompt_logprobs: alternatives to report, -1 for all; None reports nothing.
        allowed: mask of the allowed tokens, as in `Allowed.words`; None for all.
        bad_words: sequences of tokens forbidden in the output, all within the vocabulary.
        packed_words: int32, each bad word as its length followed by its tokens.
    """

    greedy: bool
    plain: bool
    drawn: bool
    filtered: bool
    filters: Tensor
    seed: Tensor
    repetition: float
    frequency: float
    presence: float
    min_tokens: int
    banned_ids: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    logprobs: LogprobsReport | None
    prompt_logprobs: int | None
    allowed: Words | None
    bad_words: list[list[int]]
    packed_words: NDArray[np.int32]

    @classmethod
    def of(cls, row: NewRow, vocab_size: int, logprobs_mode: LogprobsMode, columns: int = 0) -> PreparedParams:
        """Return the parameters of a request that takes a slot.

        Args:
            vocab_size: of the model.
            columns: as in `make`.
        """
        mode: LogprobsMode = "raw_logprobs" if row.raw_logprobs else logprobs_mode
        return cls.make(row.params, row.seed, row.stop_ids, vocab_size + row.added_tokens, mode, columns)

    @classmethod
    def make(
        cls,
        params: SamplingParams,
        seed: int,
        stop_ids: list[int],
        vocab_size: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        columns: int = 0,
    ) -> PreparedParams:
        """
        Args:
            vocab_size: number of tokens that this request may have.
            columns: of the widest logits, if other requests have more tokens.
            seed: any integer; taken modulo 2^64.
            stop_ids: tokens that end this request. Those outside the vocabulary are ignored.
            logprobs_mode: the kind of numbers in `logprobs`.

        Raises:
            InvalidRequestError: `logit_bias` names a token outside the vocabulary.
        """
        bias = params.logit_bias or {}
        for token in bias:
            if not 0 <= token < vocab_size:
                text = f"logit_bias contains token id {token}, which is outside the vocabulary [0, {vocab_size})."
                raise InvalidRequestError(text, param="logit_bias", value=token)
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        banned = sorted({token for token in stop_ids if 0 <= token < vocab_size}) if params.min_tokens else []
        filtered = bool(top_k) or params.top_p < 1 or params.min_p > 0
        wanted = _reported(params, vocab_size)
        reported = None if wanted is None else LogprobsReport(wanted, logprobs_mode)
        bad_words = [word for word in params.bad_token_ids or [] if all(0 <= token < vocab_size for token in word)]
        changed = bias or params.has_penalties or params.allowed_token_ids is not None or params.bad_token_ids
        return cls(
            greedy=params.greedy,
            plain=params.greedy
            and not (bias or banned or params.has_penalties or params.allowed_token_ids or params.bad_token_ids)
            and reported is None,
            drawn=not changed and reported is None and (params.greedy or not filtered),
            filtered=filtered,
            filters=torch.tensor([params.temperature, top_k, params.top_p, params.min_p], dtype=torch.float64),
            seed=torch.tensor([_signed(seed)]),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            min_tokens=params.min_tokens,
            banned_ids=torch.tensor(banned, dtype=torch.long),
            bias_ids=torch.tensor(list(bias), dtype=torch.long),
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32).clamp_(-_MAX_BIAS, _MAX_BIAS),
            logprobs=reported,
            prompt_logprobs=params.prompt_logprobs,
            allowed=None
            if params.allowed_token_ids is None
            else words_of(
                [token for token in params.allowed_token_ids if 0 <= token < vocab_size], max(vocab_size, columns)
            ),
            bad_words=bad_words,
            packed_words=np.array([number for word in bad_words for number in (len(word), *word)], dtype=np.int32),
        )

    @property
    def changes(self) -> bool:
        """Whether any processor changes the logits, apart from filters and `allowed`."""
        penalties = (self.repetition, self.frequency, self.presence)
        return penalties != (1, 0, 0) or bool(len(self.banned_ids) or len(self.bias_ids) or len(self.packed_words))

    @property
    def num_candidates(self) -> int:
        """How many of the most likely tokens determine the one that is drawn; 0 if all do."""
        if self.plain:
            return 1
        top_k = int(self.filters[1])
        few = not self.greedy and 0 < top_k <= _MOST_CANDIDATES
        return top_k if few and not self.changes and self.logprobs is None and self.allowed is None else 0


@dataclass(slots=True)
class SampleRow:
    """One row of logits to sample from.

    Attributes:
        tokens: [n] int32, all tokens of the sequence so far, prompt first, -1 for an embedding; may be a view.
        num_prompt: number of prompt tokens among them.
    """

    slot_params: PreparedParams
    tokens: NDArray[np.int32]
    num_prompt: int

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def ids(self) -> Tensor:
        """`tokens` as indices, [n] int64."""
        return torch.from_numpy(self.tokens).long()


@dataclass(slots=True)
class SampleResult:
    """The result of a batch.

    Attributes:
        tokens: [S] int64; 0 for a bad row.
        logprobs: row -> its log-probabilities, for the rows that request them.
        bad_rows: rows that can't be sampled: their logits have NaN or +inf, or no token is possible.
    """

    tokens: Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    bad_rows: list[int] = field(default_factory=list)


def _reported(params: SamplingParams, vocab_size: int) -> WantedLogprobs | None:
    if params.logprob_token_ids:
        return tuple(params.logprob_token_ids)
    return vocab_size if params.logprobs == -1 else params.logprobs


def _signed(seed: int) -> int:
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
