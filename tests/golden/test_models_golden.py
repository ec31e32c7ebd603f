"""Every model family against Transformers on tiny random checkpoints, in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner
from tiny import FAMILIES, load_model, make_checkpoint, model_files
from torch import Tensor

from octavo.models.decoder import CausalLM
from octavo.models.model import compiled
from octavo.models.native import NativeDecoder
from octavo.nn.attention.base import AttentionBackend, AttentionSpec, BackendRequest
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.attention.select import BACKENDS

PROMPT_LENGTHS = (5, 19, 33, 1)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CausalLM]:
    """A Transformers model and Octavo's, from the same checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_checkpoint(request.param, folder)
    return theirs, load_model(model_files(folder), ReferenceAttention())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 199, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def wanted(head_dim: int = 16) -> BackendRequest:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.25)
    return BackendRequest(torch.device("cpu"), torch.float32, spec)


def usable_backends() -> list[str]:
    """Those of this processor; Triton's would run in its interpreter, for minutes, and has tests of its own."""
    return [f.name for f in BACKENDS if f.name != "triton" and f.supports(wanted()) is None]


def runner_with(model: CausalLM, name: str, num_blocks: int, seed: int = 0) -> PagedRunner:
    """The model on an attention backend; with the native one the whole of it as a native program."""
    factory = next(f for f in BACKENDS if f.name == name)
    if factory.supports(wanted(model.spec.head_dim)) is not None:
        assert model.spec.head_dim % 16, "the native kernels take multiples of 16"
        factory = next(f for f in BACKENDS if f.name == "torch")
    backend: AttentionBackend = factory.make(wanted())
    if backend.name == "native":
        model = copy.deepcopy(model)
    for layer in model.attention_layers:
        layer.backend = backend
    form = compiled(model, backend)
    assert isinstance(form, NativeDecoder) == (backend.name == "native")
    return PagedRunner(form, num_blocks=num_blocks, block_size=16 if backend.name == "native" else 4, seed=seed)


def expected_logits(theirs: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("backend", usable_backends())
def test_a_ragged_batch_of_whole_prompts(pair: Any, prompts: list[list[int]], backend: str) -> None:
    theirs, ours = pair
    runner = runner_with(ours, backend, 40)
    rows = [runner.row(p, len(p)) for p in prompts]
    logits = runner.step(rows, [len(p) for p in prompts], all_logits=True)
    expected = torch.cat([expected_logits(theirs, p) for p in prompts])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("backend", usable_backends())
def test_chunks_and_single_tokens_give_the_same_logits(pair: Any, prompts: list[list[int]], backend: str) -> None:
    """Each row advances by its own stride, so steps mix first chunks, later chunks and single tokens."""
    theirs, ours = pair
    runner = runner_with(ours, backend, 40, seed=1)
    rows = [runner.row(p, len(p)) for p in prompts]
    strides = [1, 6, 13, 1]
    collected: list[list[Tensor]] = [[] for _ in rows]
    while any(row.computed < len(row.tokens) for row in rows):
        active = [i for i, row in enumerate(rows) if row.computed < len(row.tokens)]
        counts = [min(strides[i], len(rows[i].tokens) - rows[i].computed) for i in active]
        logits = runner.step([rows[i] for i in active], counts, all_logits=True)
        for i, part in zip(active, logits.split(counts), strict=True):
            collected[i].append(part)
    for prompt, parts in zip(prompts, collected, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected_logits(theirs, prompt), **TOLERANCE)


@pytest.fixture(scope="module")
def generated(pair: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers generates greedily, the same for all backends."""
    outputs = []
    for prompt in prompts:
        ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
        with torch.no_grad():
            whole = pair[0].generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=16)
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("backend", usable_backends())
def test_greedy_tokens_equal_those_of_generate(
    pair: Any, prompts: list[list[int]], generated: list[list[int]], backend: str
) -> None:
    runner = runner_with(pair[1], backend, 60, seed=2)
    assert runner.greedy(prompts, [16] * len(prompts), stop=set()) == generated


def test_logits_of_any_rows_of_none_too(pair: Any) -> None:
    _, ours = pair
    hidden = torch.randn(6, ours.spec.hidden_size)
    with torch.inference_mode():
        whole = ours.logits(hidden)
        some = ours.logits(hidden[torch.tensor([4, 1])])
        none = ours.logits(hidden[torch.tensor([], dtype=torch.long)])
    torch.testing.assert_close(some, whole[[4, 1]], **TOLERANCE)
    assert none.shape == (0, ours.spec.vocab_size)


def test_given_embeddings_stand_in_for_token_ids(pair: Any, prompts: list[list[int]]) -> None:
    theirs, ours = pair
    runner = runner_with(ours, "reference", 40)
    step = runner.input([runner.row(prompts[1], 19)], [19])
    given = ours.embedding(step.input_ids)
    step.input_ids.zero_()
    with torch.inference_mode():
        fed = ours.embed(step)
        fed[:] = given
        logits = ours.logits(ours(fed, step)[step.logit_rows])
    torch.testing.assert_close(logits[0], expected_logits(theirs, prompts[1])[-1], **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "smollm"])
def test_a_checkpoint_in_many_files_is_the_same_model(family: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    theirs = make_checkpoint(family, tmp_path, max_shard_size="40KB")
    files = model_files(tmp_path)
    assert len(files.weights) > 3
    runner = PagedRunner(load_model(files, ReferenceAttention()), num_blocks=40, block_size=4)
    logits = runner.step([runner.row(prompts[2], 33)], [33])
    torch.testing.assert_close(logits[0], expected_logits(theirs, prompts[2])[-1], **TOLERANCE)


def test_bfloat16_stays_near_float32(pair: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """A coarse check that no step leaves the model's dtype or mixes up operands in it."""
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    ours = load_model(model_files(tmp_path), ReferenceAttention(), torch.bfloat16)
    runner = PagedRunner(ours, num_blocks=40, block_size=4, dtype=torch.bfloat16)
    logits = runner.step([runner.row(prompts[2], 33)], [33], all_logits=True)
    expected = expected_logits(theirs, prompts[2])
    assert logits.dtype == torch.bfloat16
    assert torch.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.99


@pytest.mark.parametrize("name", usable_backends())
@pytest.mark.parametrize("chosen", [[], [4], [4, 23, 56]])
def test_hidden_states_of_chosen_tokens(pair: tuple[Any, CausalLM], prompts, name: str, chosen: list[int]) -> None:
    """A step that is asked for some tokens' states gives those that it would give among all."""
    runner = runner_with(pair[1], name, 64)
    rows = [runner.row(prompt, len(prompt)) for prompt in prompts]
    step = runner.input(rows, [len(prompt) for prompt in prompts])
    with torch.inference_mode():
        everything = runner.model.forward(runner.model.embed(step), step).clone()
        step.hidden_rows = torch.tensor(chosen, dtype=torch.int64)
        some = runner.model.forward(runner.model.embed(step), step)
    assert some.shape == (len(chosen), everything.shape[1])
    torch.testing.assert_close(some, everything[chosen], rtol=1e-5, atol=1e-5)
