"""`MedusaDrafter`: the worker half if heads of one token each draft (Medusa, https://arxiv.org/abs/2401.10774).

Head i predicts the token i + 1 places after the next one, from the target's state at the last computed token alone:
blocks x + silu(W x + b), then an output head. Drafts are the most likely tokens, as a chain. Nothing is kept per
request, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.features import FeatureContext
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.draft_files import draft_files
from octavo.features.speculation.heads.pairs import LastPairs
from octavo.features.speculation.payload import NAME, option_of
from octavo.models.decoder import CausalLM
from octavo.models.hf_config import whole
from octavo.models.load import open_checkpoint
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import EncoderModel, Model
from octavo.models.native import NativeDecoder
from octavo.models.spec import DecoderSpec
from octavo.nn.taps import Taps
from octavo.nn.weights import TensorSpec
from octavo.worker.drafts import Drafting, Drafts
from octavo.worker.hooks import Reserved, Site, WorkerHook
from octavo.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: weights [H, H] and biases [H] of its blocks, and its output head [V, H]."""

    blocks: list[tuple[Tensor, Tensor | None]]
    out: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the most likely tokens of states [D, H], [D] int64."""
        for weight, bias in self.blocks:
            x = x + F.silu(F.linear(x, weight, bias))
        return F.linear(x, self.out).argmax(-1)

    @property
    def nbytes(self) -> int:
        tensors = [self.out, *(part for block in self.blocks for part in block if part is not None)]
        return sum(tensor.nbytes for tensor in tensors)


class MedusaDrafter(WorkerHook):
    """Every rank has all heads."""

    name = NAME
    last_stage_only = True

    def __init__(self, config: DraftConfig, context: FeatureContext) -> None:
        self._config = config
        self._context = context
        self._heads: list[MedusaHead] = []
        self._off: set[int] = set()
        self._worker: Worker | None = None

    def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
        if not isinstance(worker.model, CausalLM | NativeDecoder) or not isinstance(worker.spec, DecoderSpec):
            raise ConfigError(
                "speculative_config: method=medusa reads hidden states, which a model of another implementation does "
                "not keep. Choose another method."
            )
        self._worker = worker
        self._load(worker)
        states = (max(limits) + 2) * worker.spec.hidden_size * worker.dtype.itemsize
        return Reserved(sum(head.nbytes for head in self._heads), states)

    def _load(self, worker: Worker) -> None:
        files = draft_files(self._config, self._context)
        random = worker.load_format == "dummy" and not files.weights
        device = worker.device.torch_device
        checkpoint = open_checkpoint(files, "dummy" if random else "auto", worker.config.seed, device.type)
        count, depth = whole(files.config, "medusa_num_heads"), whole(files.config, "medusa_num_layers", 1)
        size, vocab = worker.spec.hidden_size, worker.spec.vocab_size
        reader = _Reader(checkpoint, worker.dtype, device)
        self._heads = [
            MedusaHead(
                [reader.block(head, layer, size) for layer in range(depth)], reader.out(head, depth, vocab, size)
            )
            for head in range(min(count, self._config.most_drafts))
        ]

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        assert site.room is not None
        assert self._worker is not None
        assert isinstance(model, CausalLM | NativeDecoder)
        if not self._heads:
            self._load(self._worker)  # it slept
        spec, device = self._worker.spec, site.device.torch_device
        tokens = max(site.room.max_step_tokens, site.room.num_slots) + 2
        model.taps = Taps((spec.num_layers,), spec.num_layers, tokens, spec.hidden_size, self._worker.dtype, device)
        self._target = model
        self._pairs = LastPairs(site.room.num_slots, site.device)
        self._device = site.device
        self._off.clear()

    def detach(self) -> None:
        self._heads = []
        self._target.taps = None

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        self._off.discard(slot)
        if not option_of(options).enabled:
            self._off.add(slot)

    def drawn(self, plan: StepPlan, tokens: Tensor, length: Tensor, order: Tensor | None) -> None:
        slots = self._device.upload(np.array(plan.slots))
        self._last = self._pairs.of(plan, slots, length[slots].long())

    def propose(self, drafting: Drafting, payload: Any) -> Drafts | None:
        taps, plan = self._target.taps, drafting.plan
        assert taps is not None
        rows = self._device.upload(np.array(drafting.rows))
        kept = taps.states[self._last[rows], 0]
        states = self._target.final(kept.to(getattr(self._target, "residual_dtype", torch.float32))).to(kept.dtype)
        tokens = torch.stack([head(states) for head in self._heads], 1)
        on = np.array([plan.slots[row] not in self._off for row in drafting.rows], dtype=np.int64)
        return Drafts(tokens, drafting.limits.clamp(max=len(self._heads)) * self._device.upload(on))


class _Reader:
    """Reads heads in the layout of their authors ("0.0.linear.weight", "0.1.weight") or of vLLM
    ("blocks.0.layers.0.weight", "lm_heads.0.weight"), each with or without the prefix "medusa_heads."."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._names: Set[str] = checkpoint.names()

    def block(self, head: int, layer: int, size: int) -> tuple[Tensor, Tensor | None]:
        weight = self._read((f"{head}.{layer}.linear.weight", f"blocks.{head}.layers.{layer}.weight"), (size, size))
        bias = self._read((f"{head}.{layer}.linear.bias", f"blocks.{head}.layers.{layer}.bias"), (size,), needed=False)
        assert weight is not None
        return weight, bias

    def out(self, head: int, depth: int, vocab: int, size: int) -> Tensor:
        found = self._read((f"{head}.{depth}.weight", f"lm_heads.{head}.weight", "lm_head.weight"), (vocab, size))
        assert found is not None
        return found

    def _read(self, names: tuple[str, ...], shape: tuple[int, ...], *, needed: bool = True) -> Tensor | None:
        every = [f"{prefix}{name}" for name in names for prefix in ("", "medusa_heads.")]
        name = next((name for name in every if name in self._names), None)
        if name is None and (self._names or not needed):
            if needed:
                raise ConfigError(
                    f"speculative_config: {self._checkpoint.origin} has no tensor {names[0]} or {names[1]}; it is no "
                    "checkpoint of Medusa heads."
                )
            return None
        stored = self._checkpoint.shape(name or names[0])
        if stored is not None and stored != shape:
            raise ConfigError(
                f"speculative_config: {name} in {self._checkpoint.origin} has shape {list(stored)}, but these heads "
                f"would need {list(shape)} for this model. Name heads that were trained for it."
            )
        spec = TensorSpec(shape, self._dtype)
        return self._checkpoint.tensor(name or names[0], spec).to(self._device, self._dtype).clone()
