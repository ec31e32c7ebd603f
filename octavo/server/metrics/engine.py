"""The engine's metrics: name, help text, and accessor in its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from octavo.core.pausing import AWAKE
from octavo.core.stats import LIMITS, EngineStats

Samples = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A gauge or counter read from `EngineStats`.

    Attributes:
        name: without prefix; a counter's samples get the suffix `_total`.
        read: the value, or one value for each value of `label`.
    """

    name: str
    kind: str
    help: str
    read: Callable[[EngineStats], float | Samples]
    label: str | None = None

    def samples(self, stats: EngineStats) -> Iterator[tuple[dict[str, str], float]]:
        """Yield (labels, value) pairs."""
        value = self.read(stats)
        if self.label is None:
            assert not isinstance(value, Mapping)
            yield {}, float(value)
            return
        assert isinstance(value, Mapping)
        for key, one in value.items():
            yield {self.label: key}, float(one)


def _gauge(
    name: str, text: str, read: Callable[[EngineStats], float | Samples], label: str | None = None
) -> EngineMetric:
    return EngineMetric(name, "gauge", text, read, label)


def _counter(
    name: str, text: str, read: Callable[[EngineStats], float | Samples], label: str | None = None
) -> EngineMetric:
    return EngineMetric(name, "counter", text, read, label)


ENGINE_METRICS = (
    _gauge("num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    _gauge("num_requests_waiting", "Sequences that wait to run.", lambda s: s.num_waiting),
    _gauge(
        "num_requests_waiting_by_reason",
        "Sequences that wait to run: for capacity, or for another reason (deferred).",
        lambda s: {"capacity": s.num_waiting - s.num_waiting_deferred, "deferred": s.num_waiting_deferred},
        "reason",
    ),
    _gauge(
        "num_requests_waiting_by_limit",
        "Sequences that wait for capacity, by what the first of them lacks: a running slot (seats), tokens of a "
        "step, or KV blocks.",
        lambda s: {one: s.num_waiting - s.num_waiting_deferred if one == s.waits_for else 0 for one in LIMITS},
        "limit",
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Fraction of KV blocks in use by running sequences or leased, 0 to 1.",
        lambda s: s.kv_usage,
    ),
    _gauge("kv_blocks", "KV blocks there are.", lambda s: s.num_blocks),
    _gauge("kv_blocks_used", "KV blocks in use by running sequences or leased.", lambda s: s.num_blocks_used),
    _gauge("kv_blocks_cached", "Free KV blocks that still hold a reusable prefix.", lambda s: s.num_blocks_cached),
    _gauge(
        "kv_blocks_leased",
        "KV blocks held for features after the end of their requests.",
        lambda s: s.num_blocks_leased,
    ),
    _gauge("kv_slots_allocated", "Token slots in the blocks of running sequences.", lambda s: s.kv_slots_allocated),
    _gauge("kv_slots_filled", "Token slots of running sequences that hold a token.", lambda s: s.kv_slots_filled),
    _gauge(
        "kv_waste_mean",
        "Mean over all steps of the fraction of allocated token slots that hold no token, 0 to 1.",
        lambda s: s.mean_waste,
    ),
    _gauge("last_step_seconds", "Duration of the newest step.", lambda s: s.last_step_s),
    _gauge(
        "engine_sleep_state",
        "1 for the engine's state: awake, weights on the host, or all memory released; all 0 if it only pauses.",
        lambda s: {
            "awake": s.sleep_level == AWAKE,
            "weights_offloaded": s.sleep_level == 1,
            "discard_all": s.sleep_level == 2,
        },
        "sleep_state",
    ),
    _counter("prompt_tokens", "Prompt tokens of admitted requests.", lambda s: s.prompt_tokens),
    _counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", lambda s: s.prompt_tokens_cached),
    _counter("prompt_tokens_computed", "Prompt tokens that were computed.", lambda s: s.prompt_tokens_computed),
    _counter(
        "prompt_tokens_by_source",
        "Prompt tokens by where their KV came from.",
        lambda s: {"local_compute": s.prompt_tokens_computed, "local_cache_hit": s.prompt_tokens_cached},
        "source",
    ),
    _counter("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    _counter("recomputed_tokens", "Positions computed again after a preemption.", lambda s: s.recomputed_tokens),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    _counter(
        "num_preemptions",
        "Sequences that lost their blocks and were computed again.",
        lambda s: s.num_preemptions,
    ),
    _counter("kv_blocks_copied", "KV blocks copied on write.", lambda s: s.blocks_copied),
    _counter("kv_blocks_evicted", "KV blocks whose cached prefix was evicted.", lambda s: s.blocks_evicted),
    _counter("kv_blocks_loaded", "KV blocks loaded from tiers.", lambda s: s.blocks_loaded),
    _counter("kv_blocks_stored", "KV blocks stored in tiers.", lambda s: s.blocks_stored),
    _counter(
        "kv_blocks_not_stored",
        "KV blocks that were not stored in a tier, because too many were on their way or because it failed.",
        lambda s: s.blocks_not_stored,
    ),
    _counter(
        "kv_loads_given_up",
        "Loads from tiers after which the prompt was computed instead, by reason.",
        lambda s: {"failed": s.loads_failed, "late": s.loads_late},
        "reason",
    ),
    _counter(
        "kv_waste_sum",
        "Sum over steps of the waste; divide its rate by that of kv_waste_samples.",
        lambda s: s.waste_sum,
    ),
    _counter("kv_waste_samples", "Steps at which the waste was measured.", lambda s: s.waste_samples),
    _counter("engine_steps", "Steps run.", lambda s: s.num_steps),
    _counter("engine_step_tokens", "Tokens computed in steps.", lambda s: s.step_tokens),
    _counter("engine_step_prompt_tokens", "Prompt tokens computed in steps.", lambda s: s.step_prompt_tokens),
    _counter("engine_step_rows", "Number of sequences in a step, summed over steps.", lambda s: s.step_rows),
    _counter(
        "engine_loop_seconds",
        "Seconds of the step loop by part. On a CPU launching includes the forward pass.",
        lambda s: {"plan": s.plan_s, "launch": s.launch_s, "retire": s.retire_s},
        "part",
    ),
    _counter(
        "engine_exposed_host_seconds",
        "Seconds that the GPU was idle between two steps, waiting for the host.",
        lambda s: s.idle_s,
    ),
)


def feature_metrics(stats: EngineStats) -> Iterator[EngineMetric]:
    """Yield the metrics of the engine's features."""
    for one in stats.features:
        values: float | Samples = one.values if one.label else one.values.get("", 0.0)
        yield EngineMetric(one.name, one.kind, one.help, partial(_fixed, values), one.label or None)


def _fixed(values: float | Samples, stats: EngineStats) -> float | Samples:
    return values
