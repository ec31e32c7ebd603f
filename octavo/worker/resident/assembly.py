"""`assemble`: a runner whose slots, sampling and recorded steps are on the device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from octavo.core.worker_info import most_results
from octavo.models.model import Model
from octavo.models.products import choose_products
from octavo.nn.attention.recordable import Recordable
from octavo.sampling.resident import ResidentSampler
from octavo.sampling.resident_drafts import DraftSampler
from octavo.worker.blocks import Blocks
from octavo.worker.branches import branches_of
from octavo.worker.context_parallel import chosen_alike, forward_of
from octavo.worker.hooks import Capacity, Hooks
from octavo.worker.own_rows import OwnRows
from octavo.worker.parts import NoReplay
from octavo.worker.resident.own_singles import product_rows, sampled_rows
from octavo.worker.resident.replay import GraphReplay, recordable
from octavo.worker.resident.sampler import DeviceSampler
from octavo.worker.resident.sampling import SamplingGraphs
from octavo.worker.resident.slots import DeviceSlots
from octavo.worker.resident.warm_up import warm_up
from octavo.worker.runner import Runner

if TYPE_CHECKING:
    from octavo.worker.worker import Worker


def assemble(worker: Worker, model: Model, blocks: Blocks, room: Capacity, hooks: Hooks, own: OwnRows | None) -> Runner:
    """Return a runner of a worker's model, with its graphs recorded and warmed up.

    Args:
        worker: whose memory is allocated.
        hooks: attached.
    """
    attention, device, settings = worker.attention, worker.device, worker.settings
    if not attention.follows_table_rows:
        raise AssertionError(f"attention backend {attention.name} does not support `table_rows`")
    vocab_size, relay = worker.spec.vocab_size, worker.relay
    slots = DeviceSlots(
        *(room.num_slots, room.max_model_len, worker.block_size, vocab_size),
        device.torch_device,
        worker.config.logprobs_mode,
        worker.cache_groups,
        drafts=room.max_drafts > 0,
        added_tokens=hooks.added_tokens,
        branches=branches_of(hooks.tree, attention, blocks),
    )
    sampler = ResidentSampler(slots.table, vocab_size + hooks.added_tokens, sampled_rows(own, room.num_slots))
    most_rows = most_results(room.num_slots, room.max_step_tokens, room.max_drafts)
    drafted = DraftSampler(slots.table, vocab_size, most_rows) if room.max_drafts else None
    drawing = DeviceSampler(slots, sampler, drafted)
    forward = forward_of(model, attention, worker.block_size, worker.parallel, worker.mesh)
    runner = Runner(model, attention, device, blocks, slots, drawing, NoReplay(), hooks, relay, forward, own)
    records = isinstance(attention, Recordable) and not settings.enforce_eager
    recorder = device.recorder() if records and recordable(model) else None
    recorded = product_rows(own, room.num_slots, room.max_step_tokens) if recorder is not None else []
    choose = partial(choose_products, model, recorded, worker.await_kernels)
    chosen = chosen_alike(choose, worker.mesh.context if own is None else worker.mesh, device.torch_device)
    if recorder is not None and isinstance(attention, Recordable):
        sampling = SamplingGraphs(model, slots, sampler) if relay.last else None
        replay = GraphReplay(model, attention, slots, sampling, device, hooks, own)
        shares, drafts = not settings.disable_cascade_attn, room.max_drafts
        replay.capture(recorder, room.num_slots, room.max_step_tokens, chosen, max_drafts=drafts, shares=shares)
        runner.replay = replay
    if device.torch_device.type == "cuda":
        warm_up(runner, slots, room.max_step_tokens // (own.mesh.size if own else 1), room.max_drafts)
    return runner
