"""Logits processors of a user's own module, behind the real processes, asked by the openai client."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import START_S, Server, serve_command

pytestmark = pytest.mark.e2e

MODULE = """
from octavo.features.logits_processors import AdapterLogitsProcessor, LogitsProcessor

class Only(LogitsProcessor):
    def __init__(self, context):
        self.digits = [context.load_tokenizer().encode(d, add_special_tokens=False)[0] for d in "0123456789"]

    def accepts(self, params):
        wanted = (params.extra_args or {}).get("only", "")
        if wanted not in ("", "digits"):
            raise ValueError(f"only must be 'digits', not {wanted!r}")
        return wanted == "digits"

    def apply(self, logits, rows):
        kept = logits[:, self.digits].clone()
        logits.fill_(float("-inf"))
        logits[:, self.digits] = kept

class Fails(AdapterLogitsProcessor):
    def new_req_logits_processor(self, params):
        return self.fail if "fail" in (params.extra_args or {}) else None

    def fail(self, output_ids, logits):
        raise KeyError("planned")
"""


def test_processors_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: Callable[..., Server]
) -> None:
    (tmp_path / "my_processors.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = start_server("--logits-processors", "my_processors:Only", "my_processors:Fails")
    asked: Any = {"model": "smollm2", "prompt": "Count:", "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        free = client.completions.create(**asked).choices[0].text
        digits = client.completions.create(**asked, extra_body={"vllm_xargs": {"only": "digits"}}).choices[0].text
        assert len(digits) == 8
        assert digits.isdigit()
        assert not free.isdigit()
        streamed = client.completions.create(**asked, stream=True, extra_body={"vllm_xargs": {"only": "digits"}})
        assert "".join(chunk.choices[0].text for chunk in streamed) == digits
        with pytest.raises(openai.BadRequestError, match="only must be 'digits', not 'letters'"):
            client.completions.create(**asked, extra_body={"vllm_xargs": {"only": "letters"}})
        with pytest.raises(openai.InternalServerError, match="my_processors:Fails failed: KeyError: 'planned'"):
            client.completions.create(**asked, extra_body={"vllm_xargs": {"fail": 1}})
        assert "my_processors:Fails failed on a request, which ends here" in server.output()
        assert "KeyError: 'planned'" in server.output()
        assert client.completions.create(**asked).choices[0].text == free


@pytest.mark.slow
def test_a_start_that_can_not_be(tmp_path: Path) -> None:
    arguments = ["--load-format", "dummy", "--logits-processors", "nowhere:Mine"]
    server = Server("", tmp_path / "log", command=[*serve_command("smollm2"), *arguments])
    try:
        assert server.process.wait(START_S) != 0
        assert "--logits-processors nowhere:Mine: the module nowhere can't be imported" in server.output()
        assert "Traceback" not in server.output()
    finally:
        server.close()
