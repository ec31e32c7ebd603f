"""The text half: adapters as models that requests name, and several of them with weights in one request."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, ModelFileError, UnsupportedError
from octavo.core.params import SamplingParams
from octavo.core.stats import EngineStats
from octavo.engine.protocol import EngineClient
from octavo.features.lora.api import AdapterIds, LoRARequest, requested, selected
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import CHANGES, Adapter, LoraInfo, Part, Selection, encode, selection_of
from octavo.text.hooks import AddedModel, ReadArgument, TextContext, TextHook


class LoraText(TextHook):
    """Claims `loras`, and the names that other servers have for it."""

    name = NAME
    body_fields = ("loras", "lora_request", "lora_path")
    arguments = ("lora_request",)

    def __init__(self, context: TextContext) -> None:
        super().__init__(context)
        self.ids = AdapterIds()
        self._found: dict[str, AddedModel] = {}
        self._changes = -1.0
        info = context.info.facts(NAME, LoraInfo)
        self._added = 0 if info is None else info.added_tokens

    @property
    def added_tokens(self) -> int:
        return self._added

    def start_rows(self) -> list[tuple[str, str]]:
        info = self.context.info.facts(NAME, LoraInfo)
        if info is None:
            return []
        known = f"{info.adapters} known" if info.adapters else "none known yet"
        most = f"at most {info.max_adapters} in memory at once, up to rank {info.max_rank}"
        return [("LoRA adapters", f"{known}; {most}")]

    async def models(self, engine: EngineClient) -> list[AddedModel]:
        if not self.present:
            return []
        listed = await engine.call(NAME, "list", {})
        return [_added(one) for one in msgspec.convert(listed["adapters"], list[Adapter])]

    def models_in(self, body: Any) -> list[str]:
        named = self._named(body)
        return [] if named is None or not self.present else [part.name for part in selection_of(*named)]

    async def find_model(self, engine: EngineClient, name: str) -> AddedModel | None:
        """Ask the engine core, unless it has answered since adapters last came or went."""
        if not self.present:
            return None
        changes = _changes(engine.stats())
        if changes != self._changes:
            self._found.clear()
            self._changes = changes
        elif name in self._found:
            return self._found[name]
        try:
            answer = await engine.call(NAME, "find", {"name": name})
        except ModelFileError as error:
            raise InvalidRequestError(str(error), param="model", value=name) from None
        found = msgspec.convert(answer["adapter"], Adapter | None)
        if found is None:
            return None
        if changes == self._changes:  # else it may be out of date already
            self._found[name] = _added(found)
        return _added(found)

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        named = self._named(body)
        if named is None:
            return {}
        value, field = named
        self.check_present(field, value)
        return {"feature_args": {NAME: selection_of(value, field)}}

    def _named(self, body: Any) -> tuple[Any, str] | None:
        """Return the field of a body that names adapters, if there is one, and its name."""
        given = {name: value for name in self.body_fields if (value := getattr(body, name, None))}
        if not given:
            return None
        field, value = next(iter(given.items()))
        if len(given) > 1:
            text = f"{' and '.join(given)} mean the same; leave one of them out."
            raise InvalidRequestError(text, param=field, value=value)
        return value, field

    def check_present(self, field: str, value: Any) -> None:
        """Raise UnsupportedError if the engine serves no adapters."""
        if not self.present:
            text = (
                "This engine serves no LoRA adapters: start it with enable_lora, or merge the adapter into the weights."
            )
            raise UnsupportedError(text, param=field, value=value)

    def to_load(self, request: LoRARequest) -> dict[str, Any]:
        """Return the arguments of the engine half's `load`.

        Raises:
            InvalidRequestError: it has no path, or another adapter has its number.
        """
        if not request.lora_path:
            text = "add_lora needs lora_path, the adapter's folder or file."
            raise InvalidRequestError(text, param="lora_path", value="")
        self.ids.check(request)
        return request.loading()

    def read_argument(self, name: str, value: Any, count: int) -> ReadArgument:
        """Read one for all prompts, or a list with one for each (None for the base model)."""
        if any(one is not None for one in (value if isinstance(value, list) else [value])):
            self.check_present(name, value)
        each = _one_each(value, count, name)
        found = [() if one is None else requested(one, name) for one in each]
        distinct = dict.fromkeys(one for several in found for one in several)
        for one in distinct:
            self.ids.note(one)
        calls = [("load", one.loading()) for one in distinct if one.lora_path]
        return ReadArgument(calls, [encode(selected(several, name)) if several else None for several in found])

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        given: Selection | None = (params.feature_args or {}).get(NAME)
        return None if given is None else encode(given)


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts.", param=name, value=len(value))
    return value


def _added(adapter: Adapter) -> AddedModel:
    return AddedModel(adapter.name, adapter.path, {NAME: encode((Part(adapter.name),))}, adapter.parent or None)


def _changes(stats: EngineStats) -> float:
    """Return how often adapters came or went, as far as this process has heard."""
    return next((one.values.get("", 0.0) for one in stats.features if one.name == CHANGES), 0.0)


TEXT = LoraText
