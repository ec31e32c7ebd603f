"""`AsyncPoolingMethods`: `AsyncLLM.encode`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from octavo.engine.protocol import EngineClient
from octavo.features.pooling.params import PoolingOutput, PoolingRequestOutput, Task
from octavo.features.pooling.payload import NAME
from octavo.features.pooling.requests import pool
from octavo.features.pooling.text import PoolingText
from octavo.text.frontend import Frontend
from octavo.text.prompts.prompt import Prompt


class AsyncPoolingMethods(ABC):
    """Mixin of `AsyncLLM`."""

    @property
    @abstractmethod
    def _client(self) -> EngineClient: ...

    @property
    @abstractmethod
    def frontend(self) -> Frontend: ...

    @abstractmethod
    async def _started(self) -> None: ...

    @abstractmethod
    async def _feature_options(self, **given: Any) -> dict[str, msgspec.Raw]: ...

    async def encode(
        self,
        prompt: Prompt,
        *,
        pooling_task: Task = "embed",
        dimensions: int | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        lora_request: Any = None,
        **options: Any,
    ) -> PoolingRequestOutput:
        """Return the task's result for a prompt, in `outputs.data`: one vector, or one for each token ("token_embed").

        Cancellation aborts the request. `options` are those of `PoolingPreparer.prepare`.

        Raises:
            InvalidRequestError: the prompt can't be served, or the model does not support the task.
            EngineDeadError: the engine has stopped.
        """
        await self._started()
        options["options"] = await self._feature_options(lora_request=None if lora_request is None else [lora_request])
        hook = self.frontend.preparer.hook(NAME)
        assert isinstance(hook, PoolingText)
        pooling = hook.preparer
        params = pooling.params(pooling_task, dimensions=dimensions, normalize=normalize)
        request = pooling.prepare(prompt, params, request_id=request_id, **{"param": "prompt", **options})
        found = await pool(self._client, request)
        data = found.pooled.rows() if pooling_task == "token_embed" else found.pooled.values()
        return PoolingRequestOutput(request.id, PoolingOutput(data), request.tokens, found.num_cached_tokens)


METHODS = AsyncPoolingMethods
