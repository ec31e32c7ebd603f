"""`Failure`: an exception as it travels between processes."""

from __future__ import annotations

import msgspec

from octavo.core import errors
from octavo.core.errors import EngineDeadError, InvalidRequestError, OctavoError


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """
    Attributes:
        kind: the error's class in `core.errors`, or another name for a bug.
        message: its text, for a bug with its class.
        param: the field at fault, if one is.
    """

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error).__name__
        if isinstance(error, InvalidRequestError):
            return cls(kind, error.message, error.param)
        return cls(kind, str(error) if isinstance(error, OctavoError) else f"{kind}: {error}")

    def known(self) -> OctavoError | None:
        """Return the error again if its class is one of `core.errors`, else None."""
        cls = getattr(errors, self.kind, None)
        if isinstance(cls, type) and issubclass(cls, InvalidRequestError):
            return cls(self.message, param=self.param)
        if isinstance(cls, type) and issubclass(cls, OctavoError):
            error = cls.__new__(cls)
            Exception.__init__(error, self.message)
            return error
        return None

    def error(self, failed: str) -> OctavoError:
        """Return the error again, or for a bug an EngineDeadError that says what `failed`."""
        return self.known() or EngineDeadError(f"The engine core {failed}: {self.message}")
