"""Steps whose tokens are divided over ranks give the tokens of one device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from rank_kit import ThreadCollectives, ranks_in_threads
from test_kinds_of_cache import KINDS, LONGEST, TIGHT
from test_micro_batches import step_of
from test_several_ranks import CROWDED, EVEN, MODELS, RECURRENT, engine, run, scored, scores_of
from toy_models import LLAMA

from octavo.core.errors import ConfigError
from octavo.nn.step import StepInput
from octavo.nn.taps import Taps
from octavo.parallel.mesh import Mesh
from octavo.parallel.peers import Limits, PeerCollectives, alike
from octavo.worker.context_parallel import ContextParallel, Piece, TokenShare, chosen_alike, pieces_of_ranks

TWO: dict[str, Any] = {"prefill_context_parallel_size": 2, "prefill_context_parallel_threshold": 8}
EXPERTS_OVER_TWO = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": "all_to_all"}
ALWAYS = ("windows", "latent attention")
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap, chunks and preemption": CROWDED,
    "plain torch": {"attention_backend": "torch"},
    "no prefix cache": {"enable_prefix_caching": False},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "three ranks": {"prefill_context_parallel_size": 3},
    "two ranks each": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages of two ranks each": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
QUICK = ("overlap, chunks and preemption", "two ranks each")


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch, native=False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was divided, on any rank."""
    found: list[bool] = []
    takes = ContextParallel.takes
    monkeypatch.setattr(ContextParallel, "takes", lambda one, step: found.append(takes(one, step)) or found[-1])
    return found


@pytest.mark.parametrize(
    "model", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_tokens_of_each_model(model: str, taken: list[bool]) -> None:
    assert run(MODELS[model], **TWO) == run(MODELS[model])
    assert True in taken
    assert False in taken


@pytest.mark.parametrize(
    "setting", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_tokens_under_each_setting(setting: str, taken: list[bool]) -> None:
    settings = SETTINGS[setting]
    alone = {name: value for name, value in settings.items() if not name.endswith("_parallel_size")}
    assert run(**TWO | settings) == run(**alone)
    assert True in taken


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recurrent"])
@pytest.mark.parametrize("each", [{}, EXPERTS_OVER_TWO], ids=["", "two ranks each"])
def test_kinds_of_cache_under_pressure(kind: str, each: dict[str, Any], taken: list[bool]) -> None:
    """Chunks, overlap and little room, as `test_kinds_of_cache` has them."""
    config = LLAMA | EVEN | KINDS[kind] | {"model_type": "any"}
    if each and "num_local_experts" not in config and "num_experts" not in config:
        each = {"tensor_parallel_size": 2}
    tight = TIGHT | {"max_model_len": LONGEST, "num_blocks": 60}
    assert run(config, **tight, **TWO | each) == run(config, **tight)
    assert True in taken


def test_log_probabilities_of_prompts(taken: list[bool]) -> None:
    """They need the hidden states of all tokens."""
    alone, divided = scored(), scored(**TWO)
    assert True in taken
    for one, other in zip(alone, divided, strict=True):
        assert (one.id, one.tokens) == (other.id, other.tokens)
        for mine, its in zip(scores_of(one), scores_of(other), strict=True):
            assert mine.top_ids == its.top_ids
            assert [mine.logprob, *mine.top_logprobs] == pytest.approx([its.logprob, *its.top_logprobs], abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lens", [[29], [8192], [1] * 12, [1, 17, 1, 5, 8], [3, 1, 1, 1, 2]], ids=str)
def test_every_token_is_in_one_piece_and_ranks_have_equal_work(lens: list[int], ranks: int) -> None:
    found = pieces_of_ranks(lens, ranks)
    tokens = [(one.row, i) for own in found for one in own for i in range(one.begin, one.end)]
    assert sorted(tokens) == [(row, i) for row, length in enumerate(lens) for i in range(length)]
    counts = [sum(one.end - one.begin for one in own) for own in found]
    assert max(counts) - min(counts) <= 2
    assert min(counts) > 0
    attended = [sum(i + 1 for one in own for i in range(one.begin, one.end)) for own in found]
    assert max(attended) - min(attended) <= 2 * max(lens) + ranks * len(lens)
    assert all(own == sorted(own, key=lambda one: (one.row, one.begin)) for own in found)


def test_a_rank_has_the_first_and_the_last_piece_and_the_last_one_those_between() -> None:
    assert pieces_of_ranks([40], 2) == [[Piece(0, 0, 10), Piece(0, 30, 40)], [Piece(0, 10, 30)]]


def test_a_step_of_a_rank() -> None:
    whole = step_of([6, 13, 4], [0, 5, 40])
    kept = []
    for rank in range(2):
        share = TokenShare.of(whole, Mesh(rank, 2))
        own = share.step(whole)
        kept += own.slot_mapping.tolist()
        starts = own.query_start.tolist()
        assert starts[-1] == own.num_tokens == share.counts[rank]
        assert own.past_lens is not None
        for i, (start, end) in enumerate(pairwise(starts)):
            positions = own.positions[start:end].tolist()
            assert positions == list(range(own.past_lens[i], int(own.seq_lens[i])))
            assert own.block_tables[i].tolist() == whole.block_tables[share.pieces[i].row].tolist()
        assert own.exchange is not None
        assert own.exchange.everyone.slot_mapping[share.places.long()].equal(whole.slot_mapping)
    assert sorted(kept) == whole.slot_mapping.tolist()


class Doubling:
    """A model whose states are twice the embeddings, and which keeps the embeddings for others."""

    def __init__(self, tokens: int, size: int) -> None:
        self.taps = Taps((0,), 1, tokens, size, torch.float32, torch.device("cpu"))

    def forward(self, x: torch.Tensor, step: StepInput) -> torch.Tensor:
        self.taps.keep(0, x)
        return 2 * (x if step.hidden_rows is None else x[step.hidden_rows])


def test_states_of_all_tokens_are_on_every_rank() -> None:
    class Nothing:
        def prepare(self, step: StepInput, block_size: int) -> None: ...

    barrier, given = threading.Barrier(2), [torch.empty(0)] * 2
    x = torch.arange(23.0)[:, None].repeat(1, 3)

    def rank(number: int, *, some: bool) -> None:
        whole = step_of([6, 13, 4], [0, 5, 40])
        whole.hidden_rows = whole.hidden_rows if some else None
        model, mesh = Doubling(32, 3), Mesh(number, 2, ThreadCollectives(number, barrier, given))
        divided = ContextParallel(model, Nothing(), 16, mesh, 8)  # type: ignore[arg-type]
        expected = 2 * (x[[5, 18, 22]] if some else x)
        assert divided.forward(x, whole).equal(expected)
        assert model.taps.states[:23, 0].equal(x)

    for some in (False, True):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(partial(rank, some=some), range(2)))


def test_ranks_take_the_choices_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from octavo.nn.ops import products

    class Measured:
        def __init__(self, own: str) -> None:
            self.own, self.choices = own, dict[str, str]()

        def known(self) -> dict[str, str]:
            return self.choices

        def adopt(self, known: dict[str, str]) -> None:
            self.choices |= known

        def choose(self) -> list[int]:
            self.choices.setdefault("shape", self.own)
            return [16]

    owners = [Measured(f"fastest on rank {rank} " + "x" * 5000 * rank) for rank in range(2)]
    here = threading.local()
    monkeypatch.setattr(products, "products", lambda: here.owner)
    barrier, given = threading.Barrier(2), [torch.empty(0)] * 2

    def rank(number: int) -> None:
        here.owner = owners[number]
        context = Mesh(number, 2, ThreadCollectives(number, barrier, given))
        assert chosen_alike(owners[number].choose, context, torch.device("cpu")) == [16]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    assert [one.choices["shape"] for one in owners] == [owners[0].own] * 2


def test_groups_that_compute_the_same_sum_in_the_same_way() -> None:
    limits = Limits(64, 512, 512, 1024), Limits(128, 256, 256, 2048)
    peers = [PeerCollectives(None, None, one) for one in limits]  # type: ignore[arg-type]
    others = ThreadCollectives(0, threading.Barrier(1), [torch.empty(0)])
    assert alike(peers[0], others, lambda name, data: [data, b"[128, 256, 256, 2048]"]) is peers[0]
    assert peers[0].limits == Limits(64, 256, 256, 1024)
    assert alike(peers[1], others, lambda name, data: [data, b"null"]) is others


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (RECURRENT["BambaForCausalLM"], {}, "can't divide the tokens of models with recurrent layers"),
        (MODELS["windows"], {"tensor_parallel_size": 2, "enable_dbo": True}, "--enable-dbo: with --prefill-context"),
    ],
)
def test_what_is_refused(config: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(config, **TWO, **settings)
