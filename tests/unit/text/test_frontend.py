from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
import toy_tokenizers

from octavo.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from octavo.core.output import RequestOutput
from octavo.core.params import OutputKind
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, Script, fake_info
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.tokenizer import Tokenizer

TOKENIZER = Tokenizer(toy_tokenizers.byte_level())
INFO = fake_info(vocab_size=TOKENIZER.vocab_size, eos_token_ids=[2])


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def make(script: Script, *, pace: Any = None, **options: Any) -> tuple[Frontend, FakeEngine]:
    engine = FakeEngine(script, info=INFO, pace=pace)
    return Frontend(engine, TOKENIZER, INFO, **options), engine


async def read(frontend: Frontend, prompt: str = "the dog", **params: Any) -> list[RequestOutput]:
    params = {"output_kind": OutputKind.DELTA, "max_tokens": None} | params
    request = frontend.prepare(prompt, frontend.default_params(**params), request_id="r")
    return [output async for output in frontend.generate(request, prompt)]


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(choice.text for output in outputs for choice in output.outputs if choice.index == index)


def test_from_text_to_text() -> None:
    frontend, engine = make(lambda request: encode("a lazy fox 🙂"))
    outputs = asyncio.run(read(frontend))
    assert text_of(outputs) == "a lazy fox 🙂"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert engine.requests[0].tokens == encode("the dog")
    assert (engine.running, engine.abandoned, engine.aborts) == (set(), [], [])


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    frontend, engine = make(lambda request: encode("one. two. three"))
    outputs = asyncio.run(read(frontend, stop=["."]))
    assert text_of(outputs) == "one"
    assert outputs[-1].outputs[0].stop_reason == "."
    assert (engine.running, engine.abandoned) == (set(), ["r"])


def test_the_engine_is_free_before_the_last_item_is_read() -> None:
    async def scenario() -> None:
        frontend, engine = make(lambda request: encode("one. two"))
        params = frontend.default_params(stop=["."], output_kind=OutputKind.DELTA)
        async with aclosing(frontend.generate(frontend.prepare("x", params))) as outputs:
            async for output in outputs:
                if output.finished:
                    assert engine.running == set()
                    return
        pytest.fail("no item was the last")

    asyncio.run(scenario())


def test_one_choice_ends_and_the_other_goes_on() -> None:
    def script(request: GenerateRequest) -> list[list[int]]:
        return [encode("a.b c d"), encode("x y z q")]

    frontend, engine = make(script)
    outputs = asyncio.run(read(frontend, n=2, stop=["."]))
    assert (text_of(outputs, 0), text_of(outputs, 1)) == ("a", "x y z q")
    assert engine.aborts == [("r", 0)]
    ended = [choice.index for output in outputs for choice in output.outputs if choice.finish_reason]
    assert sorted(ended) == [0, 1]
    assert engine.abandoned == []


def test_closing_early_ends_the_request_in_the_engine() -> None:
    async def scenario() -> list[str]:
        frontend, engine = make(lambda request: encode("word " * 50))
        params = frontend.default_params(max_tokens=None, output_kind=OutputKind.DELTA)
        outputs = frontend.generate(frontend.prepare("x", params, request_id="r"))
        async with aclosing(outputs):
            async for _ in outputs:
                break
        assert engine.running == set()
        return engine.abandoned

    assert asyncio.run(scenario()) == ["r"]


def test_cancelling_the_reader_ends_the_request_in_the_engine() -> None:
    async def scenario() -> list[str]:
        started = asyncio.Event()

        async def pace() -> None:
            started.set()
            await asyncio.Event().wait()

        frontend, engine = make(lambda request: encode("never"), pace=pace)
        task = asyncio.create_task(read(frontend))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == set()
        return engine.abandoned

    assert asyncio.run(scenario()) == ["r"]


def test_abort_gives_the_reader_what_there_is() -> None:
    async def scenario() -> list[RequestOutput]:
        steps = asyncio.Semaphore(2)
        frontend, _ = make(lambda request: encode("a") * 20, pace=steps.acquire)
        outputs = []
        request = frontend.prepare("x", frontend.default_params(max_tokens=None, output_kind=OutputKind.DELTA))
        async for output in frontend.generate(request):
            outputs.append(output)
            if len(outputs) == 2:
                await frontend.abort(request.id)
        return outputs

    outputs = asyncio.run(scenario())
    assert text_of(outputs) == "aa"
    assert outputs[-1].outputs[0].finish_reason == "abort"


def test_the_engines_failures() -> None:
    def broken(request: GenerateRequest) -> list[int]:
        raise RuntimeError("lost")

    def refusing(request: GenerateRequest) -> list[int]:
        raise InvalidRequestError("needs 99 blocks, there are 10")

    outputs = asyncio.run(read(make(broken)[0]))
    choice = outputs[-1].outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("error", "Internal error: RuntimeError: lost")
    with pytest.raises(InvalidRequestError, match="99 blocks"):
        asyncio.run(read(make(refusing)[0]))
    frontend, engine = make(lambda request: [5])
    engine.die("killed")
    with pytest.raises(EngineDeadError, match="killed"):
        asyncio.run(read(frontend))


def test_chat() -> None:
    frontend, _ = make(lambda request: [], chat=ChatTemplate("{{ messages[0].content }}!", TOKENIZER))
    assert frontend.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        make(lambda request: [])[0].render_chat([{"role": "user", "content": "hi"}])


def test_defaults_of_the_model() -> None:
    frontend, _ = make(
        lambda request: [], default_sampling={"temperature": 0.3, "max_new_tokens": 7, "bos_token_id": 1}
    )
    params = frontend.default_params(top_k=5, temperature=None)
    assert (params.temperature, params.max_tokens, params.top_k) == (0.3, 7, 5)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        make(lambda request: [], default_sampling={"temperature": 9})


def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    async def scenario() -> bool:
        frontend, _ = make(lambda request: [])
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            await frontend.prepare_async("dog " * 20_000, frontend.default_params(), param="messages")
        ticker.cancel()
        request = await frontend.prepare_async([5, 6], frontend.default_params(), request_id="short")
        return turns > 0 and request.tokens == [5, 6]

    assert asyncio.run(scenario())
