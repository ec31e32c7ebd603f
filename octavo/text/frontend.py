"""`Frontend`: asynchronous text in, text out, over any engine client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from octavo.core.errors import InvalidRequestError
from octavo.core.info import ModelInfo
from octavo.core.output import RequestOutput, TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.protocol import EngineClient
from octavo.text.answers.formats import AnswerFormats
from octavo.text.aside import aside
from octavo.text.chat.template import ChatTemplate, no_template_error
from octavo.text.detokenize.assembler import RequestAssembler
from octavo.text.detokenize.choice import Ender
from octavo.text.prompts.defaults import sampling_defaults, with_defaults
from octavo.text.prompts.prepare import Preparer, not_generating
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.no_tokenizer import needs_tokenizer
from octavo.text.tokenizers.tokenizer import Tokenizer

Twin = Callable[[EngineClient], "Frontend"]


class Frontend:
    """Converts prompts to requests, and engine output to text.

    Args:
        chat: the model's chat template, if it has one.
        default_sampling: the content of generation_config.json, or fields of `SamplingParams`; other keys are ignored.
        max_tokens: upper limit for the length of every answer.
        answers: the formats of tool calls and reasoning; by default detected from the chat template.
        twin: picklable; creates an equal front end in another process, over a client of the same core.

    Raises:
        ConfigError: a default is out of range.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        info: ModelInfo,
        *,
        chat: ChatTemplate | None = None,
        default_sampling: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        answers: AnswerFormats | None = None,
        twin: Twin | None = None,
    ) -> None:
        self.twin = twin
        self.engine = engine
        self.tokenizer = tokenizer
        self.info = info
        self.chat = chat
        self.answers = answers or AnswerFormats.of(chat)
        self.preparer = Preparer(tokenizer, info, reasoning=self.answers.reasoning, max_tokens=max_tokens)
        self.default_sampling = sampling_defaults(default_sampling or {})

    def prepare(self, prompt: Prompt, params: SamplingParams, **options: Any) -> GenerateRequest:
        """Tokenize and check; see `Preparer.prepare`."""
        return self.preparer.prepare(prompt, params, **options).request

    async def prepare_async(self, prompt: Prompt, params: SamplingParams, **options: Any) -> GenerateRequest:
        """Like `prepare`, with long work in a thread, so that other streams continue."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, Mapping) and (reader := self.preparer.reader_of(prompt)) is not None:
            work = partial(self.prepare, prompt, params, **options)
            return await asyncio.get_running_loop().run_in_executor(reader.threads, work)
        length = len(text) if isinstance(text, str) else 0
        return await aside(length, lambda: self.prepare(prompt, params, **options))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render the chat template's prompt; see `ChatTemplate.render`. Prepare it without special tokens.

        Raises:
            InvalidRequestError: there is no template, or it can't render these messages.
        """
        if self.chat is None:
            raise self._no_chat()
        return self.chat.render(messages, **options)

    def why_no_chat(self) -> InvalidRequestError | None:
        """Return the error for chat requests if this model can't answer them, else None."""
        chats = self.chat is not None and "generate" in self.info.tasks
        return None if chats else self._no_chat()

    def _no_chat(self) -> InvalidRequestError:
        if not self.tokenizer.present:
            return needs_tokenizer()
        return no_template_error() if "generate" in self.info.tasks else not_generating(self.info)

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Return the model's sampling defaults with overrides; None means unset in fields that can't be None."""
        return with_defaults(self.default_sampling, overrides)

    async def generate(
        self,
        request: GenerateRequest,
        prompt_text: str | None = None,
        *,
        ender: Callable[[], Ender | None] | None = None,
        on_begin: Callable[[], None] | None = None,
        on_early_end: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield items in the form of `params.output_kind`, the last with `finished`.

        Closing the iterator early, or cancelling the task that reads it, aborts the request. A request that the engine
        fails ends with the finish reason "error" and the cause as its stop reason.

        Args:
            ender: creates for each choice a detector of additional ends, whose finish reason is "stop".
            on_begin: called when the engine's first output arrives, which may be long before the first item.
            on_early_end: called with the tokens that were received and not yielded, if the reader leaves or the engine
                raises an error before the end.

        Raises:
            InvalidRequestError: the engine can't serve it, for example because it is too long or its grammar is
                invalid.
            EngineDeadError: the engine has stopped.
        """
        assembler = RequestAssembler(request, self.tokenizer, prompt_text, self.preparer.hooks, ender=ender)
        stream = cast("AsyncGenerator[TokenDelta, None]", self.engine.generate(request))
        output: RequestOutput | None = None
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    if on_begin is not None:
                        on_begin()
                        on_begin = None
                    if delta.refused is not None:
                        text = delta.error or "The request was refused."
                        raise InvalidRequestError(text, param=delta.refused or None)
                    output = assembler.push(delta)
                    if assembler.finished:
                        break
                    for index in assembler.aborts:
                        await self.engine.abort(request.id, index)
                    if output is not None:
                        yield output
        finally:
            if on_early_end is not None and not assembler.finished:
                on_early_end(assembler.rest())
        # Only after the engine was asked to abort: the reader may never resume this generator.
        if output is not None and output.finished:
            yield output

    async def abort(self, request_id: str) -> None:
        """Abort a request; its reader gets the generated text with the finish reason "abort"."""
        await self.engine.abort(request_id)
