"""`LLM` as scripts written for vLLM call it: keywords, refusals, progress, chat and beam search, on a tiny model."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_models

from octavo import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from octavo.core.errors import EngineDeadError, EngineStateError, InvalidRequestError, UnsupportedError
from octavo.nn.weights import tensor_bytes
from octavo.python_api.metrics import Counter, Gauge, Histogram
from octavo.worker.sleep import tensors_of

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}{{ tools | tojson if tools }}"
USER = [{"role": "user", "content": "Hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FINAL = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models.save_decoder(tmp_path_factory.mktemp("decoder"), seed=0)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        model=str(folder),
        chat_template=TEMPLATE,
        dtype=torch.float32,
        max_model_len=-1,
        seed=None,
        tensor_parallel_size=1,
        kv_cache_memory_bytes=2 << 20,
        threads=1,
    ) as made:
        yield made


class Bar:
    """Notes what it is told, by tqdm's names."""

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.done, self.closed = total, 0, False

    def update(self, n: int) -> None:
        self.done += n

    def close(self) -> None:
        self.closed = True


def test_an_operators_limit_of_answers_binds_requests(folder: Path) -> None:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 2 << 20, "threads": 1}
    with LLM(str(folder), override_generation_config={"max_new_tokens": 3}, **settings) as llm:
        outputs = llm.generate(["Hello", "you"], GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


def test_progress_is_told_to_the_callers_bar_and_shown_when_asked_for(llm: LLM, capsys: Any) -> None:
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=make)
    assert [(bar.total, bar.done, bar.closed) for bar in bars] == [(3, 3, True)]
    assert capsys.readouterr().err == ""  # no terminal, not asked for
    llm.generate("a", GREEDY, use_tqdm=True)
    assert "1/1" in capsys.readouterr().err
    metrics = outputs[0].metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 6
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert outputs[0].outputs[0].finished()
    assert outputs[0].lora_request is None


def test_parameters_that_a_script_changes_are_checked_when_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.ignore_eos = 3, 0.0, True
    assert len(llm.generate("a", params)[0].outputs[0].token_ids) == 3
    params.top_p = 7
    with pytest.raises(InvalidRequestError, match=r"top_p must be in \(0, 1\]"):
        llm.generate("a", params)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.generate("a", lora_request=object()), "merge the adapter"),
        (lambda llm: llm.chat(USER, lora_request=[None, object()]), "merge the adapter"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(2, 3), lora_request=object()), "merge the adapter"),
        (lambda llm: llm.embed("a", lora_request=object()), "merge the adapter"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}), "multi_modal_data"),
        (lambda llm: llm.generate("a", tokenization_kwargs={"padding": True}), "leave 'padding' out"),
        (lambda llm: SamplingParams(flat_logprobs=True), "flat_logprobs is not supported; leave it out"),
    ],
)
def test_what_can_not_be_had_is_refused_by_name(llm: LLM, call: Callable[[LLM], Any], says: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        call(llm)
    assert says in str(caught.value)
    assert "(parameter=" in str(caught.value)


def test_a_chat_has_its_keywords(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = llm.chat([USER, USER], GREEDY, tools=tools, chat_template_kwargs={"mood": "!"}, tokenization_kwargs={})
    assert [one.prompt for one in found] == ['<user>Hello![{"type": "function", "function": {"name": "f"}}]'] * 2
    assert llm.chat(USER, GREEDY, chat_template="{{ messages[0].content }}?")[0].prompt == "Hello?"
    with pytest.raises(InvalidRequestError, match=r"tools\[0\] must be an object"):
        llm.chat(USER, tools=["f"])  # type: ignore[list-item]


def test_a_prompt_is_cut_and_tokenized_as_told(llm: LLM) -> None:
    cut = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    whole = llm.generate("abcdefgh", GREEDY)[0].prompt_token_ids
    assert llm.generate("abcdefgh", GREEDY, tokenization_kwargs=cut)[0].prompt_token_ids == whole[:2]


@pytest.mark.parametrize("limit", [None, 1])
def test_beams_carry_their_log_probability(llm: LLM, limit: int | None) -> None:
    """Against the log-probabilities that the model gives the same tokens as a prompt."""
    found = llm.beam_search(["abc", "xyz"], BeamSearchParams(3, 5, ignore_eos=True), concurrency_limit=limit)
    scored = SamplingParams(prompt_logprobs=0, max_tokens=1)
    for prompt, one in zip(("abc", "xyz"), found, strict=True):
        start = len(llm.get_tokenizer().encode(prompt))
        best = [sequence.cum_logprob for sequence in one.sequences]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        for sequence in one.sequences:
            told = llm.generate(sequence.tokens, scored)[0].prompt_logprobs or []
            pairs = zip(sequence.tokens[start:], told[start:], strict=True)
            total = sum((entry or {})[token].logprob for token, entry in pairs)
            assert math.isclose(total, sequence.cum_logprob, abs_tol=1e-3)
            assert sequence.text.startswith(prompt)
            assert len(sequence.tokens) == start + 5


def test_tokens_may_be_streamed_several_at_a_time(llm: LLM) -> None:
    params = GREEDY.replace(max_tokens=8, output_kind=RequestOutputKind.DELTA, stream_interval=3)
    sizes = [len(output.outputs[0].token_ids) for output in llm.stream("abc", params)]
    assert sizes == [1, 3, 3, 1]


def test_the_cache_may_be_left_unread(llm: LLM) -> None:
    long = list(range(5, 69))
    llm.generate(long, GREEDY)
    assert llm.generate(long, GREEDY)[0].num_cached_tokens > 0
    assert llm.generate(long, GREEDY.replace(skip_reading_prefix_cache=True))[0].num_cached_tokens == 0


@pytest.mark.e2e
def test_an_engine_from_arguments_starts_at_its_first_use_and_is_shut_down_from_plain_code(folder: Path) -> None:
    async def script() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2 << 20, "threads": 1}
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(folder), enforce_eager=True, enable_sleep_mode=True, **settings)
        )
        assert not engine.is_running
        outputs = [one async for one in engine.generate(prompt="abc", sampling_params=GREEDY, request_id="r")]
        assert (outputs[-1].request_id, outputs[-1].finished) == ("r", True)
        assert len(outputs[-1].outputs[0].token_ids) == 6
        with pytest.raises(UnsupportedError, match="merge the adapter"):
            await anext(engine.generate("abc", GREEDY, lora_request=object()))
        await engine.check_health()
        assert (engine.is_running, engine.errored) == (True, False)
        long = list(range(5, 69))
        cached = []
        for _ in range(3):
            (*_, output) = [one async for one in engine.generate(long, GREEDY)]
            cached.append(output.num_cached_tokens)
            if len(cached) == 2:
                assert await engine.reset_prefix_cache()
        assert (cached[0], cached[1] > 0, cached[2]) == (0, True, 0)
        with pytest.raises(UnsupportedError, match="keep their KV cache"):
            await engine.reset_prefix_cache(reset_running_requests=True)
        assert (await engine.get_tokenizer()).encode("a")
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        late = asyncio.create_task(anext(engine.generate("abc", GREEDY)))
        await engine.resume_generation()
        await late
        assert not await engine.is_paused()
        with pytest.raises(InvalidRequestError, match="mode must be one of abort, wait, keep"):
            await engine.pause_generation(mode="never")
        await engine.sleep(level=2)
        assert await engine.is_sleeping()
        asleep = asyncio.create_task(anext(engine.generate("abc", FINAL)))
        assert not await engine.wake_up(["kv_cache"])
        assert not asleep.done()
        assert await engine.wake_up()
        assert (await asleep).outputs[0].token_ids == outputs[-1].outputs[0].token_ids
        engine.shutdown()
        assert (engine.is_running, isinstance(engine.dead_error, EngineDeadError)) == (False, True)
        with pytest.raises(EngineDeadError, match="was shut down"):
            await anext(engine.generate("abc", GREEDY))

    asyncio.run(script())


def test_logprobs_of_named_tokens(llm: LLM) -> None:
    (likely,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=9))
    (first, *_) = likely.outputs[0].logprobs or []
    named = sorted(first)
    asked = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=named)
    (output,) = llm.generate("Hello", asked)
    assert output.outputs[0].token_ids == likely.outputs[0].token_ids
    (told, *_) = output.outputs[0].logprobs or []
    assert {token: one.logprob for token, one in told.items()} == {token: one.logprob for token, one in first.items()}
    assert output.outputs[0].cumulative_logprob == likely.outputs[0].cumulative_logprob
    with pytest.raises(InvalidRequestError, match="logprobs must equal len"):
        SamplingParams(logprob_token_ids=[1], logprobs=2)


def test_what_is_queued_waits_for_its_call(llm: LLM) -> None:
    expected = llm.generate(["abc", "xyz", "q"], GREEDY)
    ids = llm.enqueue(["abc", "xyz"], GREEDY)
    (between,) = llm.generate("q", GREEDY)
    ids += llm.enqueue("q", GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
    assert between.outputs[0].token_ids == expected[2].outputs[0].token_ids
    assert llm.wait_for_completion() == []
    llm.enqueue_chat([USER, USER], GREEDY, chat_template_kwargs={"mood": "!"})
    assert [one.prompt for one in llm.wait_for_completion(RequestOutput)] == ["<user>Hello!"] * 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'mood'"):
        llm.enqueue_chat(USER, mood="!")
    with pytest.raises(InvalidRequestError):
        llm.enqueue(["a", [4000]], GREEDY)
    with pytest.raises(TypeError, match="are RequestOutput"):
        llm.wait_for_completion(int)
    assert llm.wait_for_completion() == []


def test_the_cache_is_forgotten(llm: LLM) -> None:
    long = list(range(7, 71))
    llm.generate(long, GREEDY)
    assert llm.generate(long, GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache(reset_running_requests=True)  # none runs
    assert llm.stats().num_blocks_cached == 0
    assert llm.generate(long, GREEDY)[0].num_cached_tokens == 0
    with contextlib.closing(llm.stream("abc", GREEDY)) as stream:
        next(stream)
        with pytest.raises(UnsupportedError, match="keep their KV cache"):
            llm.reset_prefix_cache(reset_running_requests=True)
        assert llm.reset_prefix_cache()


def test_metrics_have_the_servers_names(llm: LLM) -> None:
    llm.generate("a", GREEDY)
    found = {(one.name, *one.labels.values()): one for one in llm.get_metrics()}
    tokens = found["vllm:generation_tokens", llm.info.name]
    assert isinstance(tokens, Counter)
    assert tokens.value == llm.stats().generation_tokens > 0
    assert isinstance(found["octavo:num_requests_running", llm.info.name], Gauge)
    steps = found["vllm:iteration_tokens_total", llm.info.name]
    assert isinstance(steps, Histogram)
    assert steps.count == steps.buckets["+Inf"] == llm.stats().num_steps


def test_requests_are_stepped_by_hand(folder: Path, llm: LLM) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    words = ["--model", str(folder), "--dtype=float32", "--max_num_seqs", "2", "--kv-cache-memory-bytes", "2MiB"]
    args = parser.parse_args([*words, "--threads", "1", "-tp", "1", "--no-enable-prefix-caching", "--swap-space", "4"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    try:
        assert engine.info.max_num_seqs == 2
        for name in "abc":
            assert engine.add_request(name, name, GREEDY) == name
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.add_request("a", "a", GREEDY)
        engine.abort_request(["c", "unknown"])
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
        assert {name: one.finished for name, one in last.items()} == {"a": True, "b": True}
        alone = [llm.generate(name, GREEDY)[0].outputs[0].token_ids for name in "ab"]
        assert [last[name].outputs[0].token_ids for name in "ab"] == alone
    finally:
        engine.close()


def test_more_tokens_than_there_is_room_for_are_as_many_as_fit(llm: LLM) -> None:
    (output,) = llm.generate(list(range(5, 120)), GREEDY.replace(max_tokens=500, min_tokens=400))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (
        llm.info.max_model_len - 115,
        "length",
    )


@pytest.mark.parametrize(("priority", "fits"), [(None, True), (1, True), ([0, 1], True), ([0], False), ([], False)])
def test_each_prompt_has_its_priority(llm: LLM, priority: Any, fits: bool) -> None:
    if fits:
        assert len(llm.generate(["a", "b"], GREEDY, priority=priority)) == 2
        return
    with pytest.raises(InvalidRequestError, match="entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=priority)


def test_the_tokenizer_has_the_names_that_scripts_know(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    tokens = tokenizer.encode("Hello")
    assert tokenizer("Hello") == {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
    assert tokenizer(["a", "b"])["input_ids"] == [tokenizer.encode("a"), tokenizer.encode("b")]
    assert tokenizer.batch_decode([tokens]) == [tokenizer.decode(tokens)] == ["Hello"]
    names = tokenizer.convert_ids_to_tokens(tokens)
    assert isinstance(names, list)
    assert tokenizer.convert_tokens_to_ids([name or "" for name in names]) == tokens
    assert [tokenizer.get_vocab()[name or ""] for name in names] == tokens
    assert tokenizer.convert_ids_to_tokens(-1) is tokenizer.convert_tokens_to_ids("no such token") is None
    for token in tokenizer.all_special_ids:
        assert tokenizer.decode(token)
        assert not tokenizer.decode(token, skip_special_tokens=True)
    assert len(tokenizer) == tokenizer.vocab_size
    text = tokenizer.apply_chat_template(USER, tokenize=False, mood="?")
    assert text == "<user>Hello?"
    assert tokenizer.apply_chat_template(USER, mood="?") == tokenizer.encode(str(text))
    assert tokenizer.apply_chat_template(USER, chat_template="{{ messages[0].role }}", tokenize=False) == "user"
    with pytest.raises(InvalidRequestError, match="Cannot set both"):
        tokenizer.apply_chat_template(USER, add_generation_prompt=True, continue_final_message=True)


def test_vectors_are_made_as_an_object_says(llm: LLM) -> None:
    prompts = ["abc", "xyz"]
    default = [one.outputs.embedding for one in llm.embed(prompts)]
    each = llm.embed(prompts, pooling_params=[PoolingParams(use_activation=False), PoolingParams()])
    assert math.hypot(*each[0].outputs.embedding) != pytest.approx(1, abs=1e-3)
    assert each[1].outputs.embedding == pytest.approx(default[1])
    plain = llm.embed("abc", normalize=False)[0].outputs.embedding
    assert plain == pytest.approx(each[0].outputs.embedding)
    assert len(llm.encode(prompts, PoolingParams(), pooling_task="embed")) == 2
    with pytest.raises(InvalidRequestError, match="entries for 2 prompts"):
        llm.encode(prompts, pooling_params=[PoolingParams()])
    with pytest.raises(InvalidRequestError, match="can't be combined with"):
        llm.embed("abc", normalize=True, pooling_params=PoolingParams())
    with pytest.raises(TypeError, match="must be PoolingParams"):
        llm.embed("abc", pooling_params=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_llm_that_has_slept_says_the_same(folder: Path, backend: str, level: int) -> None:
    settings = {"kv_cache_memory_bytes": 1 << 20, "threads": 1, "attention_backend": backend, "device": "cpu"}
    with LLM(str(folder), enable_sleep_mode=True, **settings) as llm:
        expected = llm.generate(["abc", "xyz"], GREEDY)
        stream = llm.stream("abc", GREEDY)
        begun = next(stream).outputs[0].token_ids
        llm.sleep(level, mode="keep")
        assert llm.stats().sleep_level == level
        with pytest.raises(EngineStateError, match="wake_up"):
            llm.generate("abc", GREEDY)
        assert llm.wake_up(["weights"]) is False
        assert llm.wake_up() is True
        *_, last = stream
        assert last.outputs[0].token_ids == expected[0].outputs[0].token_ids
        assert begun == last.outputs[0].token_ids[: len(begun)]
        llm.sleep(level)
        llm.wake_up()
        again = llm.generate(["abc", "xyz"], GREEDY)
        assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in expected]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_memory_is_given_back_in_a_sleep(folder: Path, backend: str) -> None:
    settings = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 1024, "attention_backend": backend, "device": "cpu"}
    with LLM(str(folder), enable_sleep_mode=True, **settings) as llm:
        model: Any = llm._core.loop._executor._model  # type: ignore[attr-defined]
        for layer in model.attention_layers:
            layer.cache.fill_(0)
        weights = sum(tensor_bytes(one) for one in {id(one): one for one in tensors_of(model)}.values())
        assert weights - llm.info.memory["kv_cache"] >= llm.info.memory["weights"] > 0
        alive = weakref.ref(model)
        del model, layer
        before = _resident()
        llm.sleep(1)
        assert before - _resident() > 50 << 20
        assert alive() is not None
        llm.sleep(2)
        assert alive() is None


def _resident() -> int:
    """Bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
