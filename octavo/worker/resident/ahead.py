"""Compile the kernels of a model's steps ahead of use, by launching each once into a collector; see `device/ahead.py`.

Kernels missing here are compiled at their first launch, so the list need not be complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.config import ParallelConfig
from octavo.core.cache_groups import CacheGroup
from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow, StepPlan
from octavo.core.worker_info import RankPlace
from octavo.device.ahead import Ahead, target_of
from octavo.models.attention import attention_spec, latent_spec
from octavo.models.decoder import CausalLM
from octavo.models.feed_forwards.spec import ExpertsSpec, experts_in
from octavo.models.mixers.spec import LatentSelfAttention
from octavo.models.model import LayeredModel
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionBackend, AttentionSpec
from octavo.nn.attention.libraries.attention import LibraryAttention
from octavo.nn.attention.recordable import Recordable
from octavo.nn.attention.triton import MANY_WRITTEN, TritonAttention
from octavo.nn.build import AnyBackend, own_form
from octavo.nn.divided import DividedLogits
from octavo.nn.latent.base import LatentBackend, LatentSpec
from octavo.nn.latent.triton import TritonLatents
from octavo.nn.ops import expert_products, expert_rows, few_rows, packed, triton_norm
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.step import SharedContexts, StepInput
from octavo.parallel.mesh import ALONE, Mesh
from octavo.parallel.peers import PeerCollectives
from octavo.sampling import resident_allowed
from octavo.sampling.allowed import num_words
from octavo.sampling.resident import ResidentRow, ResidentSampler
from octavo.sampling.state import PreparedParams
from octavo.worker.resident.slots import DeviceSlots

log = logging.getLogger(__name__)

_Empty = Callable[..., torch.Tensor]
"""Makes a tensor without values, by default of the model's dtype."""

_SLOTS = 272
"""More rows than `fused_decode` serves, with any number of kv heads."""
_LONG = 8192
_PENALIZED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one rank computes of a model; by default everything.

    Attributes:
        mesh: the ranks that divide the layers.
        attention: those that divide the heads of attention, if these are others.
        whole_experts: each rank has some of a layer's experts, instead of a part of each.
        layers: the rank's own; None for all.
        samples: whether it computes logits.
        turn: see `Ahead`.
    """

    mesh: Mesh = ALONE
    attention: Mesh = ALONE
    whole_experts: bool = False
    layers: range | None = None
    samples: bool = True
    turn: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, model: LayeredModel, mesh: Mesh, parallel: ParallelConfig, place: RankPlace) -> ModelShare:
        return cls(
            mesh,
            ALONE if parallel.divides_requests else mesh,
            parallel.enable_expert_parallel,
            model.layer_range if isinstance(model, CausalLM) else None,
            place.stage == place.stages - 1,
            place.local,
        )


WHOLE = ModelShare()


@torch.inference_mode()
def compile_ahead(
    spec: DecoderSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    residual: torch.dtype,
    attention: AnyBackend,
    device: torch.device,
    *,
    block_size: int,
    max_model_len: int,
    groups: Sequence[CacheGroup],
    share: ModelShare = WHOLE,
    static: bool = False,
    looks_ahead: bool = False,
) -> Ahead:
    """Start to compile; return the handle to wait for.

    Args:
        static: products have static scales, with which attention may round.
        looks_ahead: steps with prompts may have `StepInput.ahead`.
    """
    if isinstance(attention, LibraryAttention):
        attention = attention.own  # launches the kernels that the library does not replace
    began = time.perf_counter()
    ahead = Ahead(target_of(device), share.turn)
    own = range(spec.num_layers) if share.layers is None else share.layers
    layers = dict.fromkeys(attention_spec(spec, i, share.attention) for i in spec.attention_layers if i in own)
    latent = (i for i in own if isinstance(spec.mixer_of(i), LatentSelfAttention))
    latents = dict.fromkeys(latent_spec(spec, i, share.attention) for i in latent)
    with ahead.collecting():  # the slowest first, so that they don't finish last
        slots = DeviceSlots(_SLOTS + 1, max_model_len, block_size, spec.vocab_size, device, groups=groups)
        long = min(max_model_len - 1, _LONG)
        few = ([1] * rows for rows in (_SLOTS, 192, 64, 32, 16, 8, 4, 2, 1))
        wide = attention.most_few if isinstance(attention, TritonAttention) else 8
        mixed = ([1] * rows + [max(9, min(wide + 1, long))] for rows in (_SLOTS, 64, 32, 16, 1))
        drafted = [[2, 2], *([[min(wide, long)] * 2] if wide > 8 else [])]
        prompts = [long] * min(_SLOTS, -(-MANY_WRITTEN // long))
        steps = [(counts, max_model_len) for counts in (prompts, *mixed, *drafted, *few)]
        alike = [([1] * rows, max_model_len, True) for rows in (_SLOTS, 64, 8)]
        for counts, context, shares in (*((*each, False) for each in steps), ([2, 2], 2, False), *alike):
            step = _step(slots, counts, context)
            if shares:
                step.shared = SharedContexts(step.block_tables[:, :3], step.seq_lens, step.seq_lens)
            if isinstance(attention, LatentBackend):
                for one in () if shares else latents:
                    _attend_latents(one, dtype, attention, step, block_size)
                continue
            for layer in layers:
                _attend(spec, layer, dtype, kv_dtype, attention, step, block_size, static=static)
        if isinstance(attention, TritonAttention) and attention.branches:
            for counts, context in _branching(wide, long, max_model_len):
                step = _step(slots, counts, context)
                step.unseen = torch.empty(step.num_tokens, dtype=torch.int32, device=device)
                for layer in layers:
                    _attend(spec, layer, dtype, kv_dtype, attention, step, block_size, static=static)
        if isinstance(attention, TritonAttention) and looks_ahead:
            for counts, context in _looking_ahead(long, max_model_len):
                step = _step(slots, counts, context)
                step.ahead = torch.empty(step.num_tokens, dtype=torch.int32, device=device)
                for layer in layers:
                    _attend(spec, layer, dtype, kv_dtype, attention, step, block_size, static=static)
        if share.samples:
            _sample(spec, slots, share.mesh)
        _layers(spec, dtype, residual, device, share)
    log.info("began to compile kernels within %.1f s", time.perf_counter() - began)
    return ahead


def _layers(
    spec: DecoderSpec, dtype: torch.dtype, residual: torch.dtype, device: torch.device, share: ModelShare
) -> None:
    """Launch the kernels of norms, experts and sums over ranks."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    width = spec.hidden_size
    norm = (empty(width, kind=torch.float32 if spec.norm.offset else dtype), 1e-5) if spec.norm.kind == "rms" else None
    if norm is not None:
        _norms(empty, norm, width, residual)
    group = share.mesh.group
    if isinstance(group, PeerCollectives):
        group.launch_gather(empty(16, kind=torch.int32))  # of `Mesh.largest`
        group.launch_sums(empty(2, width), None if norm is None else (empty(2, width, kind=residual), *norm))
    mlps = spec.mlps if share.layers is None else spec.mlps[share.layers.start : share.layers.stop]
    for mlp in dict.fromkeys(mlps):
        if (experts := experts_in(mlp)) is not None:
            _experts(experts, empty, empty(1, width, kind=residual), norm, share)


def _experts(
    spec: ExpertsSpec, empty: _Empty, stream: torch.Tensor, norm: tuple[torch.Tensor, float] | None, share: ModelShare
) -> None:
    """Launch the kernels of a mixture of experts, in all forms that depend on the number of tokens."""
    width, alone = stream.shape[1], share.mesh.size == 1
    form = own_form(spec.form(width), share.mesh, whole=share.whole_experts)
    outputs = 2 * form.size if spec.gated else form.size

    def stacked(*shape: int) -> torch.Tensor:
        return empty(1, 1, 1)[(0,) * (3 - len(shape))].expand(len(form.owned), *shape[1:])  # takes no memory

    biased = form.own is not None or share.mesh.rank == 0  # see `ExpertLayer`
    gate_up_bias = stacked(0, outputs) if spec.bias else None
    down_bias = stacked(0, width) if spec.bias and biased else None
    matrices = stacked(0, outputs, width), stacked(0, width, form.size)
    weights = StackedWeights(*matrices, gate_up_bias, down_bias, form.owned.start)
    correction = empty(spec.num_experts, kind=torch.float32) if spec.routing.corrected else None
    if norm is not None and alone:
        logits = few_rows.fused_product(stream, empty(spec.num_experts, width), norm=norm, dtype=torch.float32)
        routing = expert_products.route_on_device(logits, spec.routing, correction)
        inner = expert_rows.gate_rows(stream, norm, routing, weights, form)
        expert_rows.add_rows(inner, routing, weights, form, stream)
    for tokens in expert_products.typical_tokens(form, spec.routing.top_k):
        x = empty(tokens, width)
        routing = expert_products.route_on_device(
            empty(tokens, spec.num_experts, kind=torch.float32), spec.routing, correction
        )
        for added in (None, x) if spec.shared and alone else (None,):
            y = expert_products.summands(x, routing, weights, form, added)
            if not isinstance(y, torch.Tensor):
                y.total()
                if norm is not None and alone:
                    y.normed_with(empty(tokens, width, kind=stream.dtype), norm, x.dtype)


def _norms(empty: _Empty, norm: tuple[torch.Tensor, float], width: int, residual: torch.dtype) -> None:
    dtype = empty(1).dtype
    stream = empty(2, width, kind=residual)
    triton_norm.rms_norm(stream, *norm, dtype)
    triton_norm.add_rms_norm(empty(2, width), stream, *norm, dtype)
    if residual == dtype and dtype.itemsize == 2:
        for rows in (2, 256):
            triton_norm.sum_rms_norm(empty(2, rows, width), empty(rows, width), *norm, dtype)


def _step(slots: DeviceSlots, counts: Sequence[int], context: int) -> StepInput:
    """Fill slots, write their blocks and lay the batch out, for contexts of up to `context` tokens."""
    params = SamplingParams(temperature=0)
    tables = [[0]] * len(slots.block_tables)
    new = [NewRow(i, [0] * n, n, params, 0, [], 0, tables) for i, n in enumerate(counts)]
    plan = StepPlan(
        id=-1,
        new=new,
        slots=list(range(len(counts))),
        num_tokens=list(counts),
        num_drafts=[0] * len(counts),
        samples=[True] * len(counts),
        block_writes=[(0, 0, 0, 0)],
        copies=[],
    )
    slots.apply(plan)
    layout = slots.lay_out(plan)
    layout.input.max_seq_len, layout.input.past_lens = context, None
    slots.count(layout.batch)
    return layout.input


def _branching(wide: int, long: int, context: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of rows, and the longest context, of steps with drafts that branch: few rows and many, alone and
    beside prompts."""
    for queries in sorted({2, min(wide, long)}):
        for rows in (2, 64):  # the latter are divided by their lengths
            yield [queries] * rows, context
        yield [queries] * 2, queries
    yield [1] * 16 + [min(wide + 1, long)], context


def _looking_ahead(long: int, context: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of rows, and the longest context, of steps whose tokens may attend to later ones: long prompts,
    and short ones, alone and beside tokens of others."""
    for counts in ([long], [min(64, long)], [1] * 16 + [long], [1, min(64, long)]):
        yield counts, context


def _attend(
    spec: DecoderSpec,
    layer: AttentionSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    attention: AttentionBackend,
    step: StepInput,
    block_size: int,
    *,
    static: bool,
) -> None:
    heads = layer.num_heads + 2 * layer.num_kv_heads
    qkv = torch.empty(step.num_tokens, heads, layer.head_dim, dtype=dtype, device=step.device)
    cache = torch.empty(attention.cache_shape(layer, 2, block_size), dtype=kv_dtype, device=step.device)
    step.attn = attention.prepare(step, block_size)
    if isinstance(attention, TritonAttention):
        table = torch.empty(2, layer.head_dim, dtype=torch.float32, device=step.device)
        scales = table.new_empty(2, layer.num_kv_heads) if kv_dtype.itemsize == 1 else None
        norms = None
        if spec.head_norms is not None and spec.fuses_head_norms:
            kind = torch.float32 if spec.head_norms.norm.offset else dtype
            norm = torch.empty(layer.head_dim, dtype=kind, device=step.device)
            norms = norm, norm, 1e-5
        sinks = table.new_empty(layer.num_heads) if layer.sinks else None
        attention.launch_ahead(qkv, norms, table, cache, scales, step, layer, sinks)
        if static and step.num_tokens > packed.FEW_LEFT:
            attention.launch_ahead(qkv, norms, table, cache, scales, step, layer, sinks, table.new_empty(1))


def _attend_latents(
    layer: LatentSpec, dtype: torch.dtype, attention: LatentBackend, step: StepInput, block_size: int
) -> None:
    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=step.device)

    own = layer.num_heads * layer.query_dim
    projected = empty(step.num_tokens, own + layer.width)
    q, latents = projected.split([own, layer.width], dim=1)
    heads = q.unflatten(1, (layer.num_heads, layer.query_dim))
    cache = empty(*attention.cache_shape(layer, 2, block_size))
    table = empty(2, layer.rope_dim, kind=torch.float32)
    step.past_lens = [0] * step.num_rows  # lengths on the device are not computed here
    plans = [attention.prepare(step, block_size)]
    if isinstance(attention, Recordable):
        for count in (2, 64):  # the latter are divided by their lengths
            rows = empty(count, kind=torch.int32)
            plans.append(attention.foreseen(rows, rows, step.num_tokens))
    for plan in plans:
        step.attn = plan
        attention.store(heads, latents, (empty(layer.rank), 1e-6), table, cache, step, layer)
        expansion = empty(layer.num_heads, layer.expanded_dim, layer.rank)
        attend = attention.launch_ahead if isinstance(attention, TritonLatents) else attention.attend
        attend(heads, latents, expansion, cache, step, layer)


class _Alike:
    """`Collectives` that wait for no other rank: each seems to have what this one has. Gathers are launched."""

    def __init__(self, mesh: Mesh) -> None:
        self._size, self._group = mesh.size, mesh.group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self._group, PeerCollectives):
            self._group.launch_gather(x)
        return x.expand(self._size, *x.shape)


def _sample(spec: DecoderSpec, slots: DeviceSlots, mesh: Mesh) -> None:
    sampler = ResidentSampler(slots.table, slots.vocab_size)
    logits = torch.empty(2, spec.vocab_size, dtype=torch.float32, device=slots.device)
    held = torch.from_numpy(np.arange(2, dtype=np.int32)).to(slots.device)
    slots.append(held, sampler.draw(logits, held))
    if mesh.size > 1 and spec.vocab_size % mesh.size == 0:
        for rows in (4, 1):  # the results of few rows may not be aligned
            own = logits.new_empty(rows, spec.vocab_size // mesh.size)
            divided = DividedLogits(own, Mesh(mesh.rank, mesh.size, _Alike(mesh)))
            sampler.draw_divided(divided, held.new_zeros(rows))
            divided.whole()
    params = PreparedParams.make(_PENALIZED, 0, [], spec.vocab_size)
    sampler.sample(logits, held, [ResidentRow(0, params, 1, 2), ResidentRow(1, params, 1, 2)])
    words = torch.empty(2, num_words(slots.vocab_size), dtype=torch.int32, device=slots.device)
    resident_allowed.forbid(logits, held, words)
