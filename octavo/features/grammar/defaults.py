"""`StructuredDefaults`: the operator's settings for all structured output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.structured import StructuredOutputsParams

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "backend": ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "disable_fallback": (True, False),
    "reasoning_parser": ("",),
    "enable_in_reasoning": (False,),
}
"""Fields of other engines with the values that change nothing here: all backends define the same constraint."""


class StructuredDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Restrictions on the JSON of every structured output; a request may add restrictions, not lift them.

    Attributes:
        disable_any_whitespace: as in `StructuredOutputsParams`, where a request gives no pattern of its own.
        disable_additional_properties: likewise.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> StructuredDefaults:
        """Parse the setting `structured_outputs_config`.

        Raises:
            ConfigError: an unknown field or an invalid value; the text names it.
        """
        chosen: dict[str, bool] = {}
        for name, value in config.items():
            if name in cls.__struct_fields__:
                if not isinstance(value, bool):
                    raise ConfigError(f"--structured-outputs-config {name}: {value!r} must be true or false.")
                chosen[name] = value
            elif name not in _NEUTRAL:
                known = ", ".join((*cls.__struct_fields__, *_NEUTRAL))
                raise ConfigError(f"--structured-outputs-config {name}: there is no such field; those are {known}.")
            elif value not in _NEUTRAL[name]:
                words = " or ".join(map(repr, _NEUTRAL[name]))
                raise ConfigError(f"--structured-outputs-config {name}: {value!r} is not supported; it may be {words}.")
        return cls(**chosen)

    def applied(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return a request's constraint with these defaults applied."""
        return msgspec.structs.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace
            or (self.disable_any_whitespace and params.whitespace_pattern is None),
            disable_additional_properties=params.disable_additional_properties or self.disable_additional_properties,
        )


NO_DEFAULTS = StructuredDefaults()
