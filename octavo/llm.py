"""`LLM`: the engine in this process, for scripts and notebooks. The same loop as the server's, driven by the caller."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.info import ModelInfo
from octavo.core.output import RequestOutput
from octavo.core.params import OutputKind, SamplingParams
from octavo.core.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    Task,
)
from octavo.core.stats import EngineStats
from octavo.engine.loop import EngineLoop
from octavo.hub.progress import Progress, silent
from octavo.hub.resolve import resolve
from octavo.llm_pooling import PoolingDriver
from octavo.text.answers import AnswerFormats
from octavo.text.assembler import RequestAssembler
from octavo.text.chat import no_template_error
from octavo.text.model_text import load_text
from octavo.text.prepare import Preparer, Prompt, not_generating, sampling_defaults, with_defaults
from octavo.text.scoring import paired
from octavo.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None

_STARVED_PAUSE_S = 0.001


class LLM:
    """A model that is loaded and ready.

    Example:
        >>> with LLM("smollm2") as llm:
        ...     outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))
        ...     print(outputs[0].outputs[0].text)

    Args:
        model: a catalogue name, a folder, a .gguf file or a Hugging Face id.
        chat_template: a Jinja template, or a file with one, instead of the model's own.
        progress: told how a download gets on.
        settings: any field of `octavo.config`'s dataclasses by its name, or by the name of its command-line flag:
            `dtype`, `max_model_len`, `kv_cache_memory_bytes`, `max_num_seqs`, `enable_prefix_caching`, `threads`, ...

    Raises:
        ModelNotFoundError, ModelFileError, ConfigError: with what to do about it.
        TypeError: a setting that doesn't exist.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat_template: str | None = None,
        progress: Progress = silent,
        **settings: Any,
    ) -> None:
        config = EngineConfig.of(model=model, **settings) if model else EngineConfig.of(**settings)
        files = resolve(
            config.model.model, revision=config.model.revision, weights=config.needs_weights, progress=progress
        )
        self._loop: EngineLoop | None
        self._loop, self._info = build_core(config, files)
        text = load_text(files, config.model, chat_template=chat_template)
        self._tokenizer, self._template = text.tokenizer, text.chat
        self._pooling = PoolingDriver(text.tokenizer, self._info)
        self._preparer = Preparer(text.tokenizer, self._info, reasoning=AnswerFormats.of(text.chat).reasoning)
        self._defaults = sampling_defaults(text.defaults)
        self._ids = itertools.count()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete each prompt; the outputs come in the prompts' order.

        Args:
            prompts: one or several of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
            sampling_params: one for all, or one each; by default the model's own recommendation.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; nothing has been computed then.
        """
        prompts = _as_list(prompts)
        params = _one_each(sampling_params or self.get_default_sampling_params(), len(prompts), "sampling_params")
        odd = next((one for one in params if not isinstance(one, SamplingParams)), None)
        if odd is not None:
            raise TypeError(f"sampling_params must be SamplingParams, or a list of them; got {type(odd).__name__}")
        priorities = _one_each(priority, len(prompts), "priority")
        assemblers = [
            self._open(prompt, p.replace(output_kind=OutputKind.FINAL_ONLY), priority=rank)
            for prompt, p, rank in zip(prompts, params, priorities, strict=True)
        ]
        done = {output.request_id: output for output in self._run(assemblers)}
        return [done[a.request.id] for a in assemblers]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; `template` goes to the chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        if self._template is None:
            raise no_template_error() if "generate" in self._info.tasks else not_generating(self._info)
        texts = [self._template.render(conversation, **template) for conversation in conversations]
        prompts = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt piece by piece, as `sampling_params.output_kind` says. Closing the iterator aborts."""
        yield from self._run([self._open(prompt, sampling_params or self.get_default_sampling_params())])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each prompt, in `outputs.embedding`.

        Args:
            dimensions: keep so many elements, for models that were trained for it.
            normalize: whether vectors get length 1; by default as the model's authors have it.
            truncate_prompt_tokens: cut longer prompts; -1 to what the model takes.

        Raises:
            InvalidRequestError: a prompt can't be served, or the model makes no vectors.
        """
        params = self._pooling.preparer.params("embed", dimensions=dimensions, normalize=normalize)
        return [
            EmbeddingRequestOutput(one.request_id, EmbeddingOutput(one.pooled.values()), tokens, one.num_cached_tokens)
            for tokens, one in self._pool(prompts, params, truncate_prompt_tokens)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: Task = "token_embed",
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the task makes of each prompt, in `outputs.data`: by default a vector of each token."""
        params = self._pooling.preparer.params(pooling_task, normalize=normalize)
        several = pooling_task == "token_embed"
        return [
            PoolingRequestOutput(
                one.request_id,
                PoolingOutput(one.pooled.rows() if several else one.pooled.values()),
                tokens,
                one.num_cached_tokens,
            )
            for tokens, one in self._pool(prompts, params, truncate_prompt_tokens)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> list[ClassificationRequestOutput]:
        """The classification head's probabilities for each prompt, in `outputs.probs`; labels in `info.pooler`."""
        params = self._pooling.preparer.params("classify")
        return [
            ClassificationRequestOutput(one.request_id, ClassificationOutput(one.pooled.values()), tokens)
            for tokens, one in self._pool(prompts, params, truncate_prompt_tokens)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, in `outputs.score`: one with each of many, or pair by pair.

        A cross-encoder's score is its head's output; else it is the cosine of the two embeddings.
        """
        first, second = ([one] if isinstance(one, str) else list(one) for one in (data_1, data_2))
        plan = self._pooling.plan_scores(paired(first, second, ("data_1", "data_2")), truncate_prompt_tokens)
        results = [one.pooled for one in self._pooling.run(self._core, plan.requests)]
        return [
            ScoringRequestOutput(f"score-{place}", ScoringOutput(score), plan.tokens(place))
            for place, score in enumerate(plan.scores(results))
        ]

    def stats(self) -> EngineStats:
        return self._core.stats()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return with_defaults(self._defaults, {})

    def close(self) -> None:
        """Free the model and its memory. Using the LLM afterwards is an error."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _core(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError("This LLM was closed; make a new one.")
        return self._loop

    def _pool(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, truncate: int | None
    ) -> list[tuple[list[int], PooledOutput]]:
        """Each prompt's tokens and result."""
        requests = [self._pooling.prepare(prompt, params, truncate) for prompt in _as_list(prompts)]
        done = self._pooling.run(self._core, requests)
        return [(request.tokens, one) for request, one in zip(requests, done, strict=True)]

    def _open(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> RequestAssembler:
        """Check and tokenise one prompt."""
        request_id = f"llm-{next(self._ids)}"
        prepared = self._preparer.prepare(prompt, params, request_id=request_id, priority=priority)
        return RequestAssembler(prepared.request, self._tokenizer, prepared.prompt_text)

    def _run(self, assemblers: Sequence[RequestAssembler]) -> Iterator[RequestOutput]:
        """Drive the loop until all these requests have ended; whatever interrupts it aborts them."""
        core = self._core
        open_: dict[str, RequestAssembler] = {}
        try:
            for assembler in assemblers:
                core.add(assembler.request)
                open_[assembler.request.id] = assembler
            while open_:
                if core.starved and core.busy:
                    time.sleep(_STARVED_PAUSE_S)
                for delta in core.step():
                    assembler = open_.get(delta.id)
                    if assembler is None:
                        continue
                    output = assembler.push(delta)
                    for index in assembler.aborts:
                        core.abort(delta.id, index)
                    if assembler.finished:
                        del open_[delta.id]
                    if output is not None:
                        yield output
        finally:
            for request_id in open_:
                core.abort(request_id)
            while core.busy:
                core.step()


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            "prompts must be a text, token ids, an object with 'prompt' or 'prompt_token_ids', or a list of these; "
            f"got {type(prompts).__name__}"
        )
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item]


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts.", param=name, value=len(value))
    return list(value)
