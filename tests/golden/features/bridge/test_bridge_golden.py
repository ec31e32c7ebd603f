"""Models of transformers' modules against Transformers itself, on tiny random checkpoints in float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bridge_kit import OTHERS, OWN, load_bridged, save
from paged import PagedRunner
from torch import Tensor
from transformers import PreTrainedModel

from octavo.features.bridge.model import BridgedLM
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.select import BACKENDS

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=[*OTHERS, *OWN])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, BridgedLM]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save(request.param, folder)
    return theirs, load_bridged(folder, backend("reference", 16))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 199, (n,), generator=generator).tolist() for n in (5, 19, 33, 1)]


def backend(name: str, head_dim: int):
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.25)
    request = BackendRequest(torch.device("cpu"), torch.float32, spec)
    factory = next(one for one in BACKENDS if one.name == name)
    reason = factory.supports(request)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return factory.make(request)


def runner_with(model: BridgedLM, name: str, seed: int = 0) -> PagedRunner:
    attention = backend(name, model.spec.layers[0].spec.head_dim)
    for layer in model.attention_layers:
        layer.backend = attention
    return PagedRunner(model, num_blocks=60, block_size=16 if name == "native" else 4, seed=seed)


def expected_logits(theirs: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["torch", "native"])
def test_chunks_and_single_tokens_of_a_ragged_batch(pair, prompts: list[list[int]], name: str) -> None:
    """Each row advances by its own stride, so steps mix first chunks, later chunks and single tokens."""
    theirs, ours = pair
    if name == "native" and ours.spec.layers[0].spec.head_dim % 16:
        name = "torch"
    runner = runner_with(ours, name, seed=1)
    rows = [runner.row(prompt, len(prompt)) for prompt in prompts]
    strides = [5, 6, 13, 1]
    found: list[list[Tensor]] = [[] for _ in rows]
    while any(row.computed < len(row.tokens) for row in rows):
        active = [i for i, row in enumerate(rows) if row.computed < len(row.tokens)]
        counts = [min(strides[i], len(rows[i].tokens) - rows[i].computed) for i in active]
        logits = runner.step([rows[i] for i in active], counts, all_logits=True)
        for i, part in zip(active, logits.split(counts), strict=True):
            found[i].append(part)
    for prompt, parts in zip(prompts, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected_logits(theirs, prompt), **TOLERANCE)


def test_greedy_tokens(pair, prompts: list[list[int]]) -> None:
    theirs, ours = pair
    runner = runner_with(ours, "torch", seed=2)
    outputs = runner.greedy(prompts, [12] * len(prompts), stop=set())
    for prompt, output in zip(prompts, outputs, strict=True):
        following = expected_logits(theirs, [*prompt, *output]).argmax(-1).tolist()
        assert output == following[len(prompt) - 1 : -1]
