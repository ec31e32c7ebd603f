"""Counters and gauges of an engine core, sent with its outputs and shown by metrics, logs and the bench."""

from __future__ import annotations

import msgspec

from octavo.core.pausing import AWAKE

# Upper bounds of the buckets of `steps_by_tokens`.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


LIMITS = ("seats", "step_tokens", "kv_blocks")
"""Resources that a waiting request may lack: a slot, tokens of a step, blocks of the KV cache."""


class FeatureMetric(msgspec.Struct, frozen=True, array_like=True):
    """A gauge or counter of a feature.

    Attributes:
        name: without prefix; a counter's samples get the suffix `_total`.
        kind: "gauge" or "counter".
        help: its help text.
        label: name of the label that tells its values apart; "" if it has one value.
        values: value of the label ("" without one) -> value.
    """

    name: str
    kind: str
    help: str
    label: str
    values: dict[str, float]


class EngineStats(msgspec.Struct, array_like=True):
    """A snapshot. Counters only grow; gauges are current values.

    Attributes:
        waits_for: the resource (of `LIMITS`) that the first waiting request lacked in the last step; "" if none.
        num_blocks_used: held by running requests or leases.
        num_blocks_leased: held by leases alone.
        blocks_loaded, blocks_stored: moved from and to tiers.
        blocks_not_stored: left out because too many were on their way, or failed to be stored.
        loads_failed, loads_late: loads that were given up; their prompts were computed instead.
        kv_slots_allocated, kv_slots_filled: token slots in blocks held by running requests, shared blocks counted
            once; their difference is the paging waste, sampled at every step.
        prompt_tokens: tokens of admitted prompts.
        step_prompt_tokens: prompt tokens among `step_tokens`.
        step_sampled: rows of steps that got a new token.
        plan_s, launch_s, retire_s: the loop's seconds; on a CPU, launching includes the forward pass.
        feature_changed: a feature that calls have changed since the start (`EngineHook.changed`); "" for none.
        features: gauges and counters of features.
        waits: request id -> what a feature makes it wait for, for some of the waiting requests.
        idle_s: seconds for which an asynchronous device waited for the host between two steps.
        steps_by_tokens: number of steps by computed prompt tokens plus sampled tokens, in buckets up to each of
            `STEP_TOKENS`, and above.
    """

    # gauges
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_deferred: int = 0
    waits_for: str = ""
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_cached: int = 0
    num_blocks_leased: int = 0
    block_size: int = 0
    kv_slots_allocated: int = 0
    kv_slots_filled: int = 0
    last_step_s: float = 0.0
    paused: bool = False
    sleep_level: int = AWAKE
    weight_version: str = "default"
    feature_changed: str = ""
    # counters
    num_steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    blocks_copied: int = 0
    blocks_evicted: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    blocks_not_stored: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    step_tokens: int = 0
    step_prompt_tokens: int = 0
    step_sampled: int = 0
    step_rows: int = 0
    waste_samples: int = 0
    waste_sum: float = 0.0
    plan_s: float = 0.0
    launch_s: float = 0.0
    retire_s: float = 0.0
    idle_s: float = 0.0
    features: list[FeatureMetric] = []
    waits: dict[str, str] = {}
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def at_the_end(self) -> EngineStats:
        """Return the statistics of this engine once it has ended: it has no requests and no blocks any more."""
        gone = {"num_running", "num_waiting", "num_waiting_deferred", "num_blocks_used", "num_blocks_cached"}
        gone |= {"num_blocks_leased", "kv_slots_allocated", "kv_slots_filled"}
        return msgspec.structs.replace(self, **dict.fromkeys(gone, 0), waits_for="", waits={})

    def counters(self) -> EngineStats:
        """Return the counters alone of an engine that has ended."""
        counters = [metric for metric in self.features if metric.kind == "counter"]
        return msgspec.structs.replace(self.at_the_end(), num_blocks=0, last_step_s=0.0, features=counters)

    @property
    def kv_usage(self) -> float:
        """Fraction of blocks in use by running requests or leased, 0 to 1."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def handled_tokens(self) -> int:
        """Sum over all steps of the tokens that `steps_by_tokens` counts by."""
        return self.step_prompt_tokens + self.step_sampled

    @property
    def mean_waste(self) -> float:
        """Mean over steps of the fraction of allocated token slots that hold no token, 0 to 1."""
        return self.waste_sum / self.waste_samples if self.waste_samples else 0.0
