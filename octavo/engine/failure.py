"""`Failure`: an exception, encoded for another process."""

from __future__ import annotations

import msgspec

from octavo.core import errors
from octavo.core.errors import EngineDeadError, InvalidRequestError, OctavoError


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """
    Attributes:
        kind: name of the error's class, in `core.errors` or, for a bug, elsewhere.
        message: its text; for a bug, it begins with the class.
        param: the field at fault, if any.
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
        """Rebuild the error if its class is one of `core.errors`; return None otherwise."""
        cls = getattr(errors, self.kind, None)
        if isinstance(cls, type) and issubclass(cls, InvalidRequestError):
            return cls(self.message, param=self.param)
        if isinstance(cls, type) and issubclass(cls, OctavoError):
            error = cls.__new__(cls)
            Exception.__init__(error, self.message)
            return error
        return None

    def error(self, failed: str) -> OctavoError:
        """Rebuild the error; for a bug, return an EngineDeadError whose text begins "The engine core" and `failed`."""
        return self.known() or EngineDeadError(f"The engine core {failed}: {self.message}")
