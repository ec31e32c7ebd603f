"""Settings of the CPU kernels are refused where they would do nothing; models that the kernels can't run still run."""

from __future__ import annotations

import pytest
from toy_models import LLAMA, model_files

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError

SMALL = {"load_format": "dummy", "memory_bytes": 1 << 22, "threads": 1, "device": "cpu"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_dtype": "int8"}, "--activation-dtype int8 is for weights that stay integers"),
        ({"activation_dtype": "int8", "dtype": "float32"}, "these are float32. Leave it out"),
        ({"activation_dtype": "bfloat16"}, "--activation-dtype bfloat16 is for weights that stay integers"),
        (
            {"head_dtype": "int8", "dtype": "bfloat16"},
            "--head-dtype int8 is for models that Octavo's kernels run on a CPU",
        ),
        ({"head_dtype": "int8", "attention_backend": "torch"}, "--head-dtype int8 is for"),
        ({"cpu_isa": "portable", "attention_backend": "torch"}, "--cpu-isa portable .* runs in 'torch'"),
        ({"cpu_isa": "portable", "block_size": 8}, "--cpu-isa portable .* runs in 'torch'"),
    ],
    ids=str,
)
def test_a_setting_that_would_do_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_core(EngineConfig.of(**SMALL, **settings), model_files())


def test_a_shape_that_the_program_does_not_take_runs_layer_by_layer(caplog):
    _, info = build_core(EngineConfig.of(**SMALL), model_files(LLAMA | {"hidden_size": 72, "head_dim": 16}))
    assert info.kernels.endswith("; all but attention in torch")
    assert "layer by layer in torch" in caplog.text
