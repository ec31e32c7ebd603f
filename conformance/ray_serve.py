"""Octavo's engines as replicas of Ray Serve, which balances requests over them and starts them again.

    pip install "octavo[ray]" "ray[serve]"
    OCTAVO_MODEL=smollm2 serve run conformance.ray_serve:app    # in the repository
    curl -d '{"prompt": "The capital of France is"}' http://127.0.0.1:8000/

A replica's engine has a process of its own; `ray_actor_options` and `num_replicas` say what each needs, and how many
there are. Ray Serve knows nothing of prefixes: `--data-parallel-size` sends requests with a common beginning to one
replica.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from starlette.requests import Request

from octavo import AsyncLLM, SamplingParams

SETTINGS: dict[str, Any] = {"model": os.environ.get("OCTAVO_MODEL", "smollm2")}


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1})  # on GPUs: {"num_gpus": 1}
class Engine:
    """One replica."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._llm: AsyncLLM | None = None

    async def check_health(self) -> None:
        """Start the engine at the first call; fail once it is dead, so that Ray starts another replica."""
        if self._llm is None:
            self._llm = await AsyncLLM.start(**self._settings)
        await self._llm.check_health()

    async def __call__(self, request: Request) -> dict[str, Any]:
        await self.check_health()
        assert self._llm is not None
        body = await request.json()
        params = SamplingParams(max_tokens=body.get("max_tokens", 16), temperature=body.get("temperature", 0.0))
        outputs = [output async for output in self._llm.generate(body["prompt"], params)]
        return {"text": outputs[-1].outputs[0].text, "replica": os.getpid()}


app = Engine.bind(SETTINGS)
