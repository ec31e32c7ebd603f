"""A feature made for this test, from a field of an HTTP request to the answer; without its folder it is gone."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_kit import TOKENIZER, VOCAB_SIZE, ask_now

import octavo.features
from octavo.cache.cache import KVCache
from octavo.config import ServerConfig
from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.engine.fake import FakeEngine, fake_info
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice, toy_generate
from octavo.features import FeatureContext, build_engine_halves
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler
from octavo.server.app import create_app
from octavo.text.frontend import Frontend

TOY = Path(__file__).parents[2] / "toy_features" / "tally"
BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "seed": 0}
EVEN = sum(token % 2 == 0 for token in toy_generate([5, 6, 7], 6, stop_ids=()))


class Core(FakeEngine):
    """The real scheduler and loop on the toy device, with the features that are there."""

    def __init__(self) -> None:
        context = FeatureContext(vocab_size=VOCAB_SIZE, eos_token_ids=(), load_tokenizer=lambda: TOKENIZER)
        hooks = [hook for hook in build_engine_halves(context) if hook.name == "tally"]
        info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=[hook.name for hook in hooks])
        super().__init__(lambda request: [], info=info)
        limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
        self.loop = EngineLoop(
            Scheduler(KVCache(32, 4), limits, make_policy("fcfs"), hooks=hooks), ToyDevice(32, 4), depth=0
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self.loop.add(request)
        while self.loop.busy:
            for delta in self.loop.step():
                yield delta


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The feature's folder, as if it stood among the others."""
    shutil.copytree(TOY, tmp_path / "tally")
    monkeypatch.setattr(octavo.features, "__path__", [*octavo.features.__path__, str(tmp_path)])
    monkeypatch.setattr(octavo.features, "FEATURES", (*octavo.features.FEATURES, "tally"))
    yield tmp_path / "tally"
    for name in [one for one in sys.modules if one.startswith("octavo.features.tally")]:
        del sys.modules[name]
    vars(octavo.features).pop("tally", None)


def ask(body: dict[str, Any], **settings: Any) -> Any:
    core = Core()
    return ask_now(create_app(Frontend(core, TOKENIZER, core.info), ServerConfig(**settings)), "/v1/completions", body)


def test_from_a_field_of_the_request_to_the_answer(folder: Path) -> None:
    plain = ask(BODY).json()["choices"][0]["text"]
    answer = ask(BODY | {"tally": "even"}, strict_params=True).json()
    assert answer["choices"][0]["text"] == f"{plain} even: {EVEN}"
    assert not answer.get("warnings")


def test_a_wrong_value_is_refused_by_the_feature(folder: Path) -> None:
    answer = ask(BODY | {"tally": 3})
    assert (answer.status, answer.error()["param"]) == (400, "tally")


def test_without_the_folder_the_field_is_unknown_and_all_else_is_as_before(folder: Path) -> None:
    plain = ask(BODY).json()["choices"][0]["text"]
    for name in [one for one in sys.modules if one.startswith("octavo.features.tally")]:
        del sys.modules[name]
    shutil.rmtree(folder)
    answer = ask(BODY | {"tally": "even"}).json()
    assert answer["choices"][0]["text"] == plain
    assert "`tally`" in answer["warnings"][0]
