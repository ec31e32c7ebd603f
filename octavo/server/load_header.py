"""The engine's load in a response header, for load balancers: Open Request Cost Aggregation (ORCA)."""

from __future__ import annotations

import json

from octavo.core.stats import EngineStats

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"


def load_header(form: str, stats: EngineStats) -> str | None:
    """Return the header's value in the requested format, "TEXT" or "JSON"; None for any other."""
    named = {"kv_cache_usage_perc": round(stats.kv_usage, 6), "num_requests_waiting": stats.num_waiting}
    match form.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": named})
    return None
