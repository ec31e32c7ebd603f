"""`PlanCodec`: steps as bytes (msgspec's MessagePack), for workers in other processes and for records of runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.core.plan import StepPlan

_encode = msgspec.msgpack.Encoder().encode
_decode_payload = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    """A plan without its payload, and the payload, with one encoded part per feature."""

    plan: StepPlan
    payload: dict[str, msgspec.Raw]


_decode_plan = msgspec.msgpack.Decoder(_Encoded).decode


class PlanCodec:
    """Encodes the arguments of `Executor.forward` and `Executor.sample`.

    Args:
        payloads: feature name -> the msgspec type of its payload. Payloads of other features are refused.
    """

    def __init__(self, payloads: Mapping[str, Any]) -> None:
        self._decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in payloads.items()}

    def encode_plan(self, plan: StepPlan) -> bytes:
        """Encode a plan with its payload. Raises TypeError if a feature's payload has no declared type."""
        self._check(plan.payload)
        bare = msgspec.structs.replace(plan, payload={}) if plan.payload else plan
        return _encode((bare, plan.payload))

    def decode_plan(self, data: bytes | memoryview) -> StepPlan:
        """Return an equal plan. Its memory views look into `data`. Raises msgspec.DecodeError."""
        found = _decode_plan(data)
        return msgspec.structs.replace(found.plan, payload=self._typed(found.payload)) if found.payload else found.plan

    def encode_payload(self, payload: Mapping[str, Any]) -> bytes:
        """Encode a payload. Raises TypeError if a feature's payload has no declared type."""
        self._check(payload)
        return _encode(payload)

    def decode_payload(self, data: bytes | memoryview) -> dict[str, Any]:
        """Return an equal payload. Raises msgspec.DecodeError."""
        return self._typed(_decode_payload(data))

    def _check(self, payload: Mapping[str, Any]) -> None:
        for name in payload:
            if name not in self._decoders:
                raise TypeError(f"feature {name!r} declares no type for its payload, so it can't leave the process")

    def _typed(self, encoded: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
        return {name: self._decoders[name].decode(part) for name, part in encoded.items()}
