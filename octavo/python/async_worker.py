"""What `AsyncLLM` can do to what runs its model: give it other weights, and profile it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.pausing import PauseMode
from octavo.engine.client import CoreClient
from octavo.engine.rpc import Calls, bound
from octavo.python.worker import check_transfer


class AsyncWorkerMethods(ABC):
    """The part of `AsyncLLM` for trainers and research."""

    @property
    @abstractmethod
    def _client(self) -> CoreClient: ...

    @abstractmethod
    async def _started(self) -> None: ...

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
    ) -> None:
        """Go on with the weights of another checkpoint of the same model. They are read beside those in use, while
        requests run; then these stand still for a moment. A pause that there is goes on.

        Args:
            model_path: a folder or a .gguf file. Its tokenizer and its settings are not read.
            load_format: as the setting of this name; by default it goes by the files.
            flush_cache: forget what was computed with the old weights; what runs computes its tokens so far again.
            weight_version: what the weights are called, in `stats()`.
            abort_all_requests: end what runs, instead of letting it go on with the new weights.

        Raises:
            InvalidRequestError: the checkpoint can't be read, or is of another shape. The old weights stay.
            EngineStateError: the weights are asleep.
        """
        await self._started()
        mode = PauseMode.ABORT if abort_all_requests else PauseMode.KEEP
        await self._client.update_weights(
            model_path, load_format, mode=mode, flush_cache=flush_cache, version=weight_version
        )

    async def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Agree on how weights are sent: by files, for which `init_info` is empty."""
        check_transfer(request)

    async def start_weight_update(self) -> None:
        """Expect `update_weights`."""
        await self._started()
        await self._client.begin_weights()

    async def update_weights(self, request: Mapping[str, Any]) -> None:
        """Have the engine read some tensors: {"update_info": {"path": a safetensors file, or a folder with some}}.

        Raises:
            EngineStateError: `start_weight_update` was not called.
            InvalidRequestError: there are none.
        """
        await self._started()
        await self._client.receive_weights(request.get("update_info") or {})

    async def finish_weight_update(self, weight_version: str | None = None, *, flush_cache: bool = True) -> None:
        """Go on with the tensors that came, which must be all of the model. The arguments are those of
        `update_weights_from_disk`.

        Raises:
            InvalidRequestError: some are missing, or of another shape. The old weights stay; all must be sent again.
        """
        await self._started()
        await self._client.update_weights(received=True, flush_cache=flush_cache, version=weight_version)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of `octavo.engine.rpc.METHODS` in the engine's process; a list of the one result.

        Raises:
            InvalidRequestError: there is no method of this name, or it takes other arguments; functions are for `LLM`.
            TimeoutError: it took longer than `timeout` seconds.
        """
        await self._started()
        async with asyncio.timeout(timeout):
            return [await bound(Calls(self._client), method, args, kwargs or {})]

    async def get_weight_version(self) -> str:
        """What the weights in use are called."""
        await self._started()
        return self._client.stats().weight_version

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Note what each step does, until `stop_profile`, or until the profile is as long as it may be.

        Args:
            profile_prefix: how the name of the trace's file begins.

        Raises:
            EngineStateError: the engine was not started with `profiler_config`, or a profile is being made.
        """
        await self._started()
        await self._client.start_profile(profile_prefix or "")

    async def stop_profile(self) -> str:
        """End the profile; the path of its trace, or nothing if there was none."""
        await self._started()
        return await self._client.stop_profile()
