"""`LoRARequest`: an adapter, as the Python API names it. The names and their order are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.features.lora.requests import Selection, selection_of


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, loaded at its first use.

    Attributes:
        lora_name: its name, also as the model of HTTP requests.
        lora_int_id: a number of your choice, at least 1, for `remove_lora` and `pin_lora`; None for a generated one.
        lora_path: its folder or file; "" if the engine knows the name already.
        base_model_name: without effect; accepted as vLLM does.
        load_inplace: read the files again and replace the adapter of this name.
        weight: factor of its addition to the model's products.
    """

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidRequestError("lora_name must be a name.", param="lora_name", value=self.lora_name)
        if self.lora_int_id is not None and (type(self.lora_int_id) is not int or self.lora_int_id < 1):
            text = "lora_int_id must be a whole number of at least 1."
            raise InvalidRequestError(text, param="lora_int_id", value=self.lora_int_id)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int | None:
        return self.lora_int_id

    def loading(self) -> dict[str, Any]:
        """Return the arguments of the engine half's `load`."""
        return {
            "name": self.lora_name,
            "path": str(self.lora_path),
            "in_place": self.load_inplace,
            "again": not self.load_inplace,
        }


class AdapterIds:
    """Numbers of adapters, which only the Python API has."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def check(self, request: LoRARequest) -> None:
        """Raise InvalidRequestError if another adapter has the number that the caller has chosen."""
        number = request.lora_int_id
        other = request.lora_name if number is None else self._names.get(number, request.lora_name)
        if other != request.lora_name:
            text = f"lora_int_id {number} is the adapter {other!r}; choose another number, or remove that adapter."
            raise InvalidRequestError(text, param="lora_int_id", value=number)

    def note(self, request: LoRARequest) -> None:
        """Remember the number that the caller has chosen. Raises as `check`."""
        self.check(request)
        if request.lora_int_id is not None:
            self._names[request.lora_int_id] = request.lora_name

    def forget(self, name: str) -> None:
        """Free the number of an adapter that was removed."""
        self._names = {number: one for number, one in self._names.items() if one != name}

    def numbers(self, names: Sequence[str]) -> set[int]:
        """Return the number of each adapter; those without one get the next free number. Forget all others."""
        known = {name: number for number, name in self._names.items()}
        free = iter(number for number in range(1, 1 + len(names) + max(self._names, default=0)))
        chosen: dict[int, str] = {}
        for name in names:
            number = known.get(name) or next(one for one in free if one not in self._names)
            chosen[number] = name
        self._names = chosen
        return set(chosen)

    def name_of(self, given: int | str | LoRARequest) -> str:
        """Return the name of an adapter that is given by its number, by its name or as it was loaded.

        Raises:
            InvalidRequestError: no adapter has this number.
        """
        if isinstance(given, LoRARequest):
            return given.lora_name
        if isinstance(given, str):
            return given
        if given not in self._names:
            text = "No adapter has this number; list_loras() returns those there are."
            raise InvalidRequestError(text, param="lora_id", value=given)
        return self._names[given]


def requested(value: Any, param: str) -> tuple[LoRARequest, ...]:
    """Return one prompt's adapters: an adapter or its name, or a list of these, whose additions are summed.

    Raises:
        InvalidRequestError: a value has another form.
    """
    several = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, LoRARequest | str) for one in several):
        text = f"{param} must be a LoRARequest or an adapter's name: one for all prompts, or a list with one for each."
        raise InvalidRequestError(text, param=param, value=value)
    return tuple(one if isinstance(one, LoRARequest) else LoRARequest(one) for one in several)


def selected(requests: Sequence[LoRARequest], param: str) -> Selection:
    """Return the option for these adapters. Raises InvalidRequestError, as `selection_of` does."""
    given = [{"name": one.lora_name, "weight": one.weight} for one in requests]
    return selection_of(given, param)
