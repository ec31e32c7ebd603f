"""Dense and recurrent families against Transformers on tiny checkpoints, in float32: logits and greedy tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedRunner
from tiny import load_model, make_checkpoint, model_files, reference_of
from tiny_families import DENSE, HYBRID, HYBRID_MOE, MOE
from torch import Tensor

from octavo.models.attention import widest_attention
from octavo.models.decoder import CausalLM
from octavo.models.model import compiled
from octavo.models.native import NativeDecoder
from octavo.native.program import Pool
from octavo.nn.attention.base import BackendRequest
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.select import BACKENDS
from octavo.nn.build import AnyBackend
from octavo.nn.latent.base import LatentSpec
from octavo.nn.latent.cpu import TorchLatents
from octavo.nn.latent.layer import PagedLatents
from octavo.nn.latent.native import NativeLatents
from octavo.nn.latent.reference import ReferenceLatents
from octavo.nn.rope_spec import LongRopeScaling

LENGTHS = (5, 43, 1)
"""Prompts shorter and longer than windows and blocks."""
LONG = (37, 43, 33)
"""Prompts longer than the context before scaling, for models that change with the sequence's length."""
STRIDES = (1, 13, 1)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module", params=[*DENSE, *HYBRID, *HYBRID_MOE, *MOE])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CausalLM]:
    """A Transformers model and Octavo's, from the same checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_checkpoint(request.param, folder)
    files = model_files(folder)
    return theirs, load_model(files, reference_of(files))


@pytest.fixture(scope="module")
def prompts(pair: tuple[Any, CausalLM]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = LONG if isinstance(pair[1].spec.rope.scaling, LongRopeScaling) else LENGTHS
    return [torch.randint(1, 199, (n,), generator=generator).tolist() for n in lengths]


def runner_with(model: CausalLM, name: str, seed: int) -> PagedRunner:
    """The model on an attention backend; with the native one as a native program, if it has no latents of odd
    widths."""
    backend = backend_for(model, name)
    program = name == "native" and not has_odd_latents(model)
    if program:
        assert backend.name == "native"
        model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, PagedAttention | PagedLatents):
            layer.backend = backend
    form = compiled(model, backend)
    assert isinstance(form, NativeDecoder) == program
    return PagedRunner(form, num_blocks=40, block_size=16 if backend.name == "native" else 4, seed=seed)


def backend_for(model: CausalLM, name: str) -> AnyBackend:
    """The backend, or the torch one if it does not support the model's layers."""
    layer = widest_attention(model.spec)
    if isinstance(layer, LatentSpec):
        if name == "torch":
            return TorchLatents()
        return ReferenceLatents() if has_odd_latents(model) else NativeLatents(Pool(2))
    request = BackendRequest(torch.device("cpu"), torch.float32, layer)
    factories = {factory.name: factory for factory in BACKENDS}
    return factories["torch" if factories[name].supports(request) is not None else name].make(request)


def has_odd_latents(model: CausalLM) -> bool:
    """Whether the model has latent attention of widths that the CPU's kernels lack."""
    return any(isinstance(layer, PagedLatents) and layer.spec.rank % 16 for layer in model.modules())


def expected_logits(theirs: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["torch", "native"])
def test_logits_in_chunks_and_greedy_tokens(pair: Any, prompts: list[list[int]], name: str) -> None:
    """Prompts in chunks of different lengths, then tokens; half-way, a sequence is computed again from its tokens."""
    theirs, ours = pair
    runner = runner_with(ours, name, seed=3)
    rows = [runner.row(prompt, len(prompt) + 8) for prompt in prompts]
    parts: list[list[Tensor]] = [[] for _ in rows]
    while any(row.computed < len(prompt) for row, prompt in zip(rows, prompts, strict=True)):
        active = [i for i, row in enumerate(rows) if row.computed < len(row.tokens)]
        counts = [min(STRIDES[i], len(rows[i].tokens) - rows[i].computed) for i in active]
        logits = runner.step([rows[i] for i in active], counts, all_logits=True)
        for i, part in zip(active, logits.split(counts), strict=True):
            parts[i].append(part)
    for row, part in zip(rows, parts, strict=True):
        row.tokens.append(int(part[-1][-1].argmax()))
    for step in range(6):
        if step == 3:
            rows[1].computed = 0
        logits = runner.step(rows, [len(row.tokens) - row.computed for row in rows])
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.tokens.append(token)
    for row, prompt, part in zip(rows, prompts, parts, strict=True):
        expected = expected_logits(theirs, row.tokens[:-1])
        torch.testing.assert_close(torch.cat(part), expected_logits(theirs, prompt), **TOLERANCE)
        assert row.tokens[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()


def test_hidden_states_of_chosen_tokens(pair: Any, prompts: list[list[int]]) -> None:
    """The last layer computes only these tokens after its attention; the result is the same."""
    runner = runner_with(pair[1], "torch", seed=4)
    step = runner.input([runner.row(prompts[1], 43)], [43])
    with torch.inference_mode():
        everything = runner.model.forward(runner.model.embed(step), step)
        step.hidden_rows = torch.tensor([4, 42])
        some = runner.model.forward(runner.model.embed(step), step)
    torch.testing.assert_close(some, everything[[4, 42]], rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32(pair: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """No operation leaves the model's dtype."""
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    files = model_files(tmp_path)
    ours = load_model(files, reference_of(files), torch.bfloat16)
    runner = PagedRunner(ours, num_blocks=20, block_size=4, dtype=torch.bfloat16)
    logits = runner.step([runner.row(prompts[0], 40)], [len(prompts[0])], all_logits=True)
    expected = expected_logits(theirs, prompts[0])
    assert torch.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.98
