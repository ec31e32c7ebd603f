"""`LocalEngine`: a model in this process with its tokenizer and template; the base of `LLM` and `LLMEngine`."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.info import ModelInfo
from octavo.core.params import SamplingParams
from octavo.hub.progress import Progress, silent
from octavo.python_api.inputs import feature_arguments
from octavo.python_api.loop import SharedLoop
from octavo.python_api.tokenizer import ScriptTokenizer
from octavo.text.answers.formats import AnswerFormats
from octavo.text.detokenize.assembler import RequestAssembler
from octavo.text.hooks import TextHook
from octavo.text.model_text import load_text
from octavo.text.prompts.defaults import sampling_defaults, with_defaults
from octavo.text.prompts.prepare import Preparer
from octavo.text.prompts.prompt import Prompt
from octavo.text.sources import model_files


class LocalEngine:
    """A loaded model. Arguments and errors are those of `LLM`.

    Attributes:
        info: the model's data.
        tokenizer, template: the model's; the template is None if it has none.
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
        files = model_files(config.model, weights=config.needs_weights, progress=progress)
        loop, info = build_core(config, files)
        self.info: ModelInfo = info
        self._core: SharedLoop | None = SharedLoop(loop)
        text = load_text(files, config.model, chat_template=chat_template)
        self.tokenizer, self.template = text.tokenizer, text.chat
        reasoning = AnswerFormats.of(text.chat).reasoning
        self.preparer = Preparer(text.tokenizer, self.info, reasoning=reasoning, max_tokens=text.max_tokens)
        self._defaults = sampling_defaults(text.defaults)
        self._ids = itertools.count()

    @property
    def core(self) -> SharedLoop:
        """The engine loop. Raises RuntimeError if it was closed."""
        if self._core is None:
            raise RuntimeError("This LLM was closed; create a new one.")
        return self._core

    def open(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, **options: Any
    ) -> RequestAssembler:
        """Check and tokenize one prompt; its request is not added yet.

        Args:
            options: of `Preparer.prepare`, such as `priority` and `add_special_tokens`.

        Raises:
            InvalidRequestError: it can't be served.
        """
        name = request_id or f"llm-{next(self._ids)}"
        prepared = self.preparer.prepare(prompt, params, request_id=name, fit=True, **options)
        return RequestAssembler(prepared.request, self.tokenizer, prepared.prompt_text, self.preparer.hooks)

    def feature_options(self, count: int, **given: Any) -> list[dict[str, msgspec.Raw]]:
        """Do what a call's arguments ask of features; return the options of each of its `count` prompts.

        Raises:
            InvalidRequestError: an argument can't be served.
        """
        asked = feature_arguments(self.preparer.hooks, count, **given)
        for feature, method, args in asked.calls:
            self.core.call(feature, method, args)
        return asked.options

    def hook(self, name: str) -> TextHook:
        """Return the text half of an existing feature."""
        return self.preparer.hook(name)

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters recommended by the model's authors."""
        return with_defaults(self._defaults, {})

    def script_tokenizer(self) -> ScriptTokenizer:
        return ScriptTokenizer(self.tokenizer, self.template)

    def close(self) -> None:
        """Free the model and its memory."""
        if self._core is not None:
            self._core.close()
            self._core = None
