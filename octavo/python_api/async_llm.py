"""`AsyncLLM`: an engine core in a separate process and its text front end here, for servers and asyncio programs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from octavo.config import EngineConfig
from octavo.core.errors import EngineDeadError
from octavo.core.info import ModelInfo
from octavo.core.log import LogSettings
from octavo.core.output import RequestOutput
from octavo.core.params import SamplingParams
from octavo.core.pausing import AWAKE, PauseMode, pause_mode, sleep_level, wake_tags
from octavo.core.stats import EngineStats
from octavo.engine.client import CoreClient
from octavo.engine.phases import OnPhase
from octavo.engine.process import CoreProcess
from octavo.engine.replicas import ReplicaClient
from octavo.features import methods
from octavo.hub.progress import Progress, silent
from octavo.python_api.async_worker import AsyncWorkerMethods
from octavo.python_api.inputs import feature_arguments, no_running_reset, refuse, tokenization
from octavo.python_api.replicas import check_replicas, replica_process
from octavo.python_api.tokenizer import ScriptTokenizer
from octavo.text.chat.content_format import ContentFormat
from octavo.text.frontend import Frontend
from octavo.text.prompts.prompt import Prompt
from octavo.text.recipe import FrontendRecipe
from octavo.text.sources import model_files

if TYPE_CHECKING:
    from octavo.features.lora.online import AsyncLoraMethods
    from octavo.features.pooling.online import AsyncPoolingMethods
    from octavo.python_api.engine_args import EngineArgs

if TYPE_CHECKING:

    class OnlineMethods(AsyncLoraMethods, AsyncPoolingMethods):
        """Methods that features add to `AsyncLLM`."""
else:
    OnlineMethods = methods("online")


_Client = CoreClient | ReplicaClient


class AsyncLLM(OnlineMethods, AsyncWorkerMethods):
    """An engine made by `start`. Close it, or use `async with await AsyncLLM.start("smollm2") as llm`. Imports no
    torch."""

    def __init__(self, client: _Client | None, frontend: Frontend | None, settings: dict[str, Any] | None = None):
        """Use `start` or `from_engine_args`."""
        self._made = None if client is None or frontend is None else (client, frontend)
        self._settings = settings
        self._starting = asyncio.Lock()
        self._shut = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an engine that starts at its first use, such as `check_health`, which then raises the errors of
        `start`."""
        return cls(None, None, dict(vars(engine_args)))

    @classmethod
    async def start(
        cls,
        model: str | EngineConfig | None = None,
        *,
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        chat_template_content_format: ContentFormat = "auto",
        tool_parser_plugin: str | None = None,
        reasoning_config: Mapping[str, Any] | None = None,
        stall_after_s: float = 120.0,
        max_unread_tokens: int | None = None,
        log: LogSettings | None = None,
        on_phase: OnPhase | None = None,
        progress: Progress = silent,
        **settings: Any,
    ) -> Self:
        """Find the model (downloading it if necessary), start the core, and wait until it is ready.

        Args:
            model: a model, or a whole configuration; `settings` are those of `LLM`.
            chat_template: a Jinja template, or a file with one, instead of the model's own.
            chat_template_content_format: form of message contents for the template: "string", "openai", or "auto" to
                detect it from the template's code.
            tool_call_parser, reasoning_parser: formats of tool calls and reasoning; by default detected from the chat
                template.
            tool_parser_plugin: a Python file that declares more formats of tool calls.
            reasoning_config: custom marks of reasoning, as `reasoning_start_str` and `reasoning_end_str`.
            stall_after_s: seconds without a completed step, while requests wait, after which `health` fails.
            max_unread_tokens: end a request with SlowReaderError if more of its tokens are unread; None for no limit.
            log: log settings of the core's process; by default warnings, to standard error.
            on_phase: called when a phase of the start begins (None) and ends (seconds).
            progress: called with the progress of a download.

        Raises:
            ModelNotFoundError, ModelFileError, ConfigError: the text gives the remedy.
            EngineDeadError: the core ended while it started.
        """
        if isinstance(model, EngineConfig):
            config = model
        else:
            config = EngineConfig.of(model=model, **settings) if model else EngineConfig.of(**settings)
        config.check()
        check_replicas(config)
        for own in config.features.values():
            own.check_sendable("the engine runs in a separate process")
        files = await asyncio.to_thread(model_files, config.model, weights=config.needs_weights, progress=progress)
        recipe = FrontendRecipe(
            files,
            config.model,
            chat_template,
            chat_template_content_format,
            tool_call_parser,
            reasoning_parser,
            tool_parser_plugin,
            reasoning_config,
        )
        count, single = config.parallel.replicas, config
        if count > 1:
            single = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data_parallel_size=1))
        processes = [replica_process(number, count, single, files, log or LogSettings()) for number in range(count)]

        async def start(number: int) -> CoreClient:
            if not processes[number].alive:
                processes[number] = replica_process(number, count, single, files, log or LogSettings())
            return await CoreClient.start(
                processes[number],
                stall_after_s=stall_after_s,
                max_unread_tokens=max_unread_tokens,
                on_phase=on_phase if number == 0 else None,
            )

        client = start(0) if count == 1 else ReplicaClient.start(start, count)
        return cls(*await _start_both(processes, client, recipe))

    @property
    def _client(self) -> _Client:
        return self._parts()[0]

    @property
    def frontend(self) -> Frontend:
        return self._parts()[1]

    def _parts(self) -> tuple[_Client, Frontend]:
        if self._made is None:
            raise EngineDeadError("The engine has not started yet: await check_health(), or generate something, first.")
        return self._made

    async def _started(self) -> None:
        """Wait until the engine runs; the first call starts it."""
        if self._shut:
            raise EngineDeadError("The engine was shut down; create a new one.")
        async with self._starting:
            if self._made is None:
                self._made = (await type(self).start(**(self._settings or {})))._made

    @property
    def info(self) -> ModelInfo:
        return self._client.info

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the request's outputs in the form of `sampling_params.output_kind`. Closing the generator aborts it.

        Args:
            lora_request: an adapter, or a list of adapters to add up.
            trace_headers, data_parallel_rank: refused, unless their value requests nothing.
            tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`, `truncation_side`.
            options: of `Preparer.prepare`, such as `priority`.

        Raises:
            InvalidRequestError: the request can't be served; the message names the field.
            EngineDeadError: the engine has stopped.
        """
        refuse(trace_headers=trace_headers, data_parallel_rank=data_parallel_rank)
        await self._started()
        options["options"] = await self._feature_options(lora_request=None if lora_request is None else [lora_request])
        params = sampling_params.clone() if sampling_params else self.frontend.default_params()
        options |= tokenization(tokenization_kwargs)
        request = await self.frontend.prepare_async(prompt, params, request_id=request_id, **{"fit": True, **options})
        text = prompt if isinstance(prompt, str) else None
        async with aclosing(cast("AsyncGenerator[RequestOutput]", self.frontend.generate(request, text))) as outputs:
            async for output in outputs:
                yield output

    async def _feature_options(self, **given: Any) -> dict[str, msgspec.Raw]:
        """Do what the arguments for a prompt ask of features; return the prompt's options."""
        asked = feature_arguments(self.frontend.preparer.hooks, 1, **given)
        for feature, method, args in asked.calls:
            await self._client.call(feature, method, args)
        return asked.options[0]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; their generators yield the output so far with the finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            await self._client.abort(one)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop the KV cache of past prompts before any later request; running requests keep theirs. Return True.

        Args:
            reset_running_requests: refused, since running requests would have to be recomputed.
            reset_connector: no effect; there is no connector.
        """
        if reset_running_requests:
            raise no_running_reset()
        await self._started()
        await self._client.reset_prefix_cache()
        return True

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Make new requests wait until `resume_generation`. May be called during a pause.

        Args:
            mode: what happens to running requests: "abort" aborts them; "wait" waits for their end; "keep" freezes them
                until the pause ends.
            wait_for_inflight_requests: older form of mode="wait".
            clear_cache: drop the KV cache of past prompts, unless the mode is "keep".
        """
        await self._started()
        chosen = PauseMode.WAIT if wait_for_inflight_requests else pause_mode(mode)
        await self._client.pause(chosen, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """End a pause, if any. Raises EngineStateError while the engine sleeps."""
        await self._started()
        await self._client.resume()

    async def is_paused(self) -> bool:
        """Return whether requests wait for the end of a pause or a sleep."""
        await self._started()
        return self._client.stats().paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause as `pause_generation` does, and free memory; new requests wait for `wake_up`.

        Args:
            level: 0 frees nothing; 1 frees the KV cache, and moves a GPU's weights to the host; 2 frees both, and the
                weights are read again at the wake-up.
            mode: as for `pause_generation`.

        Raises:
            EngineStateError: the engine was not started with `enable_sleep_mode`.
        """
        await self._started()
        await self._client.sleep(sleep_level(level), pause_mode(mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Allocate memory again: all, or the parts in `tags` ("weights", "kv_cache"). Requests resume after the last
        part.

        Returns:
            Whether the engine is awake.
        """
        await self._started()
        await self._client.wake_up(wake_tags(tags))
        return not await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        await self._started()
        return self._client.stats().sleep_level != AWAKE

    async def get_tokenizer(self) -> ScriptTokenizer:
        await self._started()
        return ScriptTokenizer(self.frontend.tokenizer, self.frontend.chat)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped, or makes no progress although requests wait."""
        await self._started()
        health = self._client.health()
        if not health.ok:
            raise EngineDeadError(health.reason)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine has stopped; None if it has not."""
        reason = self._made[0].dead if self._made else None
        return None if reason is None else EngineDeadError(reason)

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether the engine has started and not stopped."""
        return self._made is not None and not self.errored

    def shutdown(self) -> None:
        """Kill the engine, from code that can't await `close`. Open generators end with an error."""
        self._shut = True
        if self._made is not None:
            self._made[0].kill()

    def stats(self) -> EngineStats:
        return self._client.stats()

    async def close(self) -> None:
        """Stop the core and wait for the end of its process."""
        self._shut = True
        if self._made is not None:
            await self._made[0].close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


AsyncLLMEngine = AsyncLLM
"""vLLM's name of the same class."""


async def _start_both(
    processes: Sequence[CoreProcess],
    connecting: Coroutine[Any, Any, _Client],
    recipe: FrontendRecipe,
) -> tuple[_Client, Frontend]:
    """Load the front end while the cores start. If either fails, kill the cores' processes and raise the error."""
    starting = asyncio.create_task(connecting)
    try:
        loaded = await asyncio.to_thread(recipe.load)
        client = await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        for process in processes:
            process.kill()
        raise
    return client, recipe.make(client, *loaded)
