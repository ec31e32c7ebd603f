"""What programs talk to a server through: each framework in its ordinary use."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import instructor
import litellm
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as without_tracing
from langchain_anthropic import ChatAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent as TypedAgent
from pydantic_ai import NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as TypedResponses
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "Say hello."}]
KEY = "none"
NAMED = {"type": "function", "function": {"name": "get_weather"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}

without_tracing(True)
litellm.suppress_debug_info = True


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


class City(BaseModel):
    city: str = Field(max_length=20)
    population: int = Field(ge=0, le=10**8)


@pytest.fixture
def ask(url: str) -> Callable[..., Any]:
    """A completion by litellm."""

    def asked(model: str = f"hosted_vllm/{MODEL}", messages: Any = HELLO, **options: Any) -> Any:
        base = url if model.startswith("anthropic/") else f"{url}/v1"
        settings = {"max_tokens": 24, "temperature": 0} | options
        return litellm.completion(model, messages, api_base=base, api_key=KEY, **settings)

    return asked


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_whole_and_streamed(ask: Callable[..., Any], provider: str) -> None:
    whole = ask(f"{provider}/{MODEL}")
    assert whole.usage.completion_tokens > 0
    chunks = list(ask(f"{provider}/{MODEL}", stream=True))
    joined = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert joined.choices[0].message.content == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_tools(ask: Callable[..., Any], stream: bool) -> None:
    answer = ask(tools=[WEATHER], tool_choice=NAMED, max_tokens=60, stream=stream)
    whole = litellm.stream_chunk_builder(list(answer), messages=HELLO) if stream else answer
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"]


def test_litellm_structured_output_and_log_probabilities(ask: Callable[..., Any]) -> None:
    answer = ask(response_format=Person, max_tokens=80, logprobs=True, top_logprobs=2)
    Person.model_validate_json(answer.choices[0].message.content)
    assert answer.choices[0].logprobs.content[0].top_logprobs


def test_litellm_knows_the_errors(ask: Callable[..., Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(messages=[{"role": "user", "content": "hi " * 9000}])
    with pytest.raises(litellm.BadRequestError, match="temperature must be non-negative"):
        ask(temperature=-3)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        ask("hosted_vllm/nothing")


MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_instructor(url: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)
    options: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Jason is 25."}], "temperature": 0}
    found = client.chat.completions.create(**options, response_model=Person, max_retries=0, max_tokens=120)
    assert isinstance(found, Person)


def test_instructor_with_anthropics_client(url: str) -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key=KEY))
    messages: Any = [{"role": "user", "content": "Jason is 25."}]
    assert client.messages.create(model=MODEL, messages=messages, response_model=Person, max_retries=0, max_tokens=120)


@pytest.mark.parametrize("kind", [OpenAIChatModel, TypedResponses])
async def test_pydantic_ai(url: str, kind: Any) -> None:
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    settings: Any = {"max_tokens": 120, "temperature": 0.0}
    for form in (ToolOutput(City), NativeOutput(City)):
        agent: Any = TypedAgent(model, output_type=form, model_settings=settings, retries=0)
        assert isinstance((await agent.run("Paris has 2 million inhabitants.")).output, City)
    plain = TypedAgent(model, model_settings=settings, instructions="Be brief.")
    whole = await plain.run("Hello")
    async with plain.run_stream("Hello") as stream:
        assert "".join([part async for part in stream.stream_text(delta=True)]) == whole.output


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_openai_agents(url: str, kind: Any) -> None:
    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        settings: Any = {"name": "a", "model": kind(MODEL, client)}
        forced = ModelSettings(max_tokens=120, temperature=0, tool_choice="weather")
        agent: Any = Agent(**settings, tools=[weather], model_settings=forced)
        assert (await Runner.run(agent, "Weather in Paris?", max_turns=3)).final_output
        typed: Any = Agent(**settings, output_type=City, model_settings=ModelSettings(max_tokens=120, temperature=0))
        assert isinstance((await Runner.run(typed, "Paris")).final_output, City)


def test_smolagents(url: str) -> None:
    model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key=KEY, max_tokens=20, temperature=0)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    whole = model.generate(messages, stop_sequences=["Observation:"])
    assert whole.token_usage.output_tokens > 0
    streamed = "".join(part.content or "" for part in model.generate_stream(messages))
    assert streamed == whole.content


def test_langchain_with_anthropics_api(url: str) -> None:
    settings: Any = {"model": MODEL, "base_url": url, "api_key": KEY, "max_tokens": 60, "temperature": 0}
    model = ChatAnthropic(**settings)
    whole = model.invoke("hi")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream("hi")) == whole.text
    assert isinstance(model.with_structured_output(Person).invoke("Jason is 25."), Person)
