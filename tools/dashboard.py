"""Write deploy/grafana/octavo.json, a dashboard of Octavo's metrics for Grafana 10 and newer.

python tools/dashboard.py [FILE]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "octavo.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
CHOSEN = 'model_name=~"$model",instance=~"$instance"'
"""Label matchers of the dashboard's variables."""
HERE = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """A graph: its queries, each with the name of its lines."""

    title: str
    unit: str
    about: str
    queries: tuple[tuple[str, str], ...]
    most: float | None = None


def panel(title: str, unit: str, about: str, *queries: tuple[str, str], most: float | None = None) -> Panel:
    return Panel(title, unit, about, queries, most)


def gauge(name: str) -> str:
    return f"octavo:{name}{{{CHOSEN}}}"


def rate(name: str, by: str = "") -> str:
    labels = ", ".join(filter(None, ("instance", "engine", by)))
    return f"sum by ({labels}) (rate(octavo:{name}_total{{{CHOSEN}}}[$__rate_interval]))"


def ratio(name: str, of: str) -> str:
    return f"{rate(name)} / {rate(of)}"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (le) (rate(octavo:{name}_bucket{{{CHOSEN}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


WHERE = "{{instance}} {{engine}}"
GPU = "{{instance}} GPU {{gpu}}"
ROWS: dict[str, tuple[Panel, ...]] = {
    "State": (
        panel("Healthy", "short", "1 while the engine makes progress.", (gauge("engine_healthy"), WHERE), most=1),
        panel(
            "Requests",
            "short",
            "Sequences that run, and those that wait.",
            (gauge("num_requests_running"), f"running {WHERE}"),
            (gauge("num_requests_waiting"), f"waiting {WHERE}"),
        ),
        panel("KV cache in use", "percentunit", "Of all blocks.", (gauge("kv_cache_usage_perc"), WHERE), most=1),
        panel(
            "Tokens per second",
            "short",
            "Generated, and computed of prompts.",
            (rate("generation_tokens"), f"output {WHERE}"),
            (rate("prompt_tokens_computed"), f"input {WHERE}"),
        ),
        panel(
            "What waiting requests lack",
            "short",
            "Seats: --max-num-seqs. Step tokens: --max-num-batched-tokens. KV blocks: memory.",
            (gauge("num_requests_waiting_by_limit"), "{{limit}} {{instance}}"),
        ),
        panel(
            "Preemptions per second",
            "short",
            "Sequences that lost their KV blocks: there is too little memory.",
            (rate("num_preemptions"), WHERE),
        ),
    ),
    "Latency": (
        panel("Time to first token", "s", "From arrival.", *quantiles("time_to_first_token_seconds")),
        panel("Time between tokens", "s", "Of a choice.", *quantiles("inter_token_latency_seconds")),
        panel("Whole request", "s", "From arrival to end.", *quantiles("e2e_request_latency_seconds")),
        panel("Queue", "s", "From arrival to the first step.", *quantiles("request_queue_time_seconds")),
        panel("Prompt tokens", "short", "Of a request.", *quantiles("request_prompt_tokens")),
        panel("Output tokens", "short", "Of a request.", *quantiles("request_generation_tokens")),
    ),
    "Answers": (
        panel(
            "Ended choices per second",
            "short",
            "By the reason of their end.",
            (rate("request_success", "finished_reason"), "{{finished_reason}} {{instance}}"),
        ),
        panel(
            "Refused per second",
            "short",
            "Since the queue was full.",
            (rate("admission_rejections", "reason"), "{{reason}} {{instance}}"),
        ),
        panel(
            "HTTP requests per second",
            "short",
            "By status.",
            (
                f"sum by (instance, status) (rate(http_requests_total{{{HERE}}}[$__rate_interval]))",
                "{{status}} {{instance}}",
            ),
        ),
    ),
    "Engine": (
        panel(
            "Prefix cache hits",
            "percentunit",
            "Of the prompt tokens that were looked up.",
            (ratio("prefix_cache_hits", "prefix_cache_queries"), WHERE),
            most=1,
        ),
        panel("Tokens of a step", "short", "Mean.", (ratio("engine_step_tokens", "engine_steps"), WHERE)),
        panel(
            "Host time that delays a step",
            "s",
            "Mean time for which a GPU waits for the host.",
            (ratio("engine_exposed_host_seconds", "engine_steps"), WHERE),
        ),
        panel(
            "Accepted drafts",
            "percentunit",
            "Of an engine with speculative decoding.",
            (ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"), WHERE),
            most=1,
        ),
        panel(
            "Memory of processes",
            "bytes",
            "Resident: of the server, and of the engine.",
            (f"process_resident_memory_bytes{{{HERE}}}", "server {{instance}}"),
            (f"octavo_engine_process_resident_memory_bytes{{{HERE}}}", "engine {{instance}}"),
        ),
        panel(
            "Processor time",
            "short",
            "Cores in use by the server, and by the engine.",
            (f"rate(process_cpu_seconds_total{{{HERE}}}[$__rate_interval])", "server {{instance}}"),
            (f"rate(octavo_engine_process_cpu_seconds_total{{{HERE}}}[$__rate_interval])", "engine {{instance}}"),
        ),
    ),
    "GPUs": (
        panel("Utilization", "percentunit", "Time in which a kernel ran.", (gauge("gpu_utilization"), GPU), most=1),
        panel(
            "Memory in use",
            "percentunit",
            "By all processes.",
            (f"{gauge('gpu_memory_used_bytes')} / {gauge('gpu_memory_total_bytes')}", GPU),
            most=1,
        ),
        panel("Power", "watt", "Drawn.", (gauge("gpu_power_watts"), GPU)),
        panel("Temperature", "celsius", "Of the core.", (gauge("gpu_temperature_celsius"), GPU)),
        panel("Clock", "hertz", "Of the multiprocessors.", (gauge("gpu_sm_clock_hertz"), GPU)),
        panel(
            "Slowed",
            "short",
            "1 while clocks are lowered for this reason; power_cap is usual under load.",
            (gauge("gpu_slowed"), f"{{{{reason}}}} {GPU}"),
            most=1,
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        y += 1
        for number, one in enumerate(row):
            x, down = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
            panels.append(graph(one, len(panels) + 1, x, y + down))
        y += -(-len(row) // COLUMNS) * HEIGHT
    return {
        "uid": "octavo",
        "title": "Octavo",
        "tags": ["octavo"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables()},
        "panels": panels,
    }


def variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        variable("model", "model_name"),
        variable("instance", "instance"),
    ]


def variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(octavo:num_requests_running, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def graph(one: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    bounds = {"min": 0} if one.most is None else {"min": 0, "max": one.most}
    return {
        "id": number,
        "type": "timeseries",
        "title": one.title,
        "description": one.about,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": one.unit, **bounds}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, "legendFormat": name}
            for place, (query, name) in enumerate(one.queries)
        ],
    }


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DASHBOARD
    path.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
