from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.cli.main import main


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("sevre", "unknown command 'sevre'; did you mean serve?"),
        ("--versoin", "unknown option '--versoin'; the commands are serve, chat,"),
    ],
)
def test_a_wrong_command(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert said in capsys.readouterr().err


def test_help_with_a_command_is_the_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", "pull"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: octavo pull [NAME]")


def test_pull_gets_models_of_the_hub_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"w": np.ones(3, dtype=np.float32)}, tmp_path / "model.safetensors")
    asked: list[object] = []

    def fetch(model: str, **how: object) -> Path:
        asked.extend([model, how["revision"], how["weights"], how["download_dir"]])
        return tmp_path

    monkeypatch.setattr("octavo.hub.resolve.fetch_repository", fetch)
    assert main(["pull", "owner/name", "--revision", "v2", "--download-dir", "models"]) == 0
    assert asked == ["owner/name", "v2", True, Path("models")]
    assert capsys.readouterr().out == f"{tmp_path}\n"
