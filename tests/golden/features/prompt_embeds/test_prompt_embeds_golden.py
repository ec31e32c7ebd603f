"""Prompts of embeddings have the tokens that Transformers finds for them; from scripts, in this process and another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_models
import transformers

from octavo import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from octavo.core.errors import InvalidRequestError
from octavo.core.structured import StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONTENT = "{{ messages[0].content }}{{ '<end>' }}"
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2 << 20, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models.save_decoder(tmp_path_factory.mktemp("decoder"), seed=4, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), enable_prompt_embeds=True, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(theirs: Any) -> list[torch.Tensor]:
    """Of tokens of the table, and of numbers that no token has."""
    torch.manual_seed(7)
    table = theirs.get_input_embeddings().weight.detach()
    made = [table[torch.randint(3, 400, (count,))] for count in (1, 15, 40)]
    mixed = (table[torch.randint(3, 400, (33,))] + table[torch.randint(3, 400, (33,))]) / 2
    return [*made, mixed]


def generated(theirs: Any, embeds: torch.Tensor) -> list[int]:
    with torch.no_grad():
        mask = torch.ones(1, len(embeds), dtype=torch.long)
        found = theirs.generate(
            inputs_embeds=embeds[None], attention_mask=mask, do_sample=False, max_new_tokens=12, min_new_tokens=12
        )
    tokens: list[int] = found[0].tolist()
    return tokens


def test_greedy_tokens_are_those_of_transformers(llm: LLM, theirs: Any, prompts: list[torch.Tensor]) -> None:
    outputs = llm.generate([{"prompt_embeds": one} for one in prompts], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [generated(theirs, one) for one in prompts]
    assert [len(output.prompt_token_ids) for output in outputs] == [len(one) for one in prompts]


def test_the_tables_own_rows_are_as_good_as_their_tokens(llm: LLM, theirs: Any) -> None:
    ids = torch.arange(37).mul(11).tolist()
    rows = theirs.get_input_embeddings().weight.detach()[ids]
    mask = [place % 3 != 1 for place in range(37)]
    some = {"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": mask}
    wanted = [
        GREEDY,
        GREEDY.replace(n=3, temperature=1.0, seed=5),
        GREEDY.replace(logprobs=3, frequency_penalty=0.5),
        GREEDY.replace(bad_words=["e"], stop=["a"]),
        GREEDY.replace(structured_outputs=StructuredOutputsParams(regex="[ab]{12}")),
    ]
    for params in wanted:
        plain, whole, part = llm.generate([{"prompt_token_ids": ids}, {"prompt_embeds": rows}, some], params)
        assert plain.outputs == whole.outputs == part.outputs, params
    beams = llm.beam_search([{"prompt_token_ids": ids}, {"prompt_embeds": rows}], BeamSearchParams(3, 8))
    plain_beams, beams_of_rows = ([beam.tokens[37:] for beam in one.sequences] for one in beams)
    assert plain_beams == beams_of_rows


def test_a_chat_with_embeddings_is_as_good_as_one_of_tokens(llm: LLM, theirs: Any) -> None:
    words = [37, 91, 120]
    rows = theirs.get_input_embeddings().weight.detach()[words]
    tokenizer = llm.get_tokenizer()
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in ("<user>see\n", "\nthere<end>")]
    parts = [
        {"type": "text", "text": "see"},
        {"type": "prompt_embeds", "data": rows},
        {"type": "text", "text": "there"},
    ]
    (chat,) = llm.chat([{"role": "user", "content": parts}], GREEDY, chat_template="{{ '<user>' }}" + CONTENT)
    (plain,) = llm.generate({"prompt_token_ids": [*pieces[0], *words, *pieces[1]]}, GREEDY)
    assert chat.prompt_token_ids == [*pieces[0], -1, -1, -1, *pieces[1]]
    assert chat.outputs == plain.outputs
    assert chat.prompt == "<user>see\n\nthere<end>"


def test_another_process_takes_them_too(folder: Path, theirs: Any, prompts: list[torch.Tensor]) -> None:
    async def results() -> list[list[int]]:
        async with await AsyncLLM.start(model=str(folder), enable_prompt_embeds=True, **SETTINGS) as llm:
            found = []
            for one in (prompts[2], prompts[2][None].bfloat16().float()):
                async for output in llm.generate({"prompt_embeds": one}, GREEDY):
                    last = output
                found.append(last.outputs[0].token_ids)
            with pytest.raises(InvalidRequestError, match="hidden size"):
                await anext(llm.generate({"prompt_embeds": prompts[0][:, :9]}, GREEDY))
            return found

    found = asyncio.run(results())
    assert found == [generated(theirs, prompts[2]), generated(theirs, prompts[2].bfloat16().float())]


def test_only_where_the_engine_was_told_to(folder: Path, prompts: list[torch.Tensor]) -> None:
    with LLM(str(folder), **SETTINGS) as plain, pytest.raises(InvalidRequestError, match="--enable-prompt-embeds"):
        plain.generate({"prompt_embeds": prompts[0]}, GREEDY)
