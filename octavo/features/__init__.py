"""The table of features: optional capabilities, each a folder here.

A feature's parts are modules of its folder. Each is optional, and imported only where it is needed:

- `engine.py` has `build_engine(context) -> EngineHook | None`. It needs no torch.
- `worker.py` has `build_worker(context) -> WorkerHook | None`. It may run in another process, with a context of the
  same settings.
- `payload.py` has `NAME`, the feature's key in requests' options and plans, and `PAYLOAD`, the msgspec type of the
  data that the engine half sends to the worker half with a step. It needs no torch.
- `text.py` has `TEXT`, a subclass of `TextHook`: the half in front ends. It needs no torch.
- `estimate.py` has `estimate(context, planned, limits) -> Needs | None` (`worker/planned.py`): what the worker half
  will take, before anything is loaded; and `FLAGS`, the names of its flags that decide it.
- `settings.py` has `SETTINGS`, a dataclass derived from `FeatureSettings`; its fields carry their flags.
- `http.py` has `routes(ctx)`, `BODIES` and `limits(ctx)`: the feature's routes. `invocations(ctx)`, if there is one,
  returns which bodies of `/invocations` they answer.
- `models.py` has `implementation(config, files) -> Implementation | None`, which builds models in another way than by
  Octavo's own layers.
- `cli.py` has a command of `octavo`: `NAME`, `ABOUT` (a line of help) and `run(argv) -> int`. It imports
  nothing heavy until it runs, since `octavo --help` reads it.
- `doctor.py` has `AREA`: checks of `octavo doctor`.
- `offline.py` and `online.py` have `METHODS`, a mixin of `LLM` and `AsyncLLM`.

Without a folder the engine lacks that feature and works otherwise. Requests that use it are refused by name
(`ModelInfo.features`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.hub.files import ModelFiles
    from octavo.models.implementation import Implementation
    from octavo.schedule.hooks import EngineHook
    from octavo.text.tokenizers.tokenizer import Tokenizer
    from octavo.worker.hooks import WorkerHook

FEATURES = (
    "beams",
    "bridge",
    "grammar",
    "host_cache",
    "kv_transfer",
    "logits_processors",
    "lora",
    "media",
    "pooling",
    "prompt_embeds",
    "speculation",
    "thinking",
    "timeline",
    "traffic",
)

S = TypeVar("S", bound="FeatureSettings")


class FeatureSettings:
    """Base of the settings that a feature declares: a frozen dataclass, each field with a default.

    The fields are keywords of `LLM`, so their names must be unique among all settings.
    """

    def check_sendable(self, why: str) -> None:
        """Raise ConfigError with the text `why` if a value cannot be written to a file or sent to another process."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of models that the settings add to the served one."""
        return ()

    def check_recordable(self) -> None:
        """Raise ConfigError if steps with these settings can't be computed again from a record."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class FeatureContext:
    """The engine's data for its features.

    Attributes:
        vocab_size: columns of the logits.
        eos_token_ids: tokens that end a sequence.
        load_tokenizer: returns the model's tokenizer; callable from any thread, expensive the first time.
        generates: whether the engine generates text; False if it only makes vectors.
        whole_prompts: each prompt is computed in one step.
        shares_prefixes: requests share the KV cache of common prefixes.
        device: the logits' device, as torch names it.
        model: path of the model's folder or file.
        files: the model's files; None in tests that have none.
        hidden_size: elements of a hidden state.
        num_labels: outputs of the model's classification head; 0 without one.
        summary: the token whose hidden state represents a prompt, unless the checkpoint states it.
        max_num_seqs: upper bound on the rows of logits in one step.
        download_dir: folder for downloaded models; None for the usual caches.
        settings: feature name -> its settings, for the features that declare some.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    load_tokenizer: Callable[[], Tokenizer]
    generates: bool = True
    whole_prompts: bool = False
    shares_prefixes: bool = True
    device: str = "cpu"
    model: str = ""
    files: ModelFiles | None = None
    hidden_size: int = 0
    num_labels: int = 0
    summary: Literal["mean", "cls", "last"] = "last"
    max_num_seqs: int = 0
    download_dir: str | None = None
    settings: Mapping[str, FeatureSettings] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The model as the user named it, for errors."""
        return self.files.name if self.files else self.model

    def settings_of(self, kind: type[S]) -> S:
        """Return the settings of this class; the defaults if none were given."""
        return next((one for one in self.settings.values() if isinstance(one, kind)), None) or kind()


def build_engine_halves(context: FeatureContext) -> list[EngineHook]:
    """Return the engine halves of all installed features that are active for this model.

    Raises:
        ConfigError: a feature's settings can't be used with the model.
    """
    built = (module.build_engine(context) for _, module in parts("engine"))
    return [hook for hook in built if hook is not None]


def build_worker_halves(context: FeatureContext) -> list[WorkerHook]:
    """Return the worker halves of the same features."""
    built = (module.build_worker(context) for _, module in parts("worker"))
    return [hook for hook in built if hook is not None]


def other_implementation(config: EngineConfig, files: ModelFiles) -> Implementation | None:
    """Return the implementation of the first feature that builds this model; None for Octavo's own layers.

    Raises:
        ConfigError: the settings ask for an implementation that can't build it.
    """
    built = (module.implementation(config, files) for _, module in parts("models"))
    return next((one for one in built if one is not None), None)


def payload_types() -> dict[str, type]:
    """Return the payload's type of each feature that sends one, by the feature's name."""
    return {module.NAME: module.PAYLOAD for _, module in parts("payload") if hasattr(module, "PAYLOAD")}


def part(name: str, module: str = "") -> ModuleType | None:
    """Import a module of a feature's folder, or its package; return None if the folder or the module is missing."""
    path = ".".join(filter(None, (__name__, name, module)))
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as exc:
        if exc.name not in (f"{__name__}.{name}", path):
            raise
        return None


def parts(module: str) -> Iterator[tuple[str, ModuleType]]:
    """Return (feature, module) of each feature that has this module."""
    for name in FEATURES:
        if (found := part(name, module)) is not None:
            yield name, found


def settings_types() -> dict[str, type[FeatureSettings]]:
    """Return feature name -> the class of its settings, for the features that declare some."""
    return {name: module.SETTINGS for name, module in parts("settings")}


def methods(module: str) -> type:
    """Return a class with all methods that features add to a class of the Python API: `METHODS` of this module."""
    return type("FeatureMethods", tuple(found.METHODS for _, found in parts(module)), {})
