"""Worker control in `AsyncLLM`: weight updates and profiling."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.pausing import PauseMode
from octavo.engine.protocol import EngineClient
from octavo.python_api.worker import check_transfer
from octavo.server.rpc import CoreCalls, bound


class AsyncWorkerMethods(ABC):
    """The methods of `AsyncLLM` for trainers and research."""

    @property
    @abstractmethod
    def _client(self) -> EngineClient: ...

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
        """Load the weights of another checkpoint of the same model and continue with them.

        The checkpoint is read while requests run on the old weights; they stop only for the swap. An active pause stays
        active.

        Args:
            model_path: a folder or a .gguf file. Its tokenizer and settings are not read.
            load_format: like the setting of this name; by default derived from the files.
            flush_cache: drop the KV cache of the old weights; running requests recompute their tokens.
            weight_version: name of the new weights, in `stats()`.
            abort_all_requests: abort running requests instead of continuing them with the new weights.

        Raises:
            InvalidRequestError: the checkpoint can't be read, or has other shapes. The old weights stay.
            EngineStateError: the weights are asleep.
        """
        await self._started()
        mode = PauseMode.ABORT if abort_all_requests else PauseMode.KEEP
        await self._client.update_weights(
            model_path, load_format, mode=mode, flush_cache=flush_cache, version=weight_version
        )

    async def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Select how weights are sent: by files, for which `init_info` is empty."""
        check_transfer(request)

    async def start_weight_update(self) -> None:
        """Begin a weight update; `update_weights` calls follow."""
        await self._started()
        await self._client.begin_weights()

    async def update_weights(self, request: Mapping[str, Any]) -> None:
        """Read some tensors: {"update_info": {"path": a safetensors file, or a folder of them}}.

        Raises:
            EngineStateError: `start_weight_update` was not called.
            InvalidRequestError: the path holds no tensors.
        """
        await self._started()
        await self._client.receive_weights(request.get("update_info") or {})

    async def finish_weight_update(self, weight_version: str | None = None, *, flush_cache: bool = True) -> None:
        """Switch to the received tensors, which must be all of the model's.

        The arguments are those of `update_weights_from_disk`.

        Raises:
            InvalidRequestError: some are missing, or have other shapes. The old weights stay; all must be sent again.
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
        """Call a method of `octavo.server.rpc.METHODS` in the engine's process. Return a list with its one result.

        Raises:
            InvalidRequestError: there is no such method, or it takes other arguments; only `LLM` takes functions.
            TimeoutError: no result within `timeout` seconds.
        """
        await self._started()
        async with asyncio.timeout(timeout):
            return [await bound(CoreCalls(self._client), method, args, kwargs or {})]

    async def get_weight_version(self) -> str:
        """Return the name of the current weights."""
        await self._started()
        return self._client.stats().weight_version

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record every step until `stop_profile`, or until the profile's maximum length.

        Args:
            profile_prefix: prefix of the trace's file name.

        Raises:
            EngineStateError: the engine was started without `profiler_config`, or a profile is running.
        """
        await self._started()
        await self._client.start_profile(profile_prefix or "")

    async def stop_profile(self) -> str:
        """End the profile. Return the path of its trace, or an empty text if there was none."""
        await self._started()
        return await self._client.stop_profile()
