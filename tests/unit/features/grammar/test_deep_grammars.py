"""Long chains of rules and references are compiled, or refused, without an end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LENGTH = 20_000
COMPILE = f"""
import msgspec
from toy_tokenizers import byte_level
from octavo.core.structured import StructuredOutputsParams
from octavo.features.grammar.compiler import Compiler
from octavo.text.tokenizers.tokenizer import Tokenizer

backend = byte_level()
compiler = Compiler(lambda: Tokenizer(backend), backend.get_vocab_size(), (2,))
steps = range({LENGTH})
form = dict({{}})
compiler.open(msgspec.Raw(msgspec.msgpack.encode(StructuredOutputsParams(**form)))).result()
"""
FORMS = {
    "rules": r"""grammar="\n".join(["start: r0", *(f'r{n}: "a" r{n + 1}' for n in steps), f'r{len(steps)}: "b"'])""",
    "terminals": r"""grammar="\n".join(["start: A0", *(f'A{n}: "a" A{n + 1}' for n in steps), f'A{len(steps)}: ""'])""",
    "references": """json={"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in steps}
        | {str(len(steps)): {"type": "integer"}}}""",
}


@pytest.mark.parametrize("form", FORMS)
def test_long_chains_are_compiled(form: str) -> None:
    code = COMPILE.format(FORMS[form])
    path = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path = {path!r}\n{code}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
