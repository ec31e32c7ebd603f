"""Checks that ranks can divide a model, before their processes start."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.config import ParallelConfig
from octavo.models.implementation import OWN
from octavo.models.spec import DecoderSpec
from octavo.models.stages import take_stage
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import AnyBackend, Build
from octavo.nn.latent.reference import ReferenceLatents
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.row_exchange import RowExchange
from octavo.nn.weights import fused
from octavo.parallel.mesh import ALONE, Mesh
from octavo.parallel.stage import Stage
from octavo.worker.context_parallel import check_contexts
from octavo.worker.micro_batches import check_micro_batches


def with_experts(build: Build, parallel: ParallelConfig, exchange: RowExchange | None) -> Build:
    """Return the settings of a model whose experts are divided as set."""
    whole, rows = parallel.enable_expert_parallel, parallel.exchanges_rows
    return replace(build, whole_experts=whole, exchanges_rows=rows, exchange=exchange)


def check_division(spec: DecoderSpec, parallel: ParallelConfig) -> None:
    """Build the first rank's layers without memory for weights.

    How quantized weights are packed is not known here: what can't be cut for that reason is refused by the ranks.

    Raises:
        ConfigError: the layers, or the tokens of large steps, can't be divided this way.
    """
    mesh = Mesh(0, parallel.tensor_parallel_size * parallel.cache_ranks)
    exchange = RowExchange(mesh) if parallel.divides_requests else None
    layer = OWN.attention(spec, ALONE if exchange is not None else mesh)
    attention: AnyBackend = ReferenceAttention() if isinstance(layer, AttentionSpec) else ReferenceLatents()
    dtype, nowhere = torch.float32, torch.device("meta")
    schemes = everywhere(Unquantized, dtype, nowhere, fused)
    build = Build(dtype, nowhere, attention, schemes, mesh=mesh)
    model = OWN.build(with_experts(build, parallel, exchange), spec)
    check_contexts(model, parallel)
    check_micro_batches(model, parallel)
    if parallel.pipeline_parallel_size > 1:
        take_stage(model, Stage(0, parallel.pipeline_parallel_size), parallel.pipeline_layers)
