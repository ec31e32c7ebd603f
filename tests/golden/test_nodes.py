"""Two machines, here two process trees on one: the tokens of one, and one error if a machine is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_models
from toy_engine import drive, tokens_of

from octavo.build import build_core
from octavo.cli.flags.args import engine_from, values
from octavo.cli.serve import make_parser
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError, DeviceLostError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.text.sources import model_files

FEW = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--cpu-omp-threads-bind", "nobind")
FEW = (*FEW, "--kv-cache-memory-bytes", "4M", "--max-num-seqs", "8")


def config_of(*flags: str) -> EngineConfig:
    """Return the settings of `octavo serve`; the first flag is the model."""
    parser = make_parser()
    return engine_from(values(parser, parser.parse_args(["--model", *flags])))


def engine(*flags: str) -> EngineLoop:
    config = config_of(*flags)
    return build_core(config, model_files(config.model))[0]


def requests(max_tokens: int) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [GenerateRequest(id=str(i), tokens=list(range(5 + i, 17)), params=params) for i in range(4)]


def free_port() -> int:
    with socket.create_server(("", 0)) as one:
        port: int = one.getsockname()[1]
        return port


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(toy_models.save_decoder(tmp_path / "model", seed=1))


@contextlib.contextmanager
def two_nodes(model: str, *divided: str) -> Iterator[tuple[EngineLoop, subprocess.Popen[bytes]]]:
    """The engine of node 0 in this process, and node 1."""
    flags = (model, *FEW, *divided, "--nnodes", "2", "--master-port", str(free_port()))
    other = subprocess.Popen([sys.executable, "-m", "octavo.cli.main", "serve", *flags, "--node-rank", "1"])
    try:
        yield engine(*flags), other
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("blow", "said"),
    [
        (signal.SIGKILL, "its node has disconnected"),
        pytest.param(signal.SIGSTOP, "its node gave no sign of life for 5 s", marks=pytest.mark.slow),
    ],
)
def test_stages_on_two_nodes_and_the_loss_of_one(blow: signal.Signals, said: str, model: str) -> None:
    with two_nodes(model, "--pipeline-parallel-size", "2") as (loop, other):
        assert tokens_of(drive(loop, requests(9))) == tokens_of(drive(engine(model, *FEW), requests(9)))
        for request in requests(100):
            loop.add(request)
        for _ in range(4):
            loop.step()
        os.kill(other.pid, blow)
        with pytest.raises(DeviceLostError, match=rf"The device was lost: rank 1 on node 1 \(.*\): {said}"):
            tokens_of(drive(loop, []))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_stages_whose_ranks_are_on_one_node_are_native(
    stages: int, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With one stage, its ranks are on two nodes, so they share no memory."""
    divided = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", str(stages))
    with two_nodes(model, *divided) as (loop, _):
        found = tokens_of(drive(loop, requests(9)))
        loop.close()
    assert found == tokens_of(drive(engine(model, *FEW), requests(9)))
    assert ("layer by layer in torch" in "".join(capfd.readouterr())) == (stages == 1)


@pytest.mark.slow
def test_a_lost_process_of_another_node_is_named(model: str) -> None:
    with two_nodes(model, "--tensor-parallel-size", "2") as (loop, other):
        assert tokens_of(drive(loop, requests(9))) == tokens_of(drive(engine(model, *FEW), requests(9)))
        rank = Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split()[0]
        os.kill(int(rank), signal.SIGKILL)
        with pytest.raises(DeviceLostError, match=r"rank 1 on node 1 \(.*\): its process was killed by SIGKILL"):
            tokens_of(drive(loop, requests(9)))
        assert other.wait(30) == 1


@pytest.mark.slow
def test_the_other_node_ends_with_the_engine(model: str) -> None:
    with two_nodes(model, "--tensor-parallel-size", "2") as (loop, other):
        loop.close()
        assert other.wait(30) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--nnodes", "2"), "--nnodes 2: the number of ranks, 1, must be a multiple of it"),
        (("--node-rank", "1"), "--node-rank 1: nodes have numbers from 0 to 0"),
        (("--pipeline-layers", "1,2"), "--pipeline-layers 1,2: .*-size 1 is one stage.* Set it to 2, or leave out"),
        (("--master-addr", "10.0.0.1"), "--master-addr 10.0.0.1: with --nnodes 1 no other machine joins. Set --nnodes"),
        (("--master-port", "29000"), "--master-port 29000: with --nnodes 1 .*, or leave --master-port out"),
        (("-tp", "2", "--nnodes", "2", "--master-port", "65536"), "--master-port 65536: ports have numbers from 1 to"),
        (
            ("-tp", "2", "--distributed-executor-backend", "ray", "--master-addr", "10.0.0.1"),
            "--master-addr 10.0.0.1: with --distributed-executor-backend ray the engine chooses where",
        ),
        (("--node-key", "secret"), "--node-key: with --nnodes 1 no other .*, or leave --node-key .and OCTAVO_NODE_KEY"),
        (
            ("-tp", "2", "--distributed-executor-backend", "ray", "--node-key", "secret"),
            "--node-key: with --distributed-executor-backend ray the engine makes a key",
        ),
        (("--dbo-prefill-token-threshold", "64"), "--dbo-prefill-token-threshold 64 is for --enable-dbo. Set that"),
        (
            ("--prefill-context-parallel-threshold", "64"),
            "-threshold 64 is for --prefill-context-parallel-size",
        ),
        (("--nnodes", "2", "-dp", "2"), "a model on several machines .--nnodes 2. has one replica"),
    ],
)
def test_machines_that_do_not_fit_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of("model", *flags).check()
