"""`DraftConfig`: the drafting method and its numbers. Parsed from `--speculative-config` and the short flags."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from octavo.core.draft_tree import DraftTree
from octavo.core.errors import ConfigError

Method = Literal["auto", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa"]
METHODS: tuple[str, ...] = get_args(Method)
OFF = "none"
"""The method of an engine that drafts nothing."""
MEASURED_MODELS = frozenset({"smollm2"})
"""Models of the catalogue that a CPU decodes faster with `auto`, or as fast, on every workload that was measured
(docs/speculative-measurements.md). There they draft unless the settings say otherwise."""
HEAD_METHODS = ("eagle", "eagle3", "mtp")
"""Those in which a head drafts from the model's hidden states."""
MODEL_METHODS = ("draft_model", *HEAD_METHODS, "medusa")
"""Those in which a model or a head drafts."""
_LOOKUP, _VOTES = ("auto", "ngram", "suffix"), ("auto", "suffix")
_READ_BY = {
    "speculative_token_tree": HEAD_METHODS,
    "revision": ("draft_model", "eagle", "eagle3", "medusa"),
    "prompt_lookup_min": (*_LOOKUP, *HEAD_METHODS),
    "prompt_lookup_max": (*_LOOKUP, *HEAD_METHODS),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": _VOTES,
    "suffix_decoding_min_token_prob": _VOTES,
}
"""Keys that only some methods read."""
MOST_DRAFTS = 15
"""Most drafts after one token."""
_USUAL_DRAFTS = 7
_CPU_DRAFTS = 3
"""With the last token four rows: those of one register tile of the kernels."""
_LEAST_MATCH, _MOST_MATCH = 2, 16
"""Usual bounds of the tokens that must match and that are compared."""
_LONGEST = 64
"""Longest match that is looked for, in tokens."""


def _option(default: Any, help: str) -> Any:  # noqa: A002 (argparse's word)
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The keys of `--speculative-config`. Names are vLLM's, except `adaptive`.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    method: str = _option("auto", "drafting method: " + ", ".join((*METHODS, OFF)))
    num_speculative_tokens: int | None = _option(
        None,
        f"most drafts after one token, 1 to {MOST_DRAFTS}; by default {_CPU_DRAFTS} of prompt lookup on a CPU, "
        f"else {_USUAL_DRAFTS}",
    )
    model: str | None = _option(None, "the drafting model, or EAGLE head: a folder, a .gguf file or a name")
    revision: str | None = _option(None, "branch, tag or commit of its Hugging Face repository")
    adaptive: bool = _option(True, "choose the number of drafts by what they gain, 0 included")
    prompt_lookup_min: int | None = _option(
        None,
        f"least tokens that must match an earlier place, by default {_LEAST_MATCH}; beside a head 0 for no lookup, "
        "the default on a GPU",
    )
    prompt_lookup_max: int = _option(_MOST_MATCH, "most tokens that are compared")
    speculative_token_tree: tuple[tuple[int, ...], ...] | None = _option(
        None, "shape of drafts that branch: a list of paths, as in [(0,), (1,), (0, 0)]; only of heads"
    )
    suffix_decoding_max_cached_requests: int = _option(0, "outputs of earlier requests that `suffix` searches, too")
    suffix_decoding_max_spec_factor: float = _option(1.0, "most drafts of `suffix` for each token that matches")
    suffix_decoding_min_token_prob: float = _option(0.1, "least frequency of a draft of `suffix`")

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config: method={self.method!r} is not supported; choose one of "
                f"{', '.join((*METHODS, OFF))}."
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive={self.adaptive!r} must be true or false.")
        self._text("model")
        self._text("revision")
        if (self.method in MODEL_METHODS and self.method != "mtp") != (self.model is not None):
            needs = (
                "set model (--spec-model) to the folder or the name of what drafts"
                if self.model is None
                else f"leave out model={self.model!r}"
            )
            raise ConfigError(f"speculative_config: method={self.method} needs a change: {needs}.")
        if self.num_speculative_tokens is not None and self.tree is None:
            self._whole("num_speculative_tokens", 1, MOST_DRAFTS)
        if self.prompt_lookup_min is not None:
            self._whole("prompt_lookup_min", 0 if self.method in HEAD_METHODS else 1, _LONGEST)
        self._whole("prompt_lookup_max", 1, _LONGEST)
        if self.least_match > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={self.least_match} must be at most "
                f"prompt_lookup_max={self.prompt_lookup_max}. Set both."
            )
        self._whole("suffix_decoding_max_cached_requests", 0, 1_000_000)
        self._number("suffix_decoding_max_spec_factor", MOST_DRAFTS)
        self._number("suffix_decoding_min_token_prob", 1)
        self._check_effect()
        self._check_lookup()

    @property
    def tree(self) -> DraftTree | None:
        """The shape of drafts that branch; None for chains."""
        paths = self.speculative_token_tree
        return None if paths is None else DraftTree.of(paths)

    @property
    def least_match(self) -> int:
        """Fewest tokens that must match earlier ones for lookup to draft."""
        return _LEAST_MATCH if self.prompt_lookup_min is None else self.prompt_lookup_min

    @property
    def looks_up(self) -> bool:
        """Whether drafts come from the request's own text where it repeats itself."""
        return self.method in _LOOKUP or bool(self.prompt_lookup_min)

    @property
    def reads_predictions(self) -> bool:
        """Whether what a request predicts is drafted."""
        return self.method in _LOOKUP or (self.method in HEAD_METHODS and self.tree is None)

    @property
    def most_drafts(self) -> int:
        tree = self.tree
        return len(tree) if tree is not None else self.num_speculative_tokens or _USUAL_DRAFTS

    def on(self, device: str) -> DraftConfig:
        """Return the configuration with what suits the device, unless it was given: the number of drafts of lookup, and
        lookup beside a head."""
        if device != "cpu":
            return self
        if self.num_speculative_tokens is None and self.method not in MODEL_METHODS:
            return replace(self, num_speculative_tokens=_CPU_DRAFTS)
        if self.prompt_lookup_min is None and self.method in HEAD_METHODS and self.tree is None:
            return replace(self, prompt_lookup_min=_LEAST_MATCH)
        return self

    def at_most(self, count: Any) -> DraftConfig:
        """Return the configuration with no more drafts than there are heads: a GPU would compute the places of the
        others. A wrong number is left to who loads the heads."""
        given = self.most_drafts
        return replace(self, num_speculative_tokens=min(given, count)) if type(count) is int and count > 0 else self

    def _check_effect(self) -> None:
        """Raise ConfigError if a key was set that the method does not read."""
        for one in fields(self):
            readers = _READ_BY.get(one.name, (self.method,))
            if self.method not in readers and getattr(self, one.name) != one.default:
                raise ConfigError(
                    f"speculative_config: {one.name} needs method={' or '.join(readers)}, got method={self.method}. "
                    "Leave it out, or change the method."
                )

    def _check_lookup(self) -> None:
        """Raise ConfigError if lookup beside a head is half set, or drafts what the head's tree has no place for."""
        if self.method not in HEAD_METHODS:
            return
        if not self.prompt_lookup_min and self.prompt_lookup_max != _MOST_MATCH:
            raise ConfigError(
                f"speculative_config: prompt_lookup_max={self.prompt_lookup_max} has no effect with "
                f"method={self.method} unless prompt_lookup_min is set. Set it, or leave both out."
            )
        if self.prompt_lookup_min and self.tree is not None:
            raise ConfigError(
                "speculative_config: prompt_lookup_min drafts chains, for which speculative_token_tree has no place. "
                "Leave one of them out."
            )

    def _text(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"speculative_config: {name}={value!r} must be a text that is not empty.")

    def _number(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise ConfigError(f"speculative_config: {name}={value!r} must be a number from 0 to {most}.")

    def _whole(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"speculative_config: {name}={value!r} must be a whole number from {least} to {most}.")


KEYS = tuple(one.name for one in fields(DraftConfig))


def draft_config(
    given: dict[str, Any], method: str | None, tokens: int | None, model: str | None = None
) -> DraftConfig | None:
    """Return the configuration; None if nothing asks for drafts, or the method is `none`.

    Args:
        given: `--speculative-config`.
        method, tokens, model: `--spec-method`, `--spec-tokens` and `--spec-model`, which take precedence over its keys.
            With a model, the method is `draft_model` unless it is given.

    Raises:
        ConfigError: an unknown key, a value that it can't have, or one beside the method `none`.
    """
    chosen = {"method": method, "num_speculative_tokens": tokens, "model": model}
    merged = given | {key: value for key, value in chosen.items() if value is not None}
    if not merged:
        return None
    if merged.get("model") is not None:
        merged = {"method": "draft_model"} | merged
    if (tree := merged.pop("speculative_token_tree", None)) is not None:
        merged |= _shape(tree, merged.get("num_speculative_tokens"))
    odd = next((key for key in merged if key not in KEYS), None)
    if odd is not None:
        raise ConfigError(f"speculative_config: {odd!r} is not a known key; there are {', '.join(KEYS)}.")
    if merged.get("method") != OFF:
        return DraftConfig(**merged)
    # The flag for `none` turns off what `--speculative-config` has; nothing else is to be without effect.
    beside = {"--spec-tokens": tokens, "--spec-model": model}
    if method is None:
        beside |= {f"speculative_config: {key}": value for key, value in given.items() if key != "method"}
    useless = next((f"{name}={value!r}" for name, value in beside.items() if value is not None), None)
    if useless is not None:
        raise ConfigError(f"{useless} has no effect with the method none, which drafts nothing. Leave one of them out.")
    return None


def _shape(given: Any, count: Any) -> dict[str, Any]:
    """Return the settings of a tree of drafts, which is vLLM's list of paths, or its text.

    Raises:
        ConfigError: it is no tree, or has another number of drafts than the given `count`.
    """
    try:
        paths = _paths(given)
        tree = DraftTree.of(paths)
    except ValueError as error:
        raise ConfigError(
            f"speculative_config: speculative_token_tree={given!r} is not a tree of drafts: {error}. Set paths such as "
            "[(0,), (1,), (0, 0)], where (0, 0) is the likeliest token after the likeliest one; or leave it out."
        ) from None
    if count not in (None, len(paths)):
        raise ConfigError(
            f"speculative_config: speculative_token_tree has {len(paths)} drafts, but num_speculative_tokens={count}. "
            "Leave one of them out."
        )
    shape = {"num_speculative_tokens": len(paths)}
    return shape if tree.chain == len(tree) else shape | {"speculative_token_tree": tuple(paths)}


def _paths(given: Any) -> list[tuple[int, ...]]:
    """Return a list of paths, given as one or as its text. Raises ValueError for anything else."""
    if isinstance(given, str):
        try:
            given = ast.literal_eval(given)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            given = None
    if not isinstance(given, list | tuple) or not all(isinstance(path, list | tuple) and path for path in given):
        raise ValueError("it is no list of paths")
    if not all(type(number) is int and number >= 0 for path in given for number in path):
        raise ValueError("a path has numbers from 0 on")
    return [tuple(path) for path in given]
