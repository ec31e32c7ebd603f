"""`LoraMethods`: the methods of `LLM` that load and unload adapters."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.features.lora.api import LoRARequest
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Adapter
from octavo.features.lora.text import LoraText
from octavo.python_api.local import LocalEngine


class LoraMethods:
    """Mixin of `LLM`. Adapters are given by number, by name, or as they were loaded."""

    _engine: LocalEngine

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; return True. `generate` does the same at an adapter's first use.

        Raises:
            ModelFileError, ModelNotFoundError: its files can't be used, or are not there.
            InvalidRequestError: another adapter has this name or number.
        """
        hook = self._adapters(lora_request)
        self._engine.core.call(NAME, "load", hook.to_load(lora_request))
        hook.ids.note(lora_request)
        return True

    def remove_lora(self, lora_id: int | str | LoRARequest) -> bool:
        """Unload an adapter, after its running requests; return True. Raises ModelNotFoundError if it is not there."""
        ids = self._adapters(lora_id).ids
        name = ids.name_of(lora_id)
        try:
            self._engine.core.call(NAME, "unload", {"name": name})
        finally:  # also if its files could not be used
            ids.forget(name)
        return True

    def list_loras(self) -> set[int]:
        """Return the adapters' numbers: those chosen when they were loaded, and generated ones."""
        return self._adapters(None).ids.numbers([one.name for one in self.get_loras()])

    def get_loras(self) -> list[Adapter]:
        """Return the adapters, with their names, paths and ranks, and where their weights are."""
        self._adapters(None)
        return msgspec.convert(self._engine.core.call(NAME, "list", {})["adapters"], list[Adapter])

    def pin_lora(self, lora_id: int | str | LoRARequest) -> bool:
        """Keep an adapter in the device's memory until it is removed; return True."""
        name = self._adapters(lora_id).ids.name_of(lora_id)
        self._engine.core.call(NAME, "pin", {"name": name, "pinned": True})
        return True

    def _adapters(self, given: Any) -> LoraText:
        """Return the text half. Raises UnsupportedError if the engine serves no adapters."""
        hook = self._engine.hook(NAME)
        assert isinstance(hook, LoraText)
        hook.check_present("lora_request", given)
        return hook


METHODS = LoraMethods
