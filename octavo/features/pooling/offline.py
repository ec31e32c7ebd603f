"""`PoolingMethods`: the methods of `LLM` for vectors, labels and scores."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, get_args

import numpy as np

from octavo.core.errors import InvalidRequestError
from octavo.core.info import ModelInfo
from octavo.core.request import GenerateRequest
from octavo.features.pooling.api import GivenPoolingParams, settings_of
from octavo.features.pooling.params import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooled,
    PooledData,
    PooledOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PoolingSpec,
    ScoringOutput,
    ScoringRequestOutput,
    Task,
)
from octavo.features.pooling.requests import Pair, PoolingPreparer, pooled_output
from octavo.features.pooling.scoring import ScorePlan, paired, plan_scores
from octavo.python_api.inputs import as_list, tokenization
from octavo.python_api.local import LocalEngine
from octavo.python_api.loop import SharedLoop
from octavo.python_api.progress import PromptProgress, UseTqdm, open_progress
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.tokenizer import Tokenizer


class PoolingDriver:
    """Prepares requests and runs a loop until they have ended."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self.preparer = PoolingPreparer(tokenizer, info)
        self._ids = itertools.count()

    def prepare(
        self, prompt: Prompt | Pair, params: PoolingSpec, *, priority: int = 0, **tokenizing: Any
    ) -> GenerateRequest:
        request_id = f"pool-{next(self._ids)}"
        return self.preparer.prepare(
            prompt, params, request_id=request_id, priority=priority, param="prompt", **tokenizing
        )

    def plan_scores(self, pairs: Sequence[Pair], **tokenizing: Any) -> ScorePlan:
        return plan_scores(pairs, self.preparer, lambda prompt, params: self.prepare(prompt, params, **tokenizing))

    def run(
        self, core: SharedLoop, requests: Sequence[GenerateRequest], progress: PromptProgress
    ) -> list[PooledOutput]:
        """Return the results in the requests' order; abort the rest on any exception.

        Raises:
            InvalidRequestError, PoolingFailedError: the first that could not be computed.
        """
        lengths = {request.id: len(request.tokens) for request in requests}
        done: dict[str, PooledOutput] = {}
        with closing(core.run(requests)) as news:
            for delta in news:
                if delta.finish is not None:
                    progress.took(lengths[delta.id], 0)
                    done[delta.id] = pooled_output(delta)
        return [done[request.id] for request in requests]


class PoolingMethods(ABC):
    """Mixin of `LLM`.

    Common arguments:
        truncate_prompt_tokens: cut longer prompts; -1 to the model's maximum.
        use_tqdm: as in `LLM.generate`.
        lora_request: adapter, one for all prompts or one for each.
        pooling_params: one for all prompts, or one for each, in place of `dimensions` and `normalize`.
        tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`, `truncation_side`.
    """

    _engine: LocalEngine

    @property
    @abstractmethod
    def _core(self) -> SharedLoop: ...

    @cached_property
    def _pooling(self) -> PoolingDriver:
        return PoolingDriver(self._engine.tokenizer, self._engine.info)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        pooling_params: GivenPoolingParams = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each prompt, in `outputs.embedding`.

        Args:
            dimensions: number of elements to keep, for models trained for it.
            normalize: whether to scale vectors to length 1; by default the checkpoint's setting.

        Raises:
            InvalidRequestError: a prompt can't be served, or the model makes no vectors.
        """
        prompts = as_list(prompts)
        settings = settings_of(pooling_params, len(prompts), dimensions=dimensions, normalize=normalize)
        params = [self._pooling.preparer.params("embed", **one) for one in settings]
        tokenizing = _tokenizing(truncate_prompt_tokens, tokenization_kwargs)
        return [
            EmbeddingRequestOutput(one.request_id, EmbeddingOutput(one.pooled.values()), tokens, one.num_cached_tokens)
            for tokens, one in self._pool(prompts, params, use_tqdm, tokenizing, lora_request)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: GivenPoolingParams = None,
        *,
        pooling_task: Task = "token_embed",
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        convert_to_numpy: bool = False,
    ) -> list[PoolingRequestOutput]:
        """Return the task's result for each prompt, in `outputs.data`: by default a vector for each token.

        Args:
            convert_to_numpy: return arrays in float32 in place of lists, which takes less time and memory.
        """
        if pooling_task not in get_args(Task):
            raise InvalidRequestError(
                f"pooling_task must be one of {', '.join(get_args(Task))}.", param="pooling_task", value=pooling_task
            )
        prompts = as_list(prompts)
        settings = settings_of(pooling_params, len(prompts), normalize=normalize)
        params = [self._pooling.preparer.params(pooling_task, **one) for one in settings]
        several = pooling_task == "token_embed"
        tokenizing = _tokenizing(truncate_prompt_tokens, tokenization_kwargs)
        return [
            PoolingRequestOutput(
                one.request_id,
                PoolingOutput(_data(one.pooled, several=several, as_array=convert_to_numpy)),
                tokens,
                one.num_cached_tokens,
            )
            for tokens, one in self._pool(prompts, params, use_tqdm, tokenizing, lora_request)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        pooling_params: GivenPoolingParams = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the classification head's probabilities for each prompt, in `outputs.probs`."""
        prompts = as_list(prompts)
        params = [self._pooling.preparer.params("classify", **one) for one in settings_of(pooling_params, len(prompts))]
        tokenizing = _tokenizing(truncate_prompt_tokens, tokenization_kwargs)
        return [
            ClassificationRequestOutput(one.request_id, ClassificationOutput(one.pooled.values()), tokens)
            for tokens, one in self._pool(prompts, params, use_tqdm, tokenizing, lora_request)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return similarity scores of texts, in `outputs.score`: one with each of many, or pair by pair.

        The score is the output of a cross-encoder's head, or else the cosine of the two embeddings.
        """
        first, second = ([one] if isinstance(one, str) else list(one) for one in (data_1, data_2))
        (asked,) = self._engine.feature_options(1, lora_request=lora_request)
        tokenizing = _tokenizing(truncate_prompt_tokens, tokenization_kwargs) | {"options": asked}
        plan = self._pooling.plan_scores(paired(first, second, ("data_1", "data_2")), **tokenizing)
        with open_progress(use_tqdm, len(plan.requests)) as progress:
            results = [one.pooled for one in self._pooling.run(self._core, plan.requests, progress)]
        return [
            ScoringRequestOutput(f"score-{place}", ScoringOutput(score), plan.tokens(place))
            for place, score in enumerate(plan.scores(results))
        ]

    def _pool(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingSpec],
        use_tqdm: UseTqdm,
        tokenizing: dict[str, Any],
        lora_request: Any,
    ) -> list[tuple[list[int], PooledOutput]]:
        """Return each prompt's tokens and result."""
        given = self._engine.feature_options(len(prompts), lora_request=lora_request)
        parts = zip(prompts, params, given, strict=True)
        requests = [self._pooling.prepare(prompt, one, options=asked, **tokenizing) for prompt, one, asked in parts]
        with open_progress(use_tqdm, len(requests)) as progress:
            done = self._pooling.run(self._core, requests, progress)
        return [(request.tokens, one) for request, one in zip(requests, done, strict=True)]


def _data(pooled: Pooled, *, several: bool, as_array: bool) -> PooledData:
    if as_array:
        return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)
    return pooled.rows() if several else pooled.values()


def _tokenizing(truncate: int | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge the tokenizing options; the plain argument takes precedence."""
    return tokenization(kwargs) | ({} if truncate is None else {"truncate": truncate})


METHODS = PoolingMethods
