"""`MicroBatches`: large steps in two parts, layer by layer in turn, so that the sums over ranks of one part run while
the other computes.

All computation is on one stream, in the order: mixer of the first part, mixer of the second, feed-forward of the first,
feed-forward of the second. So nothing that a layer uses needs to exist twice, and the second part finds in the KV cache
what the first has written: the cut may be within a request. A sum begins when its product is done, and is awaited by
the norm that reads it (`Mesh.begin_sum`), half a layer of the other part later: at most two sums are on their way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.config import ParallelConfig
from octavo.core.errors import ConfigError
from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.models.feed_forwards.spec import experts_in
from octavo.models.mixers.spec import SelfAttention
from octavo.models.model import Model
from octavo.models.spec import DecoderSpec
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream
from octavo.parallel.mesh import Mesh
from octavo.worker.parts import Forward, Prepares

_ALIGNED = 16
"""Tokens of the first part are a multiple, since kernels are compiled for the alignment of what begins there."""


class MicroBatches:
    """`CausalLM.forward`, in two parts where that may pay.

    Args:
        least: tokens of a step from which on it is divided.
        most: maximum bytes of a part's sum; larger steps are computed whole. None for no limit.
    """

    def __init__(
        self, model: CausalLM, attention: Prepares, block_size: int, least: int, most: int | None = None
    ) -> None:
        self._model, self._attention, self._block_size = model, attention, block_size
        self._least, self._most = max(least, 2 * _ALIGNED), most

    def takes(self, step: StepInput) -> bool:
        model = self._model
        undivided = model.taps is not None or model.layer_inputs is not None or step.ahead is not None
        return step.num_tokens >= self._least and not undivided

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """See `CausalLM.forward`."""
        model = self._model
        if not self.takes(step) or (self._most is not None and x.nbytes > 2 * self._most):
            return model.forward(x, step)
        cut = step.num_tokens // 2 // _ALIGNED * _ALIGNED
        parts = divided(step, cut)
        for part in parts:
            for one in (part, *part.others):
                one.attn = self._attention.prepare(one, self._block_size)
        first, second = parts
        parts = model.rotated(first), model.rotated(second)
        streams = [
            Stream(model.entering(rows, part), waits=True)
            for rows, part in zip(x.split([cut, len(x) - cut]), parts, strict=True)
        ]
        last = model.layer_range.stop - 1
        for i, layer in enumerate(model.layers, model.layer_range.start):
            assert isinstance(layer, DecoderLayer)
            inner = [
                layer.mix(stream, part, part.hidden_rows if i == last else None)
                for stream, part in zip(streams, parts, strict=True)
            ]
            for stream, kept in zip(streams, inner, strict=True):
                layer.feed(stream, kept)
            for stream, part in zip(streams, parts, strict=True) if step.additions else ():
                if (added := part.addition(i, part.hidden_rows if i == last else None)) is not None:
                    stream.add_later(added)
        before, after = (stream.total() for stream in streams)
        if step.hidden_rows is None:
            return torch.cat([before, after])
        return torch.where((step.hidden_rows < cut)[:, None], before, after)


def divided(step: StepInput, cut: int) -> tuple[StepInput, StepInput]:
    """Return the first `cut` tokens of a step, and the others, as steps without `attn`.

    A row that is cut is in both; its second part has the first one's tokens behind it. Each part has all of
    `hidden_rows`, those of the other part as some token of its own: which part a row is in is known on the device only.
    """
    lens = list(step.query_lens if step.query_lens is not None else step.query_start.diff().tolist())
    row, before = 0, 0
    while before + lens[row] <= cut:
        before += lens[row]
        row += 1
    kept = cut - before  # tokens of `row` in the first part
    end = row + (kept > 0)
    firsts, seconds = [*lens[:row], *([kept] if kept else [])], [lens[row] - kept, *lens[row + 1 :]]
    pasts = None if step.past_lens is None else list(step.past_lens)
    start = step.query_start
    seq_lens = step.seq_lens[:end].clone()
    if kept:
        seq_lens[-1] -= lens[row] - kept
    first = step.part(
        slice(0, cut),
        slice(0, end),
        query_start=start[: end + 1].clamp(max=cut),
        query_lens=firsts,
        seq_lens=seq_lens,
        past_lens=None if pasts is None else pasts[:end],
    )
    second = step.part(
        slice(cut, None),
        slice(row, None),
        query_start=(start[row:] - cut).clamp_(min=0),
        query_lens=seconds,
        seq_lens=step.seq_lens[row:].clone(),
        past_lens=None if pasts is None else [pasts[row] + kept, *pasts[row + 1 :]],
    )
    for part, begin in ((first, 0), (second, cut)):
        if part.table_rows is not None:
            part.table_rows = part.table_rows.clone()  # else it may not be aligned
        if step.hidden_rows is not None:
            part.hidden_rows = (step.hidden_rows - begin).clamp_(0, part.num_tokens - 1)
    others = [divided(one, cut) for one in step.others]
    first.others, second.others = [one for one, _ in others], [other for _, other in others]
    return first, second


def micro_batches_of(
    model: Model, attention: Prepares, block_size: int, parallel: ParallelConfig, mesh: Mesh
) -> Forward | None:
    """Return what computes large steps in two parts; None if that is off, or not set and not faster.

    Raises:
        ConfigError: the steps of this model can't be divided.
    """
    if not parallel.allows_micro_batches:
        return None
    check_micro_batches(model, parallel)
    hidden = mesh.most_hidden_bytes()
    if parallel.enable_dbo is None and not (hidden and uses_micro_batches(model.spec, parallel)):
        return None
    assert isinstance(model, CausalLM)
    most = hidden if parallel.enable_dbo is None else None
    return MicroBatches(model, attention, block_size, parallel.dbo_prefill_token_threshold, most).forward


def uses_micro_batches(spec: object, parallel: ParallelConfig) -> bool:
    """Return whether large steps of a model may be computed in two parts.

    If it is not set, only those of dense models with ordinary attention. With experts, each part would read all of
    them; with latent attention, the second part would expand the first one's latents again.
    """
    if parallel.enable_dbo is not None or not parallel.allows_micro_batches:
        return parallel.allows_micro_batches
    if not isinstance(spec, DecoderSpec) or any(experts_in(mlp) for mlp in spec.mlps):
        return False
    return all(isinstance(spec.mixer_of(i), SelfAttention | None) for i in range(spec.num_layers))


def check_micro_batches(model: object, parallel: ParallelConfig) -> None:
    """Raise ConfigError if steps of a model are to be computed in two parts where they can't."""
    if parallel.enable_dbo and not has_only_attention(model):
        raise ConfigError(
            "--enable-dbo: native programs on CPUs, and models with recurrent layers or of transformers, don't compute "
            "steps in two parts. Leave it out."
        )


def has_only_attention(model: object) -> bool:
    """Whether a model has Octavo's own layers and no recurrent ones, so that parts of a step can be computed apart."""
    return isinstance(model, CausalLM) and not any(isinstance(layer, StateCache) for layer in model.cached_layers)
