"""LangChain's standard tests for chat models, run with its OpenAI integration against the server."""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import MODEL
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatCompletions(ChatModelIntegrationTests):
    """By `/v1/chat/completions`."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": os.environ["OCTAVO_URL"] + "/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 192,
            "max_retries": 0,
            "stream_usage": True,
            # So small a model says the same thing for ever, and calls every function twice.
            "extra_body": {"frequency_penalty": 1.5},
            "model_kwargs": {"parallel_tool_calls": False},
        }

    @pytest.mark.xfail(reason="JSON is all that is asked for; the model would have to know which.")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="The model would have to choose by itself to call the function; this one is too small.")
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return MODEL

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}


class TestFunctionCalling(TestChatCompletions):
    """Structured output by function calls."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}


class TestResponses(TestChatCompletions):
    """By `/v1/responses`."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return super().chat_model_params | {"use_responses_api": True}
