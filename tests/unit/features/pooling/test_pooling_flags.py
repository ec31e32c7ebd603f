"""Settings of vectors from the command line and a file."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.cli.flags.args import add_engine_settings, engine_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.config import EngineConfig
from octavo.features.pooling.settings import PoolingSettings


def parse(*argv: str) -> EngineConfig:
    parser = OctavoParser("octavo")
    add_engine_settings(parser)
    return engine_from(values(parser, parser.parse_args(list(argv))))


def pooler_config(engine: EngineConfig) -> object:
    settings = engine.features["pooling"]
    assert isinstance(settings, PoolingSettings)
    return settings.pooler_config


def test_how_vectors_are_made_may_be_written_in_three_ways(tmp_path: Path) -> None:
    wanted = {"pooling_type": "MEAN", "normalize": False}
    for words in (
        ("--pooler-config", json.dumps(wanted)),
        ("--override-pooler-config", json.dumps(wanted)),
        ("--pooler-config.pooling_type", "MEAN", "--pooler-config.normalize", "false"),
    ):
        engine = parse("m", "--runner", "pooling", *words)
        assert (engine.model.runner, pooler_config(engine)) == ("pooling", wanted)
    file = tmp_path / "octavo.yaml"
    file.write_text("model: m\nconvert: embed\npooler-config:\n  pooling_type: MEAN\n  normalize: false\n")
    engine = parse("--config", str(file))
    assert (engine.model.convert, pooler_config(engine)) == ("embed", wanted)
