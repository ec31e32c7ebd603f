"""Settings: every wrong one is refused with the key, the value and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
from toy_models import model_files

from octavo.build_worker import feature_context
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.features import FeatureContext
from octavo.features.speculation.config import DraftConfig, draft_config
from octavo.features.speculation.engine import build_engine
from octavo.features.speculation.lookup_drafters import DeviceDrafter, HostDrafter
from octavo.features.speculation.settings import SpeculationSettings
from octavo.features.speculation.worker import build_worker


def context(device: str = "cpu", model: str = "", **settings: Any) -> FeatureContext:
    chosen = {"speculation": SpeculationSettings(**settings)}
    return FeatureContext(
        vocab_size=8,
        eos_token_ids=(),
        load_tokenizer=lambda: None,
        device=device,
        model=model,
        settings=chosen,  # type: ignore[arg-type, return-value]
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "magic"}, "method='magic' is not supported; choose one of auto, ngram, suffix"),
        ({"method": "none", "draft_model": "x"}, "'draft_model' is not a known key"),
        ({"method": "eagle"}, "method=eagle needs a change: set model (--spec-model) to"),
        ({"method": "mtp", "model": "x"}, "method=mtp needs a change: leave out model='x'"),
        ({"speculative_token_tree": "[(0,), (1,)]"}, "speculative_token_tree needs method=eagle or eagle3 or mtp"),
        ({"speculative_token_tree": [[0], [0, 1]]}, "is not a tree of drafts: the path (0, 1) needs the path (0, 0)"),
        (
            {"speculative_token_tree": "(0"},
            "speculative_token_tree='(0' is not a tree of drafts: it is no list of paths",
        ),
        ({"speculative_token_tree": "a()"}, "it is no list of paths. Set paths such as [(0,), (1,), (0, 0)]"),
        ({"speculative_token_tree": [[0], [True]]}, "a path has numbers from 0 on"),
        ({"speculative_token_tree": [[0], [-1]]}, "a path has numbers from 0 on"),
        ({"speculative_token_tree": [[i] for i in range(31)]}, "there can be at most 30 paths, not 31"),
        (
            {"speculative_token_tree": "[(0,)]", "num_speculative_tokens": 2},
            "has 1 drafts, but num_speculative_tokens=2",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be a whole number from 1 to 15"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True must be a whole number"),
        ({"prompt_lookup_min": 20}, "prompt_lookup_min=20 must be at most prompt_lookup_max=16. Set both"),
        ({"prompt_lookup_max": 1}, "prompt_lookup_min=2 must be at most prompt_lookup_max=1. Set both"),
        ({"model": 5}, "model=5 must be a text"),
        ({"model": ""}, "model='' must be a text that is not empty"),
        ({"model": "x", "revision": 5}, "revision=5 must be a text"),
        (
            {"method": "ngram", "revision": "main"},
            "revision needs method=draft_model or eagle or eagle3 or medusa, got",
        ),
        (
            {"model": "x", "prompt_lookup_max": 3},
            "prompt_lookup_max needs method=auto or ngram or suffix or eagle or eagle3 or mtp, got method=draft_model",
        ),
        ({"method": "mtp", "prompt_lookup_max": 3}, "has no effect with method=mtp unless prompt_lookup_min is set"),
        (
            {"method": "mtp", "prompt_lookup_min": 3, "speculative_token_tree": "[(0,), (1,)]"},
            "prompt_lookup_min drafts chains, for which speculative_token_tree has no place",
        ),
        ({"method": "ngram", "suffix_decoding_max_spec_factor": 2.0}, "needs method=auto or suffix, got method=ngram"),
        ({"adaptive": 1}, "adaptive=1 must be true or false"),
        ({"suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob=2 must be a number from 0 to 1"),
        ({"suffix_decoding_max_cached_requests": 9}, "needs method=suffix, got method=auto"),
        ({"draft_model": "x"}, "'draft_model' is not a known key; there are method, num_speculative_tokens"),
    ],
)
def test_wrong_settings(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(speculative_config=config)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"spec_method": "none", "spec_tokens": 4}, "--spec-tokens=4 has no effect with the method none"),
        ({"spec_method": "none", "spec_model": "x"}, "--spec-model='x' has no effect with the method none"),
        ({"speculative_config": {"method": "none"}, "spec_tokens": 4}, "--spec-tokens=4 has no effect"),
        (
            {"speculative_config": {"method": "none", "num_speculative_tokens": 4}},
            "speculative_config: num_speculative_tokens=4 has no effect",
        ),
    ],
)
def test_nothing_is_set_for_an_engine_that_drafts_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**settings)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "looks_up", "predicts", "least"),
    [
        ({}, True, True, 2),
        ({"method": "ngram", "prompt_lookup_min": 5}, True, True, 5),
        ({"method": "mtp"}, False, True, 2),
        ({"method": "mtp", "prompt_lookup_min": 4}, True, True, 4),
        ({"method": "mtp", "prompt_lookup_min": 0}, False, True, 0),
        ({"method": "mtp", "speculative_token_tree": "[(0,), (1,)]"}, False, False, 2),
        ({"method": "medusa", "model": "x"}, False, False, 2),
        ({"method": "draft_model", "model": "x"}, False, False, 2),
    ],
)
def test_what_is_looked_up(given: dict[str, Any], looks_up: bool, predicts: bool, least: int) -> None:
    config = draft_config(given or {"method": "auto"}, None, None)
    assert config is not None
    assert (config.looks_up, config.reads_predictions, config.least_match) == (looks_up, predicts, least)


def test_a_cpu_looks_up_beside_a_head() -> None:
    """Unless prompt_lookup_min is 0, or drafts are a tree."""
    tree = {"speculative_token_tree": "[(0,), (1,)]"}
    for more, on_cpu, on_gpu in (({}, 2, None), ({"prompt_lookup_min": 0}, 0, 0), (tree, None, None)):
        config = draft_config({"method": "mtp", **more}, None, None)
        assert config is not None
        assert config.on("cpu").prompt_lookup_min == on_cpu
        assert config.on("cuda").prompt_lookup_min == on_gpu


def test_a_tree_sets_the_number_of_drafts() -> None:
    tree = "[(0,), (1,), (0, 0), (0, 0, 0), (1, 0)]"
    settings = SpeculationSettings(speculative_config={"method": "mtp", "speculative_token_tree": tree})
    config = settings.config()
    assert config is not None
    assert config.tree is not None
    assert (config.most_drafts, config.tree.chain) == (5, 3)
    assert config.tree.parents == (-1, 0, 1, -1, 3)


@pytest.mark.parametrize("tree", ["[(0,), (0, 0), (0, 0, 0)]", [[0], [0, 0], [0, 0, 0]], "[(0, 0, 0), (0, 0), (0,)]"])
def test_a_tree_without_branches_is_a_chain(tree: Any) -> None:
    settings = SpeculationSettings(speculative_config={"method": "ngram", "speculative_token_tree": tree})
    assert settings.config() == DraftConfig(method="ngram", num_speculative_tokens=3)


def test_short_flags_take_precedence() -> None:
    settings = SpeculationSettings(speculative_config={"method": "suffix"}, spec_method="ngram", spec_tokens=3)
    assert settings.config() == DraftConfig(method="ngram", num_speculative_tokens=3)
    assert SpeculationSettings().config() is None


def test_who_drafts() -> None:
    assert build_engine(context()) is None
    assert build_worker(context()) is None
    assert isinstance(build_worker(context(spec_method="suffix")), HostDrafter)
    assert isinstance(build_worker(context("cuda", spec_method="auto")), DeviceDrafter)
    engine = build_engine(context(spec_tokens=4))
    assert engine is not None
    assert engine.max_drafts == 4
    with pytest.raises(ConfigError, match="set method=ngram"):
        build_engine(context("cuda", spec_method="suffix"))


def test_an_engine_that_generates_no_text_is_refused_drafts() -> None:
    for given in ({"spec_method": "none"}, {}):
        assert build_engine(dataclasses.replace(context(model="smollm2", **given), generates=False)) is None
    for given in ({"spec_method": "ngram"}, {"speculative_config": {"method": "ngram"}}, {"spec_tokens": 4}):
        method = "auto" if "spec_tokens" in given else "ngram"
        says = f"--spec-method {method} drafts tokens, and minilm is served for vectors.* with --spec-model, --spec-tok"
        with pytest.raises(ConfigError, match=says):
            build_engine(dataclasses.replace(context(model="minilm", **given), generates=False))


def test_a_model_that_was_measured_drafts_on_a_cpu_unless_the_settings_say_otherwise() -> None:
    engine = build_engine(context(model="smollm2"))
    assert engine is not None
    assert engine.max_drafts == 3
    assert isinstance(build_worker(context(model="smollm2")), HostDrafter)
    others = (
        context(model="smollm2", device="cuda"),
        context(model="another"),
        context(model="smollm2", spec_method="none"),
        context(model="smollm2", speculative_config={"method": "none"}),
        context(model="smollm2", speculative_config={"method": "ngram"}, spec_method="none"),
    )
    for one in others:
        assert build_engine(one) is None
        assert build_worker(one) is None


def test_a_cpu_has_fewer_drafts_of_prompt_lookup_unless_a_number_is_given() -> None:
    assert DraftConfig().on("cpu").most_drafts == 3
    assert DraftConfig().on("cuda").most_drafts == 7
    assert DraftConfig(num_speculative_tokens=9).on("cpu").most_drafts == 9
    assert DraftConfig(method="draft_model", model="small").on("cpu").most_drafts == 7


def test_a_drafting_model_is_downloaded_where_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both halves: the engine half compares its tokenizer."""
    asked = []

    def resolve(name: str, **how: Any) -> Any:
        asked.append((name, how["download_dir"]))
        return model_files({"vocab_size": 8})

    monkeypatch.setattr("octavo.features.speculation.draft_files.resolve", resolve)
    drafting = context(spec_model="owner/small")
    build_engine(dataclasses.replace(drafting, download_dir="here"))
    build_engine(drafting)
    assert asked == [("owner/small", "here"), ("owner/small", None)]
    config = EngineConfig.of(download_dir="here")
    assert feature_context(config, model_files(), Mock(default_limits=(4, 64, 64))).download_dir == "here"


def test_there_are_no_more_drafts_than_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for heads in (3, 20, "x", None):
        files = model_files({"medusa_num_heads": heads})
        monkeypatch.setattr("octavo.features.speculation.draft_files.resolve", lambda *_, files=files, **__: files)
        engine = build_engine(context(speculative_config={"method": "medusa", "model": "heads"}))
        assert engine is not None
        found.append(engine.max_drafts)
    assert found == [3, 7, 7, 7]
