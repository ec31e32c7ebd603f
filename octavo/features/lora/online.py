"""`AsyncLoraMethods`: the methods of `AsyncLLM` that load and unload adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from octavo.engine.protocol import EngineClient
from octavo.features.lora.api import LoRARequest
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Adapter
from octavo.features.lora.text import LoraText
from octavo.text.frontend import Frontend


class AsyncLoraMethods(ABC):
    """Mixin of `AsyncLLM`. As the methods of `LLM` of these names; requests continue meanwhile."""

    @property
    @abstractmethod
    def _client(self) -> EngineClient: ...

    @property
    @abstractmethod
    def frontend(self) -> Frontend: ...

    @abstractmethod
    async def _started(self) -> None: ...

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; return True once requests can name it."""
        hook = await self._adapters(lora_request)
        await self._client.call(NAME, "load", hook.to_load(lora_request))
        hook.ids.note(lora_request)
        return True

    async def remove_lora(self, lora_id: int | str | LoRARequest) -> bool:
        """Unload an adapter, after its running requests; return True."""
        ids = (await self._adapters(lora_id)).ids
        name = ids.name_of(lora_id)
        try:
            await self._client.call(NAME, "unload", {"name": name})
        finally:  # also if its files could not be used
            ids.forget(name)
        return True

    async def list_loras(self) -> set[int]:
        """Return the adapters' numbers: those chosen when they were loaded, and generated ones."""
        hook = await self._adapters(None)
        return hook.ids.numbers([one.name for one in await self.get_loras()])

    async def get_loras(self) -> list[Adapter]:
        """Return the adapters, with their names, paths and ranks, and where their weights are."""
        await self._adapters(None)
        return msgspec.convert((await self._client.call(NAME, "list", {}))["adapters"], list[Adapter])

    async def pin_lora(self, lora_id: int | str | LoRARequest) -> bool:
        """Keep an adapter in the device's memory until it is removed; return True."""
        name = (await self._adapters(lora_id)).ids.name_of(lora_id)
        await self._client.call(NAME, "pin", {"name": name, "pinned": True})
        return True

    async def _adapters(self, given: Any) -> LoraText:
        """Return the text half. Raises UnsupportedError if the engine serves no adapters."""
        await self._started()
        hook = self.frontend.preparer.hook(NAME)
        assert isinstance(hook, LoraText)
        hook.check_present("lora_request", given)
        return hook


METHODS = AsyncLoraMethods
