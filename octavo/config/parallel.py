"""Settings of models that several devices compute together."""

from dataclasses import dataclass
from typing import Literal

from octavo.core import quantities
from octavo.core.errors import ConfigError
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
    all2all_backend: Literal["allgather_reducescatter", "all_to_all"] = setting(
        "allgather_reducescatter",
        "with --enable-expert-parallel, how ranks add up experts' outputs: all, or only those of the tokens that "
        "chose a rank's experts (docs/parallel.md)",
    )
    enable_dbo: bool = setting(
        False,
        "compute steps with prompts in two parts, so that one's sums over ranks run while the other computes",
    )
    dbo_prefill_token_threshold: int = setting(
        512,
        "tokens of a step from which on --enable-dbo computes it in two parts",
        read=quantities.count,
        metavar="N",
    )
    disable_custom_all_reduce: bool = setting(
        False,
        "sum over GPUs with NCCL only, not in the memory of peers",
    )
    nnodes: int = setting(
        1,
        "machines that compute the model together, each with an equal part of the ranks",
        read=quantities.count,
        metavar="N",
    )
    node_rank: int = setting(
        0,
        "number of this machine; 0 runs the engine, the others only ranks",
        read=quantities.natural,
        metavar="N",
    )
    master_addr: str = setting("127.0.0.1", "address of node 0, where the other nodes reach it", metavar="ADDRESS")
    master_port: int = setting(29501, "port of node 0 for the other nodes", read=quantities.count, metavar="PORT")
    node_key: str = setting(
        "",
        "secret that all nodes share; without it, a machine that reaches --master-port can join",
        shown="none",
        metavar="KEY",
        env="OCTAVO_NODE_KEY",
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

    def check(self) -> None:
        """Raise ConfigError for machines that can't be used together."""
        nodes = f"--nnodes {self.nnodes}"
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank}: nodes have numbers from 0 to {self.nnodes - 1} ({nodes})."
            )
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"{nodes}: the number of ranks, {self.num_ranks}, must be a multiple of it. It is the product of "
                "--tensor-parallel-size and --pipeline-parallel-size."
            )
        if self.enable_dbo and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-dbo computes while sums over ranks run, and with --tensor-parallel-size 1 there are none. "
                "Raise that, or leave it out."
            )
        if self.exchanges_rows and not self.enable_expert_parallel:
            raise ConfigError(
                f"--all2all-backend {self.all2all_backend} is for --enable-expert-parallel: without it, each rank has "
                "a part of every expert. Set that flag, or leave this one out."
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size}: a model on several machines ({nodes}) has one "
                "replica. Start a server for each, behind a load balancer."
            )

    @property
    def sums(self) -> dict[str, bool]:
        """How ranks may sum; see `join` in `parallel/join.py`."""
        return {"peers": not self.disable_custom_all_reduce, "later": self.enable_dbo}

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks send only the rows of tokens that chose their experts."""
        return self.all2all_backend == "all_to_all"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of each machine."""
        return self.num_ranks // self.nnodes

    @property
    def division(self) -> str:
        """The settings that divide the model, for errors."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return " ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
