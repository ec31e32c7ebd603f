"""Which kernels of steps are compiled ahead. Nothing is compiled or launched here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from toy_engine import tiny_config
from toy_models import LATENT, QWEN3, VOCAB, behind, model_files
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from octavo.core.cache_groups import FULL, CacheGroup, GroupKind
from octavo.core.worker_info import RankPlace
from octavo.models.attention import latent_spec
from octavo.models.registry import spec_of
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.triton import TritonAttention, rotate_and_write
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.latent import triton_parts
from octavo.nn.latent.triton import TritonLatents
from octavo.nn.ops.expert_products import mix_stacked, route_on_device
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.parallel.mesh import Mesh
from octavo.parallel.peer_memory import Inboxes, Sizes
from octavo.parallel.peers import Limits, PeerCollectives
from octavo.parallel.stage import WHOLE
from octavo.sampling.resident import ResidentSampler
from octavo.worker.resident import ahead
from octavo.worker.resident.batches import Ragged, Singles, token_counts
from octavo.worker.resident.row_counts import sizes
from octavo.worker.resident.slots import DeviceSlots
from octavo.worker.worker import Worker

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TWO = (CacheGroup(layers=(0,)), CacheGroup(GroupKind.WINDOW, (1,), window=16))
WINDOWS = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
SPEC = spec_of(QWEN3 | WINDOWS)
ATTENTION = TritonAttention(torch.float32, AttentionSpec(SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim, 0.25))
SIZES = {"block_size": 16, "max_model_len": 256}


class Collected:
    """In place of `Ahead`: notes each kernel's name with the variant of its launch.

    Slots' kernels are specialized by dtype and alignment of addresses, and by constants: their integers are not.
    """

    def __init__(self, target: Any = None, turn: Any = None) -> None:
        self.variants: set[tuple[Any, ...]] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
            addresses = [(arg.dtype, arg.data_ptr() % 16 == 0) for arg in args if isinstance(arg, torch.Tensor)]
            self.variants.add((kernel.fn.__name__, *addresses, *constants.items()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", note)
            patch.setattr(InterpretedFunction, "run", note)
            yield

    def of(self, *names: str) -> set[tuple[Any, ...]]:
        return {variant for variant in self.variants if variant[0] in names}


def compiled_ahead(
    groups: tuple[CacheGroup, ...],
    monkeypatch: pytest.MonkeyPatch,
    attention: TritonAttention = ATTENTION,
    **options: bool,
) -> Collected:
    monkeypatch.setattr(ahead, "Ahead", Collected)
    monkeypatch.setattr(ahead, "target_of", lambda device: None)
    float32 = torch.float32
    found: Any = ahead.compile_ahead(
        SPEC, float32, float32, float32, attention, DEVICE, groups=groups, **SIZES, **options
    )
    assert isinstance(found, Collected)
    return found


@pytest.mark.parametrize("groups", [FULL, TWO], ids=["one group", "two groups"])
def test_a_recorded_steps_layout_is_compiled_ahead(
    groups: tuple[CacheGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording a step compiles nothing for it, whatever its size and kind."""
    found = compiled_ahead(groups, monkeypatch)
    slots = DeviceSlots(40, SIZES["max_model_len"], SIZES["block_size"], VOCAB, DEVICE, groups=groups)
    singles, ragged = Singles(slots, ATTENTION, sizes(40), shares=False), Ragged(slots, ATTENTION, token_counts(128))
    launched = Collected()
    with launched.collecting():
        for size in singles.sizes:
            slots.write_step(singles.batch(size), singles.step(size, shares=False))
            slots.count(singles.batch(size))
        for count in ragged.counts:
            slots.write_step(ragged.batch(count), ragged.step(count))
            slots.count(ragged.batch(count))
    names = {"layout_kernel", "advance_kernel", *(["cells_kernel"] if len(groups) > 1 else [])}
    assert {variant[0] for variant in launched.variants} == names
    assert launched.variants <= found.variants
    assert found.of("fill_kernel", "extend_kernel", "append_kernel")


@pytest.mark.parametrize("longest", [100, 1000])
def test_rotation_and_storing_are_compiled_ahead(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens and many, in prompts and alone, though no prompt may be long."""
    monkeypatch.setitem(SIZES, "max_model_len", longest)
    found = compiled_ahead(FULL, monkeypatch)
    launched = Collected()
    heads = SPEC.num_heads + 2 * SPEC.num_kv_heads
    layer = AttentionSpec(SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim, 0.25)
    cache = torch.empty(ATTENTION.cache_shape(layer, 2, SIZES["block_size"]), device=DEVICE)
    places = torch.zeros(2000, dtype=torch.int64, device=DEVICE)
    table, norm = torch.empty(2, SPEC.head_dim, device=DEVICE), torch.empty(SPEC.head_dim, device=DEVICE)
    step: Any = SimpleNamespace(positions=places, slot_mapping=places)
    with launched.collecting():
        for tokens in (1, 3, 80, 511, 512, 2000):
            qkv = torch.empty(tokens, heads, SPEC.head_dim, device=DEVICE)
            for kept in (True, False):
                rotate_and_write(qkv, (norm, norm, 1e-5), table, cache, None, step, kept)
    assert {variant[0] for variant in launched.variants} == {"rotate_write_kernel", "rotate_write_rows_kernel"}
    assert launched.variants <= found.variants


def test_attention_that_rounds_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the other, which few rows take, and the last layer."""
    attention = ("decode_kernel", "prefill_kernel")
    for static, forms in ((False, {False}), (True, {False, True})):
        found = compiled_ahead(FULL, monkeypatch, static=static)
        for name in attention:
            assert {("ROUNDED", True) in each for each in found.of(name)} == forms


def test_attention_of_drafts_that_branch_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are such drafts, with few queries and many to a row, and beside the kernels without."""
    wide = TritonAttention(torch.float16, AttentionSpec(SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim, 0.25))
    wide.widen(31)
    for attention, forms in ((ATTENTION, {False}), (wide, {False, True})):
        found = compiled_ahead(FULL, monkeypatch, attention)
        assert {("BRANCHES", True) in each for each in found.of("prefill_kernel")} == forms
        for queries in (1, 8, 32) if attention is wide else (1, 8):
            few = [each for each in found.of("decode_kernel") if ("QUERIES", queries) in each]
            assert {("BRANCHES", True) in each for each in few} == forms


def test_attention_to_later_tokens_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of models that have it: with prompts, never of single tokens."""
    for looks_ahead, forms in ((False, {False}), (True, {False, True})):
        found = compiled_ahead(FULL, monkeypatch, looks_ahead=looks_ahead)
        assert {("AHEAD", True) in each for each in found.of("prefill_kernel")} == forms
        assert found.of("decode_kernel")


def test_all_kernels_of_latent_attention_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both forms, and for the tiles of recorded steps."""
    spec = spec_of(LATENT)
    monkeypatch.setattr(ahead, "Ahead", Collected)
    monkeypatch.setattr(ahead, "target_of", lambda device: None)
    monkeypatch.setattr(triton_parts, "multiprocessors", lambda device: 132)
    attention = TritonLatents(torch.float32, latent_spec(spec, 0))
    float32 = torch.float32
    sizes = SIZES | {"max_model_len": 1024}
    found: Any = ahead.compile_ahead(spec, float32, float32, float32, attention, DEVICE, groups=FULL, **sizes)
    assert {("KEPT", True) in each for each in found.of("latent_write_kernel")} == {True, False}
    absorbed = found.of("absorbed_kernel")
    assert {("HAS_TILES", True) in each for each in absorbed} == {True, False}
    kinds = [{("HAS_ROWS", True), ("PLANNED", True)} & set(each) for each in absorbed]
    assert all(kind in kinds for kind in (set(), {("HAS_ROWS", True)}, {("PLANNED", True)}))
    assert {("HAS_ROWS", True), ("PLANNED", True)} in kinds
    assert found.of("merge_planned_kernel")
    assert found.of("expanded_kernel")
    assert found.of("merge_kernel")


def test_all_kernels_of_experts_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of tokens."""
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    spec = spec_of(QWEN3 | experts | {"moe_intermediate_size": 24, "norm_topk_prob": True})
    monkeypatch.setattr(ahead, "Ahead", Collected)
    monkeypatch.setattr(ahead, "target_of", lambda device: None)
    float32 = torch.float32
    attention = TritonAttention(float32, AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, 0.25))
    found: Any = ahead.compile_ahead(spec, float32, float32, float32, attention, DEVICE, groups=FULL, **SIZES)
    width = spec.hidden_size
    form = ExpertsForm(num_experts=8, hidden_size=width, size=24)
    weights = StackedWeights(torch.empty(8, 48, width, device=DEVICE), torch.empty(8, width, 24, device=DEVICE))
    launched = Collected()
    with launched.collecting():
        for tokens in (1, 4, 5, 8, 16, 33, 64, 128, 250, 512, 513, 3000):
            x, logits = torch.empty(tokens, width, device=DEVICE), torch.empty(tokens, 8, device=DEVICE)
            mix_stacked(x, route_on_device(logits, RoutingSpec(top_k=2, scores="chosen")), weights, form)
    assert launched.variants <= found.variants


SHARED = LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
}


LIMITS = Limits(128, 512, 512, 1 << 62)
"""Such that each way of summing is used."""


class Elsewhere:
    """`Collectives` whose results have the right shapes."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])


def rank_of_two(rank: int) -> Mesh:
    """Return the mesh of a rank whose launches must not run: there is no other rank."""
    addresses, sizes = torch.zeros(2, dtype=torch.int64, device=DEVICE), Sizes(4, 64, 4, 1 << 12)
    return Mesh(rank, 2, PeerCollectives(Inboxes(rank, addresses, sizes), Elsewhere(), LIMITS))


WIDE = {"vocab_size": 9 * 2048}  # three parts of logits on each of two ranks


@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "rank 1 of 2"])
@pytest.mark.parametrize("config", [QWEN3 | WIDE, SHARED | WIDE], ids=["dense", "latents and experts"])
def test_all_kernels_of_a_models_layers_are_compiled_ahead(
    config: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention, products, norms, experts, sums over ranks and draws, whatever the number of tokens."""
    place = RankPlace(ranks - 1, ranks)
    mesh = rank_of_two(1) if ranks == 2 else Mesh()
    monkeypatch.setattr("octavo.worker.worker.join", lambda *_, **__: (mesh, WHOLE))
    found, launched, models = Collected(), Collected(), []
    monkeypatch.setattr(ahead, "Ahead", lambda target, turn: found)
    monkeypatch.setattr(ahead, "target_of", lambda device: None)
    monkeypatch.setattr(Collected, "wait", lambda self: 0, raising=False)

    def compile_ahead(worker: Worker, model: Any) -> None:
        worker._begin_compiling(model, worker.spec)
        models.append((model, worker.attention))

    monkeypatch.setattr(Worker, "_compile_ahead", compile_ahead)
    monkeypatch.setattr("octavo.worker.resident.warm_up.warm_up", lambda *_: None)
    with launched.collecting(), torch.inference_mode():
        settings = behind(monkeypatch) | {"memory_bytes": 1 << 21, "enforce_eager": True}
        asked = tiny_config(**settings)
        worker = Worker(asked.model, asked.device, model_files(config), asked.cache, place=place)
        worker.prepare_kernels()
        worker.load()
        worker.make_runner(num_blocks=20, num_slots=8, max_model_len=256, max_step_tokens=256)
        ((model, attention),) = models
        slots = DeviceSlots(40, SIZES["max_model_len"], SIZES["block_size"], VOCAB, DEVICE)
        for counts in ([1], [1] * 3, [1] * 9, [9], [3, 40], [200]):
            step = ahead._step(slots, counts, SIZES["max_model_len"])
            step.query_lens, step.past_lens = counts, [0] * len(counts)
            step.attn = attention.prepare(step, SIZES["block_size"])
            hidden = model(torch.zeros(sum(counts), model.spec.hidden_size, device=DEVICE), step)
            model.logits(hidden[: len(counts)])
            if (parts := model.logits_in_parts(hidden[: len(counts)])) is not None:
                rows = torch.zeros(len(counts), dtype=torch.int32, device=DEVICE)
                ResidentSampler(slots.table, WIDE["vocab_size"]).draw_divided(parts, rows)
    names = {variant[0] for variant in launched.variants}
    assert "row_kernel" in names
    assert ("exchange_kernel" in names) == (ranks == 2)
    assert {variant for variant in launched.variants if variant not in found.variants} == set()
