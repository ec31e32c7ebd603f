"""`FrontendRecipe`: the settings from which any process can create a model's front end."""

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
    """Picklable. Called with a client of an engine core, it returns the front end.

    Attributes:
        chat_template: a Jinja template, or a file with one, instead of the model's own.
        content_format: the form of message contents for the template.
        tool_call_parser, reasoning_parser: formats of calls and reasoning; by default detected from the template.
        tool_parser_plugin: a Python file that declares more formats of calls.
        reasoning_config: custom marks of reasoning.
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
        """Load the tokenizer, the template and the formats.

        Raises:
            ModelNotFoundError, ModelFileError, ConfigError: as `load_text`; or an unknown parser.
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
        """Return the front end made from the loaded parts."""
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
