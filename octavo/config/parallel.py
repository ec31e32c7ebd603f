"""Settings of models that several devices compute together."""

from dataclasses import dataclass
from typing import Literal

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting

_LAST_PORT = 65535


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
    prefill_context_parallel_size: int = setting(
        1,
        "ranks, each with a whole copy of the weights, that divide the tokens of large steps with prompts "
        "(docs/parallel.md)",
        read=quantities.count,
        metavar="N",
        aliases=("-pcp",),
    )
    prefill_context_parallel_threshold: int = setting(
        1024,
        "fewest tokens of a step that --prefill-context-parallel-size divides",
        read=quantities.count,
        metavar="N",
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
        "give each rank of --tensor-parallel-size some of a layer's experts, instead of a part of each; with "
        "--data-parallel-size, divide requests and experts over ranks that have whole attention layers "
        "(docs/parallel.md)",
    )
    all2all_backend: Literal["allgather_reducescatter", "all_to_all"] = setting(
        "allgather_reducescatter",
        "with --enable-expert-parallel, how ranks add up experts' outputs: all, or only those of the tokens that "
        "chose a rank's experts (docs/parallel.md)",
    )
    enable_dbo: bool | None = setting(
        None,
        "compute steps with prompts in two parts, so that one's sums over ranks run while the other computes; by "
        "default for dense models on GPUs that sum by copy engines",
        shown="where it pays",
        switch=True,
    )
    dbo_prefill_token_threshold: int = setting(
        2048,
        "fewest tokens of a step that --enable-dbo computes in two parts",
        read=quantities.count,
        metavar="N",
    )
    disable_custom_all_reduce: bool = setting(
        False,
        "sum over GPUs with NCCL only, not through the memory of peers",
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
        "least work, or that knows its prompt. With --enable-expert-parallel, ranks of one engine",
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
        if self.master_port > _LAST_PORT:
            raise ConfigError(f"--master-port {self.master_port}: ports have numbers from 1 to {_LAST_PORT}.")
        if self.nnodes > 1 and self.replicas > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size}: a model on several machines ({nodes}) has one "
                "replica. Start a server for each, behind a load balancer."
            )
        if self.num_ranks % self.nnodes:
            raise ConfigError(
                f"{nodes}: the number of ranks, {self.num_ranks}, must be a multiple of it. It is the product of "
                "--tensor-parallel-size, --pipeline-parallel-size and --prefill-context-parallel-size, or "
                "--data-parallel-size with --enable-expert-parallel."
            )
        if self.pipeline_layers and self.pipeline_parallel_size == 1:
            listed = ",".join(map(str, self.pipeline_layers))
            raise ConfigError(
                f"--pipeline-layers {listed}: --pipeline-parallel-size 1 is one stage, which has all layers. Set it to "
                f"{len(self.pipeline_layers)}, or leave out --pipeline-layers (and OCTAVO_PP_LAYER_PARTITION)."
            )
        self._check_requests()
        self._check_thresholds()
        if self.enable_dbo and self.tensor_parallel_size == 1:
            raise ConfigError(
                "--enable-dbo computes while sums over ranks run, and with --tensor-parallel-size 1 there are none. "
                "Raise that, or leave it out."
            )
        if self.enable_dbo and self.prefill_context_parallel_size > 1:
            raise ConfigError(
                f"--enable-dbo: with --prefill-context-parallel-size {self.prefill_context_parallel_size} ranks divide "
                "large steps already. Leave one of them out."
            )
        if self.exchanges_rows and not self.enable_expert_parallel:
            raise ConfigError(
                f"--all2all-backend {self.all2all_backend} is for --enable-expert-parallel: without it, each rank has "
                "a part of every expert. Set that flag, or leave this one out."
            )

    def _check_thresholds(self) -> None:
        """Raise ConfigError for a threshold without effect, since what it belongs to is off."""
        usual = ParallelConfig()
        contexts, parts = self.prefill_context_parallel_threshold, self.dbo_prefill_token_threshold
        if contexts != usual.prefill_context_parallel_threshold and self.prefill_context_parallel_size == 1:
            raise ConfigError(
                f"--prefill-context-parallel-threshold {contexts} is for --prefill-context-parallel-size above 1. Set "
                "that, or leave it out."
            )
        if parts != usual.dbo_prefill_token_threshold and not self.enable_dbo:
            raise ConfigError(
                f"--dbo-prefill-token-threshold {parts} is for --enable-dbo. Set that flag, or leave this one out."
            )

    def _check_requests(self) -> None:
        """Raise ConfigError for what data-parallel attention can't be combined with."""
        if not self.divides_requests:
            return
        context = self.prefill_context_parallel_size
        for given, flag in (
            (self.tensor_parallel_size > 1, f"--tensor-parallel-size {self.tensor_parallel_size}"),
            (self.pipeline_parallel_size > 1, f"--pipeline-parallel-size {self.pipeline_parallel_size}"),
            (context > 1, f"--prefill-context-parallel-size {context}"),
            (self.enable_dbo, "--enable-dbo"),
        ):
            if given:
                raise ConfigError(
                    f"{flag}: with --data-parallel-size {self.data_parallel_size} and --enable-expert-parallel each "
                    "rank has whole attention layers and some of the experts. Leave it out; or leave "
                    "--enable-expert-parallel out for whole replicas."
                )

    @property
    def divides_requests(self) -> bool:
        """Whether ranks have whole attention layers and divide requests and experts (data-parallel attention)."""
        return self.data_parallel_size > 1 and self.enable_expert_parallel

    @property
    def cache_ranks(self) -> int:
        """The number of ranks that have KV blocks of their own; 1 if each has a share of every block."""
        return self.data_parallel_size if self.divides_requests else 1

    @property
    def replicas(self) -> int:
        """The number of engines."""
        return 1 if self.divides_requests else self.data_parallel_size

    @property
    def allows_micro_batches(self) -> bool:
        """Whether large steps may be computed in two parts."""
        if self.enable_dbo is not None:
            return self.enable_dbo
        whole = self.disable_custom_all_reduce or self.prefill_context_parallel_size > 1
        return self.tensor_parallel_size > 1 and not whole

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks send only the rows of tokens that chose their experts."""
        return self.all2all_backend == "all_to_all"

    @property
    def sends_rows(self) -> bool:
        """Whether ranks send each other single rows, instead of sums of all."""
        return self.exchanges_rows or self.divides_requests

    @property
    def meeting(self) -> dict[str, str | int]:
        """The flags that say where machines meet, with their values if these are set."""
        usual, found = ParallelConfig(), dict[str, str | int]()
        if self.master_addr != usual.master_addr:
            found["master-addr"] = self.master_addr
        if self.master_port != usual.master_port:
            found["master-port"] = self.master_port
        return found

    @property
    def num_ranks(self) -> int:
        whole = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        return whole * self.cache_ranks

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of each machine."""
        return self.num_ranks // self.nnodes

    @property
    def division(self) -> str:
        """The settings that divide the model, for errors."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size, "data": self.cache_ranks}
        sizes["prefill-context"] = self.prefill_context_parallel_size
        return " ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1)
