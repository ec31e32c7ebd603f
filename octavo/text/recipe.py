"""`FrontendRecipe`: all that it takes to make the front end of a model, in whichever process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import ModelConfig
from octavo.engine.protocol import EngineClient
from octavo.hub.files import ModelFiles
from octavo.text.answers.formats import AUTO, AnswerFormats
from octavo.text.chat.content_format import ContentFormat
from octavo.text.frontend import Frontend
from octavo.text.model_text import ModelText, load_text


@dataclass(frozen=True, slots=True)
class FrontendRecipe:
    """Called with a client of an engine core, it makes the front end; it can be pickled.

    Attributes:
        chat_template: a Jinja template, or a file with one, instead of the model's own.
        content_format: how it gets the contents of messages.
        tool_call_parser, reasoning_parser: how the model writes calls and reasoning; by default as its template shows.
        tool_parser_plugin: a Python file that declares more formats of calls.
        reasoning_config: marks of reasoning of the user's own.
    """

    files: ModelFiles
    model: ModelConfig
    chat_template: str | None = None
    content_format: ContentFormat = "auto"
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    tool_parser_plugin: str | None = None
    reasoning_config: Mapping[str, Any] | None = None

    def load(self) -> tuple[ModelText, AnswerFormats]:
        """
        Raises:
            ModelNotFoundError, ModelFileError, ConfigError: as `load_text`; or a parser that nobody knows.
        """
        text = load_text(self.files, self.model, chat_template=self.chat_template, content_format=self.content_format)
        return text, AnswerFormats.of(
            text.chat,
            tools=self.tool_call_parser,
            reasoning=self.reasoning_parser,
            plugin=self.tool_parser_plugin,
            marks=self.reasoning_config,
        )

    def make(self, engine: EngineClient, text: ModelText, answers: AnswerFormats) -> Frontend:
        """The front end, of what was loaded."""
        return Frontend(
            engine,
            text.tokenizer,
            engine.info,
            chat=text.chat,
            default_sampling=text.defaults,
            max_tokens=text.max_tokens,
            answers=answers,
            twin=self,
        )

    def __call__(self, engine: EngineClient) -> Frontend:
        return self.make(engine, *self.load())
