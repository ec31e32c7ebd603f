"""A real server process over an engine core without a model.

`python stub_server.py STEP_SECONDS [server flags]` plays a fixed text; `python stub_server.py toy:CROWD [server flags]`
runs the real loop on the toy device, which is lost once so many requests are there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.cli.flags.args import add_settings, server_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import SERVER_GROUPS
from octavo.cli.serve import announce
from octavo.engine.client import CoreClient
from octavo.engine.fake import fake_info
from octavo.engine.process import CoreProcess
from octavo.engine.protocol import EngineClient
from octavo.engine.stub import Stub
from octavo.server.process.run import run_server
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.tokenizers.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. "
TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}[assistant]"


def frontend_of(engine: EngineClient) -> Frontend:
    """Also in the other API processes, which find it by its name: `PYTHONPATH` must hold this folder."""
    tokenizer = byte_tokenizer()
    return Frontend(engine, tokenizer, engine.info, chat=ChatTemplate(TEMPLATE, tokenizer), twin=frontend_of)


def byte_tokenizer() -> Tokenizer:
    """A token for every byte, after </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({"</s>": 0} | {char: 1 + n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, named_tokens={"eos_token": "</s>"})


def stub_core(step_s: float) -> CoreProcess:
    info = fake_info(name="stub", vocab_size=257, eos_token_ids=[0], max_model_len=100_000)
    text = byte_tokenizer().encode(TEXT, add_special_tokens=False)
    return CoreProcess("octavo.engine.stub", Stub(info, tuple(text), step_s))


def main(core: str, flags: list[str]) -> int:
    parser = OctavoParser("stub", words="", description="A server over a stub.")
    add_settings(parser, SERVER_GROUPS)
    config = server_from(values(parser, parser.parse_args(flags)))
    kind, _, crowd = core.partition(":")

    @contextlib.asynccontextmanager
    async def open_frontend() -> AsyncIterator[Frontend]:
        process = CoreProcess("toy_core", int(crowd)) if kind == "toy" else stub_core(float(core))
        client = await CoreClient.start(process, max_unread_tokens=config.max_unread_tokens)
        try:
            yield frontend_of(client)
        finally:
            await client.close()

    return run_server(open_frontend, config, announce=announce)


if __name__ == "__main__":
    import stub_server

    sys.exit(stub_server.main(sys.argv[1], sys.argv[2:]))
