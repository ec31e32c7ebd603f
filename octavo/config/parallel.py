"""Settings of models that several devices compute together."""

from dataclasses import dataclass

from octavo.core import quantities
from octavo.core.flag import setting


def _layer_counts(text: str) -> tuple[int, ...]:
    return tuple(quantities.count(part) for part in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a model is divided over devices. Each device has a process, a rank (docs/parallel.md)."""

    tensor_parallel_size: int = setting(
        1,
        "devices that divide each layer; each one's process keeps and reads its share of the weights and of the KV "
        "cache (docs/parallel.md)",
        read=quantities.count,
        metavar="N",
        aliases=("-tp",),
    )
    pipeline_parallel_size: int = setting(
        1,
        "stages that divide the model's layers; each one's processes keep the weights and the KV cache of its layers "
        "(docs/parallel.md)",
        read=quantities.count,
        metavar="N",
        aliases=("-pp",),
    )
    pipeline_layers: tuple[int, ...] = setting(
        (),
        "number of layers of each stage, such as 10,12",
        shown="stages of about equal size",
        read=_layer_counts,
        metavar="N,N",
        many=False,
        env="OCTAVO_PP_LAYER_PARTITION",
    )
    enable_expert_parallel: bool = setting(
        False,
        "give each rank of --tensor-parallel-size some of a layer's experts, instead of a part of each",
    )
    data_parallel_size: int = setting(
        1,
        "replicas of the model, each an engine of its own with its own devices; a request goes to the one with the "
        "least work, or that knows its prompt",
        read=quantities.count,
        metavar="N",
        aliases=("-dp",),
    )
    rank_timeout_s: float = setting(
        300.0,
        "seconds after which a step that a rank has not finished counts as hanging, which ends the engine",
        flag="rank-timeout",
        read=quantities.positive,
        metavar="SECONDS",
    )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def division(self) -> str:
        """The settings that divide the model, for errors."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return " ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
