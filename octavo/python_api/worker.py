"""Worker control in `LLM`: weight updates and profiling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from octavo.core.errors import UnsupportedError
from octavo.core.pausing import PauseMode
from octavo.python_api.inputs import refuse
from octavo.python_api.loop import SharedLoop
from octavo.server.rpc import bound, check_format


class WorkerMethods(ABC):
    """The methods of `LLM` for trainers and research."""

    @property
    @abstractmethod
    def _core(self) -> SharedLoop: ...

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
    ) -> None:
        """Load the weights of another checkpoint of the same model and continue with them.

        Args:
            model_path: a folder or a .gguf file. Its tokenizer and settings are not read.
            load_format: like the setting of this name; by default derived from the files.
            flush_cache: drop the KV cache of the old weights; open streams recompute their tokens.
            weight_version: name of the new weights, in `stats()`.
            abort_all_requests: abort open streams instead of continuing them with the new weights.

        Raises:
            InvalidRequestError: the checkpoint can't be read, or has other shapes. The old weights stay.
            EngineStateError: the weights are asleep.
        """
        mode = PauseMode.ABORT if abort_all_requests else PauseMode.KEEP
        self._core.update_weights(
            lambda worker: worker.stage_weights(model_path, load_format), mode, weight_version, flush_cache=flush_cache
        )

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Select how weights are sent: by files, for which `init_info` is empty."""
        check_transfer(request)

    def start_weight_update(self) -> None:
        """Begin a weight update; `update_weights` calls follow."""
        self._core.loop.check_weights().begin_weights()

    def update_weights(self, request: Mapping[str, Any]) -> None:
        """Read some tensors.

        Args:
            request: {"update_info": {"path": a safetensors file, or a folder of them}}, or, for tensors of this
                process, {"update_info": {"tensors": pairs of name and tensor}}.

        Raises:
            EngineStateError: `start_weight_update` was not called.
            InvalidRequestError: there are no tensors.
        """
        info = request.get("update_info") or {}
        worker = self._core.loop.check_weights()
        if "tensors" in info:
            worker.take_weights(info["tensors"])
        else:
            worker.receive_weights(info)

    def finish_weight_update(self, weight_version: str | None = None, *, flush_cache: bool = True) -> None:
        """Switch to the received tensors, which must be all of the model's.

        The arguments are those of `update_weights_from_disk`.

        Raises:
            InvalidRequestError: some are missing, or have other shapes. The old weights stay; all must be sent again.
        """
        self._core.update_weights(
            lambda worker: worker.stage_received(), PauseMode.KEEP, weight_version, flush_cache=flush_cache
        )

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function or method in the model's process, which is this one. Return a list with its one result.

        Args:
            method: a function, which gets the worker (`octavo.worker.worker.Worker`, or an encoder's) and then the
                arguments; or a name of `octavo.server.rpc.METHODS`.
            timeout: None; the call blocks until it is done.

        Raises:
            InvalidRequestError: there is no such method, or it takes other arguments.
        """
        refuse(timeout=timeout)
        if callable(method):
            return self._core.loop.worker.call(method, *args, **(kwargs or {}))
        return [bound(_LocalCalls(self, self._core), method, args, kwargs or {})]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model. Return a list with its one result.

        The function may read and change layers and weights. On a CPU the model is usually a `NativeDecoder`, whose
        weights are packed for its kernels. With `attention_backend="torch"`, and on GPUs, it consists of `torch.nn`
        modules.
        """
        return self.collective_rpc(lambda worker: func(worker.model))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record every step until `stop_profile`, or until the profile's maximum length.

        Args:
            profile_prefix: prefix of the trace's file name.

        Raises:
            EngineStateError: the LLM was created without `profiler_config`, or a profile is running.
        """
        self._core.loop.start_profile(profile_prefix or "")

    def stop_profile(self) -> str:
        """End the profile. Return the path of its trace, or an empty text if there was none."""
        return self._core.loop.stop_profile()


class _LocalCalls:
    """The methods of `octavo.server.rpc` in this process."""

    def __init__(self, llm: WorkerMethods, core: SharedLoop) -> None:
        self._llm = llm
        self._core = core

    def check_health(self) -> None:
        """Do nothing: an engine in this process is healthy if it can be called."""

    def get_weight_version(self) -> str:
        return self._core.stats().weight_version

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        if not is_start:
            return self._llm.stop_profile()
        self._llm.start_profile(profile_prefix)
        return None

    def reload_weights(
        self,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
        weight_version: str | None = None,
        weights_iterator: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        check_format(is_checkpoint_format)
        if weights_iterator is None:
            self._core.update_weights(lambda worker: worker.stage_weights(weights_path, None), version=weight_version)
            return
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"tensors": weights_iterator}})
        self._llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> None:
        self._core.loop.reset_prefix_cache()


def check_transfer(request: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless weights are to be sent by files."""
    if request.get("init_info"):
        raise UnsupportedError(
            "init_info must be empty: weights are read from files. Give their paths to update_weights.",
            param="init_info",
        )
