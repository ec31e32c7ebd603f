"""`PoolingWorker`: the worker half. It pools hidden states in float32, on the device that computed them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.core.plan import StepPlan
from octavo.device.transfer import Download, download, upload
from octavo.features import FeatureContext
from octavo.features.pooling.checkpoint import dense_layers, is_late_interaction
from octavo.features.pooling.dense import Dense
from octavo.features.pooling.params import Activation, Pooled, PoolingSpec
from octavo.features.pooling.payload import NAME, PromptSpan, PromptSpans
from octavo.models.model import EncoderModel, Model
from octavo.worker.hooks import Findings, Site, WorkerHook

_UNUSABLE = "The model produced no usable vector (NaN or infinite) for this request."


@dataclass(slots=True)
class _PooledPrompt:
    """One slot's request, and the accumulated result of its computed chunks: the sum of their states [H],
    the state of the first token [H], or all of them."""

    params: PoolingSpec
    kept: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)


class PoolingWorker(WorkerHook):
    """Rows with equal parameters are pooled together, in a few operations."""

    def __init__(self, name: str, dense: Sequence[Dense] = (), *, on_tokens: bool = False) -> None:
        """
        Args:
            dense: layers after the pooling.
            on_tokens: they are applied to tokens' vectors, too.
        """
        self.name = name
        self._dense = dense
        self._projected = ("embed", "token_embed") if on_tokens else ("embed",)
        self._prompts: dict[int, _PooledPrompt] = {}
        self._decode = msgspec.msgpack.Decoder(PoolingSpec).decode

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        self._attached = weakref.ref(model)
        self._device = site.device

    @property
    def _model(self) -> Model | EncoderModel:
        model = self._attached()
        assert model is not None, "the runner holds the model"
        return model

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        """Start a prompt in this slot, or restart it after a preemption."""
        self._prompts.pop(slot, None)
        if options is not None:
            self._prompts[slot] = _PooledPrompt(self._decode(options))

    def after_forward(self, hidden: Tensor, payload: PromptSpans) -> Findings | None:
        groups: dict[PoolingSpec, list[PromptSpan]] = {}
        for span in payload.spans:
            asked = self._prompts[span.slot].params
            groups.setdefault(msgspec.structs.replace(asked, segment=None), []).append(span)
        found: list[tuple[PromptSpan, Download, int | None]] = []
        for params, spans in groups.items():
            if params.task == "token_embed":
                for span in spans:
                    found += self._tokens(hidden, span, params)
            else:
                ending = [span for span in spans if span.ends]
                vectors = self._vectors(hidden, spans, params)
                if ending:
                    sent = download(self._finish(vectors, params))
                    found += [(span, sent, place) for place, span in enumerate(ending)]
        return (lambda: _findings(found)) if found else None

    def _vectors(self, hidden: Tensor, spans: list[PromptSpan], params: PoolingSpec) -> Tensor:
        """Return [N, H] float32 of the N spans that end; accumulate the others for their next chunk."""
        if params.pooling == "mean":
            vectors = self._sums(hidden, spans)
        else:
            last = params.pooling == "last"
            places = [span.start + (span.count - 1 if last else 0) for span in spans]
            vectors = self._states(hidden, np.asarray(places))
        ending = []
        for place, span in enumerate(spans):
            prompt = self._prompts[span.slot]
            if prompt.kept is not None:
                vectors[place] = prompt.kept + vectors[place] if params.pooling == "mean" else prompt.kept
            if span.ends:
                ending.append(place)
            elif params.pooling != "last":
                prompt.kept = vectors[place].clone()
        if len(ending) < len(spans):
            vectors = vectors[upload(np.asarray(ending, dtype=np.int64), hidden.device)]
        if params.pooling != "mean":
            return vectors
        lengths = [span.first + span.count for span in spans if span.ends]
        return vectors / upload(np.asarray(lengths, dtype=np.float32)[:, None], hidden.device)

    def _sums(self, hidden: Tensor, spans: list[PromptSpan]) -> Tensor:
        """Return [len(spans), H]: the sum over each span's tokens."""
        counts = np.asarray([span.count for span in spans])
        states = hidden
        if counts.sum() < len(hidden):
            starts = np.asarray([span.start for span in spans])
            offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            states = hidden[upload(np.repeat(starts, counts) + offsets, hidden.device)]
        states = self._model.final(states).float()
        return torch.segment_reduce(states, "sum", lengths=upload(counts, hidden.device), axis=0)

    def _states(self, hidden: Tensor, places: np.ndarray) -> Tensor:
        return self._model.final(hidden[upload(places, hidden.device)]).float()

    def _tokens(
        self, hidden: Tensor, span: PromptSpan, params: PoolingSpec
    ) -> list[tuple[PromptSpan, Download, int | None]]:
        prompt = self._prompts[span.slot]
        states = self._model.final(hidden[span.start : span.start + span.count]).float()
        prompt.parts.append(self._finish(states, params))
        return [(span, download(torch.cat(prompt.parts)), None)] if span.ends else []

    def _finish(self, vectors: Tensor, params: PoolingSpec) -> Tensor:
        if params.task == "classify":
            model = self._model
            assert hasattr(model, "classify"), "the engine half offers this task only for models with such a head"
            vectors = model.classify(vectors).float()
        if params.task in self._projected:
            for layer in self._dense:
                vectors = layer(vectors)
        if params.dimensions is not None:
            vectors = vectors[:, : params.dimensions]
        return _activated(vectors, params.activation)


class SegmentedPoolingWorker(PoolingWorker):
    """For encoders with token types, which distinguish the tokens of two texts."""

    def buffers(self, max_rows: int, max_tokens: int) -> Mapping[str, Tensor]:
        self._types = torch.zeros(max_tokens, dtype=torch.int64, device=self._device.torch_device)
        self._split = False
        return {"token_types": self._types}

    def lay_out(self, plan: StepPlan, payload: PromptSpans | None) -> None:
        """Mark the tokens of second texts; upload the buffer only if this step or the last one has any."""
        types = np.zeros(plan.total_tokens, dtype=np.int64)
        for span in payload.spans if payload else ():
            if (segment := self._prompts[span.slot].params.segment) is not None:
                types[span.start + segment : span.start + span.count] = 1
        split = bool(types.any())
        if split or self._split:
            self._types[: len(types)].copy_(self._device.upload(types))
            self._types[len(types) :].zero_()
        self._split = split


def _activated(vectors: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "normalize":
            return F.normalize(vectors, dim=-1)
        case "sigmoid":
            return vectors.sigmoid()
        case "softmax":
            return vectors.softmax(-1)
    return vectors


def _findings(found: list[tuple[PromptSpan, Download, int | None]]) -> tuple[Mapping[int, bytes], Mapping[int, str]]:
    """Return findings by batch row; `place` is a row's index in the download, None for the whole."""
    made: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    for span, sent, place in found:
        values = sent.wait().numpy().astype("<f4", copy=False)
        mine = values if place is None else values[place]
        if np.isfinite(mine).all():
            made[span.row] = msgspec.msgpack.encode(Pooled(list(mine.shape), mine.tobytes()))
        else:
            errors[span.row] = _UNUSABLE
    return made, errors


def build_worker(context: FeatureContext) -> PoolingWorker:
    """Return the worker half with the dense layers loaded. No other cost until the first pooled request."""
    layers = dense_layers(context.files, context.hidden_size) if context.files else ()
    dense = [Dense(layer, torch.device(context.device)) for layer in layers]
    late = context.files is not None and is_late_interaction(context.files)
    kind = SegmentedPoolingWorker if context.whole_prompts else PoolingWorker
    return kind(NAME, dense, on_tokens=late)
