"""`EngineConfig`: the settings of an engine core, from keywords or from a record of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from octavo.config.cache import CacheConfig
from octavo.config.device import DeviceConfig
from octavo.config.foreign import check_keyword
from octavo.config.model import ModelConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.core import parsing, quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import Flag, declared
from octavo.core.keywords import near
from octavo.core.params import SamplingParams
from octavo.features import FeatureSettings, settings_types


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine core.

    Attributes:
        features: feature name -> its settings, for the features that have any.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    features: dict[str, FeatureSettings] = field(
        default_factory=lambda: {name: kind() for name, kind in settings_types().items()}
    )

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Build a config from keywords named like the fields, or like the command-line flags where these differ.

        None takes the default. Settings of other engines are refused, or ignored with a warning: see `config.foreign`.

        Raises:
            TypeError: an unknown setting; the text suggests similar names.
            ConfigError: a value out of the setting's type or range.
        """
        floors = {section.name: section.default_factory for section in fields(cls) if section.name != "features"}
        sections: dict[str, Any] = floors | settings_types()
        known: dict[str, Flag] = {}
        for section, kind in sections.items():
            for name, flag in declared(section, kind).items():
                known |= {name: flag, flag.keyword: flag}
        chosen: dict[str, dict[str, Any]] = {name: {} for name in sections}
        for given, value in settings.items():
            if given not in known and check_keyword(given, value):
                continue
            if given not in known:
                raise _unknown(given, known)
            flag = known[given]
            section, name = flag.target.split(".")
            value = _by_other_words(flag, given, value)
            kind = get_type_hints(sections[section])[name]
            if value is None and type(None) not in get_args(kind):
                continue  # the default
            _check(kind, flag, given, value)
            chosen[section][name] = tuple(value) if isinstance(value, list) else value
        made = {name: section(**chosen[name]) for name, section in sections.items()}
        return cls(**{name: made.pop(name) for name in floors}, features=made)

    @classmethod
    def restored(cls, plain: Mapping[str, Any]) -> EngineConfig:
        """Restore a config from the output of `msgspec.to_builtins`.

        Raises:
            msgspec.ValidationError: another version of Octavo wrote it.
        """
        own = plain.get("features", {})
        features = {name: msgspec.convert(own.get(name, {}), kind) for name, kind in settings_types().items()}
        kinds = get_type_hints(cls)
        floors = {name: msgspec.convert(plain[name], kinds[name]) for name in plain if name != "features"}
        return cls(**floors, features=features)

    def check(self) -> None:
        """Raise ConfigError for settings that can't be used together."""
        self.parallel.check()
        on_ray = self.device.distributed_executor_backend == "ray"
        for flag, given in self.parallel.meeting.items():
            if on_ray:
                raise ConfigError(
                    f"--{flag} {given}: with --distributed-executor-backend ray the engine chooses where its machines "
                    "meet. Leave it out."
                )
            if self.parallel.nnodes == 1:
                raise ConfigError(
                    f"--{flag} {given}: with --nnodes 1 no other machine joins. Set --nnodes to the number of "
                    f"machines, or leave --{flag} out."
                )
        if self.parallel.node_key and (on_ray or self.parallel.nnodes == 1):
            # The key is a secret, so the text does not have it.
            why = (
                "with --distributed-executor-backend ray the engine makes a key for its machines. Leave"
                if on_ray
                else "with --nnodes 1 no other machine joins. Set --nnodes to the number of machines, or leave"
            )
            raise ConfigError(f"--node-key: {why} --node-key (and OCTAVO_NODE_KEY) out.")
        limit = self.device.record_steps_limit
        if self.device.record_steps is None and limit != DeviceConfig().record_steps_limit:
            raise ConfigError(
                f"--record-steps-limit {limit} is for --record-steps. Set that flag, or leave this one out."
            )
        if self.device.record_steps is not None and self.parallel.replicas > 1:
            raise ConfigError(
                f"--record-steps {self.device.record_steps}: a file has the steps of one engine, and with "
                f"--data-parallel-size {self.parallel.data_parallel_size} there are several. Leave one of them out."
            )

    def step_limits(self, default_limits: tuple[int, int, int]) -> tuple[int, int]:
        """Return the most sequences and tokens of a step, of all ranks together.

        Args:
            default_limits: see `WorkerFacts`.
        """
        num_seqs, rank_tokens = self.scheduler.limits(*default_limits)
        return num_seqs, rank_tokens * self.parallel.cache_ranks

    @property
    def needs_weights(self) -> bool:
        """Whether weight files are read."""
        return self.model.load_format != "dummy"


def _unknown(given: str, known: Iterable[str]) -> TypeError:
    """Return the error for an unknown setting, with a hint if it is a parameter of requests."""
    if given in SamplingParams.__struct_fields__:
        return TypeError(f"there is no setting {given!r}; it belongs to a request: SamplingParams({given}=...)")
    hint = near(given, known, most=3) or near(given, SamplingParams.__struct_fields__, cutoff=0.8)
    return TypeError(f"there is no setting {given!r}{hint}")


def _by_other_words(flag: Flag, given: str, value: Any) -> Any:
    """Convert spellings that scripts and other engines use to the field's own value."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if flag.read is parsing.dtype and value is not None:
        value = str(value).removeprefix("torch.")
    if flag.read is quantities.context_length and value == -1:
        return None
    if isinstance(value, str) and not flag.dotted:
        try:
            return flag.read(value)
        except ValueError as error:
            raise ConfigError(f"{given}: {error}.") from None
    return flag.convert(value) if flag.convert and given == flag.keyword and value is not None else value


def _check(kind: Any, flag: Flag, given: str, value: Any) -> None:
    """Raise ConfigError unless a value has the field's type and range; command-line flags are checked earlier."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{given}={value!r} is not known; choose one of: {', '.join(get_args(kind))}.")
        return
    kinds = get_args(kind) or (kind,)
    if value is None and type(None) in kinds:
        return
    if kind in (str, str | None) and not isinstance(value, str):
        raise ConfigError(f"{given}={value!r} must be a text.")
    from_zero = flag.read in (quantities.natural, quantities.share, quantities.gibibytes) or flag.switch
    if get_origin(kind) is tuple and not isinstance(value, list | tuple):
        raise ConfigError(f"{given}={value!r} must be a list.")
    if int in kinds:
        for number in value if get_origin(kind) is tuple else (value,):
            _check_int(flag, given, number, 0 if from_zero else 1)
    if float in kinds:
        least = "at least 0" if from_zero else "over 0"
        bounds: dict[Any, float] = {quantities.positive: math.inf, quantities.gibibytes: quantities.MOST_GIB}
        most = bounds.get(flag.read, 1)
        words = "" if most == math.inf else f" and up to {most}"
        if type(value) not in (int, float) or not (0 < value <= most or (value == 0 and from_zero)):
            raise ConfigError(f"{given}={value!r} must be a number {least}{words}.")
    if get_origin(kind) is dict and not isinstance(value, dict):
        raise ConfigError(f"{given}={value!r} must be a dict.")
    if bool in kinds and type(value) is not bool:
        raise ConfigError(f"{given}={value!r} must be True or False.")


def _check_int(flag: Flag, given: str, value: Any, smallest: int) -> None:
    or_all = flag.read is quantities.count_or_all
    if (type(value) is not int or value < smallest) and not (or_all and value == -1):
        words = ", or -1 for all" if or_all else ""
        raise ConfigError(f"{given}={value!r} must be a whole number of at least {smallest}{words}.")
