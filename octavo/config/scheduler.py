"""Settings of the scheduler."""

from dataclasses import dataclass
from typing import Any, Literal

from octavo.core import quantities
from octavo.core.flag import setting

_QUICKER = 4
"""How many times shorter the steps of "interactivity" are."""

PerformanceMode = Literal["balanced", "interactivity", "throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled.

    Attributes:
        max_num_seqs: None takes 256, and 1,024 on a GPU of 60 GiB or more.
        max_num_batched_tokens: None takes 2,048, and 8,192 on a GPU of 60 GiB or more, unless the performance mode
            takes others.
        performance_mode: "interactivity" takes a quarter of the tokens of a step; "throughput" up to twice as many for
            a mixture of experts on a GPU.
        policy: a name in `schedule/policy.py`.
        depth: steps launched ahead of the oldest unread one: 0 is synchronous, 1 overlaps; None lets the device choose.
    """

    max_num_seqs: int | None = setting(
        None,
        "most sequences that run at once",
        shown="256; on a GPU of 60 GiB or more 1024",
        read=quantities.count,
        metavar="N",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "most tokens computed in one step (with data-parallel attention, by each rank); longer prompts are computed in "
        "chunks",
        shown="2048; on a GPU of 60 GiB or more 8192",
        read=quantities.count,
        metavar="TOKENS",
    )
    performance_mode: PerformanceMode = setting(
        "balanced",
        "changes the default of --max-num-batched-tokens: `interactivity` divides it by four, so that streams wait "
        "less for the prompts of others; `throughput` doubles it on a GPU for models with many experts, which are then "
        "faster",
    )
    watermark: float = setting(
        0.0,
        "fraction of the KV cache to keep free when a request starts beside others, so that fewer are preempted",
        read=quantities.share,
        metavar="FRACTION",
    )
    policy: str = setting(
        "fcfs",
        "which request runs first: the earliest (fcfs), the one with the lowest `priority`, the one with the fewest "
        "tokens of prompt and `max_tokens` (shortest-first), the one with the largest `max_tokens` (longest-first), or "
        "one of the tenant that has had the fewest tokens for its weight (fair)",
        flag="scheduling-policy",
    )
    tenant_weights: dict[str, Any] = setting(
        {}, 'shares of tenants under --scheduling-policy fair, as a JSON object: {"NAME": 2.5}; others have 1'
    )
    depth: int | None = setting(
        None,
        "plan the next step while the device computes this one",
        flag="async-scheduling",
        shown="on with a GPU, off on a CPU",
        switch=True,
        convert=int,
    )

    def limits(self, default_seqs: int, default_tokens: int, offline_tokens: int) -> tuple[int, int]:
        """Return the most sequences and tokens of a step; if only one is set, adjust the other's default to fit.

        Args:
            offline_tokens: default for "throughput".
        """
        by_mode = {"interactivity": default_tokens // _QUICKER, "throughput": offline_tokens}
        default = by_mode.get(self.performance_mode, default_tokens)
        tokens = self.max_num_batched_tokens or max(default, self.max_num_seqs or 0)
        return self.max_num_seqs or min(default_seqs, tokens), tokens
