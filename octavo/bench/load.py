"""Load generator: sends requests to a server in a given pattern and collects their timings."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from octavo.bench.client import Target, measure
from octavo.bench.samples import Sample
from octavo.bench.timing import Timing
from octavo.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPattern:
    """Schedule of the requests.

    Attributes:
        rate: mean requests per second; infinite sends all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less than 1 is burstier.
        max_concurrency: maximum requests in flight; None for no limit.
        times: seconds from the start at which each request is sent, instead of a rate; empty to use the rate.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    times: Sequence[float] = ()

    def delays(self, count: int, rng: random.Random) -> Iterator[float]:
        """Yield each request's delay from the start, in seconds."""
        if self.times:
            yield from self.times[:count]
            return
        at = 0.0
        for _ in range(count):
            yield at
            if self.rate != float("inf"):
                at += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))


async def run_load(
    target: Target,
    samples: Sequence[Sample],
    pattern: LoadPattern,
    *,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[list[Timing], float]:
    """Return all timings in the order of the samples, and the seconds from the first request to the last response."""
    gate = asyncio.Semaphore(pattern.max_concurrency or len(samples) or 1)
    delays = pattern.delays(len(samples), random.Random(seed))
    async with open_client(len(samples), transport) as client:
        start = time.perf_counter()

        async def one(sample: Sample, delay: float) -> Timing:
            await asyncio.sleep(max(0.0, start + delay - time.perf_counter()))
            async with gate:
                timing = await measure(client, target, sample)
            done()
            return timing

        timings = await asyncio.gather(*(one(s, d) for s, d in zip(samples, delays, strict=True)))
        return list(timings), time.perf_counter() - start


def open_client(connections: int, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return a client that neither times out on slow responses nor queues requests itself."""
    limits = httpx.Limits(max_connections=connections + 8, max_keepalive_connections=connections + 8)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30), limits=limits, transport=transport)


async def wait_ready(
    base_url: str,
    timeout: float,
    transport: httpx.AsyncBaseTransport | None = None,
    waiting: Callable[[str], None] | None = None,
) -> None:
    """Return once the server responds; call `waiting` with its address while it does not.

    Raises:
        ConfigError: no response within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    async with open_client(1, transport) as client:
        while True:
            try:
                await client.get(base_url + "/v1/models")
                return
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
                raise ConfigError(
                    f"--base-url {base_url} is not a URL: {exc} Give one such as http://127.0.0.1:8000."
                ) from exc
            except httpx.TransportError:
                if waiting is not None:
                    waiting(base_url)
                    waiting = None
            if time.monotonic() >= deadline:
                raise ConfigError(f"no server answers at {base_url}; start one (octavo serve) or give --base-url")
            await asyncio.sleep(0.5)


async def profile(
    base_url: str, headers: Mapping[str, str], verb: str, transport: httpx.AsyncBaseTransport | None = None
) -> dict[str, Any]:
    """Post to /start_profile or /stop_profile. Return the response if that is a JSON object, else {}.

    Raises:
        ConfigError: the server refused.
    """
    async with open_client(1, transport) as client:
        response = await client.post(f"{base_url}/{verb}_profile", headers=headers)
    if response.status_code != 200:
        raise ConfigError(
            f"{base_url}/{verb}_profile: HTTP {response.status_code}; start the server with --profiler-config, or "
            "leave --profile out"
        )
    try:
        answer = response.json()
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {}


async def first_model(
    base_url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport | None = None
) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        ConfigError: the server lists no model.
    """
    async with open_client(1, transport) as client:
        response = await client.get(base_url + "/v1/models", headers=headers)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        remedy = "--api-key" if response.status_code == HTTPStatus.UNAUTHORIZED else "--model"
        told = f"HTTP {response.status_code}"
        raise ConfigError(f"{base_url}/v1/models ({told}) lists no model; give {remedy}") from error
