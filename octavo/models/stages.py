"""Division of a decoder's layers into the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import nn

from octavo.core.cache_groups import CacheGroup
from octavo.core.errors import ConfigError
from octavo.models.decoder import CausalLM
from octavo.models.load.weights import weight_layers
from octavo.models.mixers.spec import SharedSelfAttention
from octavo.models.model import LayeredModel
from octavo.nn.cached import CachedLayer
from octavo.parallel.stage import Stage


def take_stage(model: LayeredModel, stage: Stage, stated: Sequence[int]) -> tuple[str, ...]:
    """Reduce a model to the layers of a stage, before its weights are loaded.

    Args:
        stated: the number of layers of each stage; empty to divide the weights evenly.

    Returns:
        Beginnings of the names of tensors that other stages have.

    Raises:
        ConfigError: the layers can't be divided into these stages.
    """
    if not isinstance(model, CausalLM):
        raise ConfigError(
            "--pipeline-parallel-size: the layers of this model are not Octavo's own, so they can't be divided into "
            "stages. Use --tensor-parallel-size, or leave it out."
        )
    if model.spec.layer_inputs is not None or any(isinstance(m, SharedSelfAttention) for m in model.spec.mixers):
        raise ConfigError(
            "--pipeline-parallel-size: layers of this model read embeddings, or keys and values of other layers, which "
            "stages do not send each other. Use --tensor-parallel-size, or leave it out."
        )
    sizes = [_stored_bytes(layer) for layer in model.layers]
    sizes[0] += _stored_bytes(model.embedding)
    sizes[-1] += _stored_bytes(model.embedding if model.spec.tied else model.head)
    counts = _checked(stated, stage.count, len(sizes)) if stated else balanced(sizes, stage.count)
    ends = list(accumulate(counts, initial=0))
    own = range(ends[stage.number], ends[stage.number + 1])
    others = [f"model.layers.{i}." for i in range(len(sizes)) if i not in own]
    model.keep(own)
    if own.start:
        others += ["model.embed_tokens.", "model.embed_positions.", "model.embed_norm."]
    if own.stop < len(sizes):
        others += ["model.norm.", "lm_head.", "score."]
    return tuple(others)


def own_groups(
    groups: Sequence[CacheGroup], layers: Sequence[CachedLayer], own: Sequence[CachedLayer]
) -> tuple[CacheGroup, ...]:
    """Return the cache groups of a whole model with only the layers of a stage, numbered as in `own`.

    All stages have the same groups, since they share the block tables.
    """
    numbers = {id(layer): i for i, layer in enumerate(own)}
    ours = [[numbers[id(layers[i])] for i in group.layers if id(layers[i]) in numbers] for group in groups]
    return tuple(replace(group, layers=tuple(mine)) for group, mine in zip(groups, ours, strict=True))


def balanced(sizes: Sequence[int], count: int) -> list[int]:
    """Divide a sequence into `count` runs, so that the largest sum of a run is as small as possible.

    Returns:
        The length of each run, at least 1.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if count > len(sizes):
        raise ConfigError(
            f"--pipeline-parallel-size {count}: the model has {len(sizes)} layers, and each stage needs one. Use at "
            f"most {len(sizes)} stages."
        )
    sums = list(accumulate(sizes, initial=0))
    best = {(0, 0): (0, 0)}
    """(runs, layers in them) -> the largest sum, and minus the start of the last run: the latest of equal ones."""
    for runs in range(1, count + 1):
        for end in range(runs, len(sizes) - count + runs + 1):
            starts = (start for start in range(runs - 1, end) if (runs - 1, start) in best)
            best[runs, end] = min((max(best[runs - 1, start][0], sums[end] - sums[start]), -start) for start in starts)
    counts, end = [], len(sizes)
    for runs in range(count, 0, -1):
        start = -best[runs, end][1]
        counts.append(end - start)
        end = start
    return counts[::-1]


def _checked(stated: Sequence[int], count: int, layers: int) -> list[int]:
    if len(stated) != count or sum(stated) != layers or min(stated) < 1:
        listed = ",".join(map(str, stated))
        raise ConfigError(
            f"--pipeline-layers {listed} does not divide {layers} layers over {count} stages: give {count} numbers of "
            f"at least 1 that add up to {layers}, or leave it out."
        )
    return list(stated)


def _stored_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's matrices, the same in all ranks of a stage (some biases are on one rank only)."""
    wanted = (want for layer in weight_layers(module) for want in layer.wanted() if len(want.spec.shape) > 1)
    return sum(math.prod(want.spec.shape) * want.spec.dtype.itemsize for want in wanted if not want.optional)
