"""`LLM`: the engine in this process, for scripts and notebooks. The same loop as the server's, driven by the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.core.errors import InvalidRequestError
from octavo.core.info import ModelInfo
from octavo.core.output import RequestOutput
from octavo.core.params import SamplingParams
from octavo.core.pausing import pause_mode, sleep_level, wake_tags
from octavo.core.stats import EngineStats
from octavo.features import methods
from octavo.hub.progress import Progress, silent
from octavo.python_api.inputs import (
    Messages,
    Params,
    as_list,
    check_chat,
    conversations,
    no_running_reset,
    one_each,
    sampling_of,
    tokenization,
    with_sampling,
    written_options,
)
from octavo.python_api.local import LocalEngine
from octavo.python_api.loop import SharedLoop
from octavo.python_api.metrics import Metric, metrics_of
from octavo.python_api.progress import UseTqdm, open_progress
from octavo.python_api.tokenizer import ScriptTokenizer
from octavo.python_api.worker import WorkerMethods
from octavo.text.chat.content_format import ContentFormat
from octavo.text.chat.template import chat_template_of
from octavo.text.detokenize.assembler import RequestAssembler
from octavo.text.prompts.message_parts import taken
from octavo.text.prompts.prepare import not_generating
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.no_tokenizer import needs_tokenizer

if TYPE_CHECKING:
    from octavo.features.beams.offline import BeamSearchMethods
    from octavo.features.lora.offline import LoraMethods
    from octavo.features.pooling.offline import PoolingMethods
    from octavo.python_api.engine_args import EngineArgs

if TYPE_CHECKING:

    class OfflineMethods(BeamSearchMethods, LoraMethods, PoolingMethods):
        """Methods that features add to `LLM`."""
else:
    OfflineMethods = methods("offline")


class LLM(OfflineMethods, WorkerMethods):
    """A model that is loaded and ready.

    Example:
        >>> with LLM("smollm2") as llm:
        ...     outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))
        ...     print(outputs[0].outputs[0].text)

    Args:
        model: a catalogue name, a folder, a .gguf file or a Hugging Face id.
        chat_template: a Jinja template, or a file with one, instead of the model's own.
        progress: called with the progress of a download.
        settings: any field of `octavo.config`'s dataclasses by its name, or by the name of its command-line flag:
            `dtype`, `max_model_len`, `kv_cache_memory_bytes`, `max_num_seqs`, `enable_prefix_caching`, `threads`, ...
            `scheduling_policy` defaults to "longest-first" here, since all prompts are known at once: requests with the
            largest `max_tokens` begin first. A server's default is "fcfs". And `performance_mode` defaults to
            "throughput", a server's to "balanced".

    Raises:
        ModelNotFoundError, ModelFileError, ConfigError: the text gives the remedy.
        TypeError: an unknown setting.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat_template: str | None = None,
        progress: Progress = silent,
        **settings: Any,
    ) -> None:
        if settings.get("scheduling_policy") is None and settings.get("policy") is None:
            settings["policy"] = "longest-first"
        if settings.get("performance_mode") is None:
            settings["performance_mode"] = "throughput"
        self._engine = LocalEngine(model, chat_template=chat_template, progress=progress, **settings)
        self._queue: list[RequestAssembler] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load a model with settings from an object."""
        return cls(**vars(engine_args))

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; return the outputs in the prompts' order.

        Args:
            prompts: one or several of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
            sampling_params: one for all, or one each; by default the model's recommendation.
            use_tqdm: show progress on standard error; None only if that is a terminal; or a factory of bars, such as
                `tqdm`.
            lora_request: adapter, one for all or one each; a list of adapters for a prompt adds them up.
            mm_processor_kwargs: how videos of the prompts are read, such as {"num_frames": 16}; see docs/video.md.
            priority: one for all, or one each; lower ones run earlier, with `scheduling_policy="priority"`.
            tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`, `truncation_side`.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; nothing was computed.
        """
        prompts = with_sampling(prompts, mm_processor_kwargs)
        tokenizing = tokenization(tokenization_kwargs)
        assemblers = self._prepare(prompts, sampling_params, priority, tokenizing, lora_request=lora_request)
        return self._complete(assemblers, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. Other arguments are those of `generate`.

        Args:
            messages: objects with role and content, or several lists of them.
            chat_template: a Jinja template, or a file with one, instead of the model's own.
            chat_template_content_format: form of message contents for the template: "string", a list of parts
                ("openai"), or "auto" to detect it from the template's code.
            add_generation_prompt: end with the mark that begins the assistant's answer.
            continue_final_message: continue the last message.
            tools: functions that the template describes to the model. Calls are returned in the text, as the model
                writes them.
            chat_template_kwargs: further variables for the template.
        """
        check_chat(chat_template_content_format, tools)
        prompts = self._written(
            messages,
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
            content_format=chat_template_content_format,
        )
        prompts = with_sampling(prompts, mm_processor_kwargs)
        tokenizing = tokenization(tokenization_kwargs)
        assemblers = self._prepare(prompts, sampling_params, priority, tokenizing, lora_request=lora_request)
        return self._complete(assemblers, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Prepare prompts for `wait_for_completion`, which computes them; return the ids of their requests.

        The arguments are those of `generate`; progress is shown only by `wait_for_completion`, if its `use_tqdm` is
        set. Other calls do not compute these prompts.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served; none of these prompts was queued.
        """
        tokenizing = tokenization(tokenization_kwargs)
        assemblers = self._prepare(prompts, sampling_params, priority, tokenizing, lora_request=lora_request)
        self._queue += assemblers
        return [one.request.id for one in assemblers]

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = None,
        **options: Any,
    ) -> list[str]:
        """Like `enqueue`, for conversations; `options` are the arguments of `chat` that affect the prompt."""
        sampling = options.pop("mm_processor_kwargs", None)
        prompts = self._written(messages, **{"add_generation_prompt": True, **written_options(options)})
        prompts = with_sampling(prompts, sampling)
        return self.enqueue(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: UseTqdm = None) -> list[RequestOutput]:
        """Compute all queued requests; return their outputs in the order of queueing.

        Args:
            output_type: the expected type of outputs: `RequestOutput`, or None.
            use_tqdm: as for `generate`.
        """
        types = output_type if isinstance(output_type, tuple) else (output_type,)
        if output_type is not None and RequestOutput not in types:
            raise TypeError(f"the outputs of queued requests are RequestOutput, not {output_type!r}")
        waiting, self._queue = self._queue, []
        return self._complete(waiting, use_tqdm)

    def _written(
        self, messages: Messages | Sequence[Messages], chat_template: str | None = None, **options: Any
    ) -> list[Prompt]:
        """Render one conversation or several with the template."""
        tokenizer = self._engine.tokenizer
        template = self._engine.template if chat_template is None else chat_template_of(tokenizer, chat_template)
        if template is None:
            raise self._no_template()
        prompts: list[Prompt] = []
        for conversation in conversations(messages):
            plain, parts = taken(conversation)
            if parts is not None:
                self._engine.preparer.check_parts(parts)
            text = template.render(plain, shown=None if parts is None else parts.shown, **options)
            if parts is not None:
                prompts.append(parts.prompt(text))
                continue
            tokens = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": tokens})
        return prompts

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield one prompt's outputs in the form of `sampling_params.output_kind`. Closing the iterator aborts it."""
        params = (sampling_params or self.get_default_sampling_params()).clone()
        yield from self._run([self._engine.open(prompt, params)])

    def stats(self) -> EngineStats:
        return self._core.stats()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters and gauges, with the names of the server's /metrics."""
        return metrics_of(self.info, self.stats())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop the KV cache of past prompts; open streams keep theirs. Always return True.

        Args:
            reset_running_requests: refused while a stream is open, since it would have to be recomputed.
            reset_connector: no effect; there is no connector.
        """
        if reset_running_requests and self._core.loop.busy:
            raise no_running_reset()
        self._core.loop.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`. Nothing can be generated meanwhile.

        Args:
            level: 0 frees nothing; 1 frees the KV cache, and moves a GPU's weights to the host; 2 frees both, and the
                weights are read again at the wake-up.
            mode: what happens to open streams: "abort" aborts them; "wait" completes them first; "keep" continues them
                after the wake-up.

        Raises:
            EngineStateError: the LLM was not created with `enable_sleep_mode=True`.
        """
        self._core.sleep(sleep_level(level), pause_mode(mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Allocate memory again: all, or the parts in `tags` ("weights", "kv_cache"). Return whether the engine is
        awake."""
        return self._core.wake_up(wake_tags(tags))

    def get_tokenizer(self) -> ScriptTokenizer:
        return self._engine.script_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return self._engine.default_params()

    def close(self) -> None:
        """Free the model and its memory. Using the LLM afterwards is an error."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _core(self) -> SharedLoop:
        return self._engine.core

    def _no_template(self) -> InvalidRequestError:
        if not self._engine.tokenizer.present:
            return needs_tokenizer()
        if "generate" not in self.info.tasks:
            return not_generating(self.info)
        return InvalidRequestError(
            "This model has no chat template, so messages can't be made into a prompt. Give chat_template=..., a file "
            "or the Jinja source, or use LLM.generate.",
            param="messages",
        )

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params,
        priority: int | Sequence[int] | None,
        tokenizing: dict[str, Any],
        **arguments: Any,
    ) -> list[RequestAssembler]:
        """Check and tokenize prompts for which only final outputs are needed. `arguments` are those of features."""
        prompts = as_list(prompts)
        params = sampling_of(sampling_params, self.get_default_sampling_params(), len(prompts))
        priorities = one_each(0 if priority is None else priority, len(prompts), "priority")
        given = self._engine.feature_options(len(prompts), **arguments)
        return [
            self._engine.open(prompt, one, priority=rank, options=options, **tokenizing)
            for prompt, one, rank, options in zip(prompts, params, priorities, given, strict=True)
        ]

    def _complete(
        self, assemblers: Sequence[RequestAssembler], use_tqdm: UseTqdm, at_once: int | None = None
    ) -> list[RequestOutput]:
        """Run requests to their ends; return the final outputs in the same order."""
        done: dict[str, RequestOutput] = {}
        size = at_once or max(len(assemblers), 1)
        with open_progress(use_tqdm, len(assemblers)) as progress:
            for start in range(0, len(assemblers), size):
                for output in self._run(assemblers[start : start + size]):
                    done[output.request_id] = output
                    progress.took(len(output.prompt_token_ids), sum(len(one.token_ids) for one in output.outputs))
        return [done[one.request.id] for one in assemblers]

    def _run(self, assemblers: Sequence[RequestAssembler]) -> Iterator[RequestOutput]:
        """Drive the loop until all these requests have ended; any exception aborts them."""
        core = self._core
        by_id = {assembler.request.id: assembler for assembler in assemblers}
        with closing(core.run([assembler.request for assembler in assemblers])) as news:
            for delta in news:
                assembler = by_id[delta.id]
                output = assembler.push(delta)
                for index in assembler.aborts:
                    core.abort(delta.id, index)
                if output is not None:
                    yield output
