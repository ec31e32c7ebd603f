"""`octavo doctor` on this machine, and on parts of it that are broken on purpose."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from nvml_kit import GIB, FakeGpu, FakeNvml
from toy_models import save_decoder

from octavo.cli import doctor
from octavo.cli.doctor import folders, gpus, hub, kernels, model, server, torch_checks
from octavo.cli.doctor.check import Area, Check, Result, Wish, broken, fine
from octavo.cli.doctor.probe import probe
from octavo.config import EngineConfig, ModelConfig, ServerConfig
from octavo.core.nvml import Nvml, NvmlError

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def wish(name: str = "", **changes: Any) -> Wish:
    engine = EngineConfig(model=ModelConfig(model=name)) if name else EngineConfig()
    return Wish(**{"engine": engine, "server": ServerConfig(port=0), "has_model": bool(name), **changes})


def examined(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    """The exit status, and the findings by (area, name)."""
    status = doctor.run([*map(str, words), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (status == 0)
    return status, {(one["area"], one["name"]): one for one in told["checks"]}


def test_this_machine_is_fine_and_quick_needs_no_torch() -> None:
    code = "import sys; from octavo.cli.doctor import run; status = run(['--quick', '--port', '0', '--json'])"
    program = f"{code}; assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules; sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert {one["area"] for one in found["checks"]} >= {"packages", "machine", "folders", "server", "model hub"}
    assert all(bool(one["remedy"]) == (one["result"] != "fine") for one in found["checks"])


def test_the_text_ends_with_the_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    three = Area(
        "area",
        lambda wish: 1,
        (
            Check("good", lambda _: fine("yes")),
            Check("bad", lambda _: broken("no", "mend it")),
            Check("faulty", lambda number: fine(str(number / 0))),
            Check("elsewhere", lambda _: None),
        ),
    )

    def fails(wish: Wish) -> int:
        raise OSError("no such file")

    monkeypatch.setattr(doctor, "areas", lambda: [Area("unread", fails, three.checks), three])
    assert doctor.run([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  WARNING  unread: it could not be examined: OSError: no such file" in lines
    assert "  fine     good: yes" in lines
    assert lines[lines.index("  BROKEN   bad: no") + 1] == "           -> mend it"
    assert "  WARNING  faulty: it could not be examined: ZeroDivisionError: division by zero" in lines
    assert lines[-1] == "1 broken, 2 warnings, 1 fine"


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        status, found = examined(capsys, "--quick", "--port", port)
        assert status == 1
        assert f"Port {port} is in use" in found["server", "address"]["text"]
        judged = server.judge_address(server.read(wish(server=ServerConfig(port=port))))
        assert judged.result is Result.WARNING, "it may be the user's own server"


def test_flags_that_can_not_be_used_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.yaml").write_text("port: 0\nmax-log-len: 10\nssl-certfile: /none.pem\nmax-num-queued-reqs: 4\n")
    status, found = examined(capsys, "--quick", "--config", tmp_path / "serve.yaml")
    assert status == 1
    text = found["settings", "flags"]["text"]
    assert "--max-log-len has no effect without --enable-log-requests" in text
    assert "/none.pem" in text


def test_flags_of_the_scheduler_that_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = examined(capsys, "--quick", "--tenant-weights", '{"search": 2}')
    assert "--tenant-weights has no effect" in found["settings", "flags"]["text"]


def test_a_proxy_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "no_proxy", "HTTP_PROXY", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert server.read(wish()).proxy == ""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert server.read(wish()).proxy == "http://proxy:3128"
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert server.read(wish()).proxy == ""


def test_a_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_decoder(tmp_path / "tiny", 0)
    status, found = examined(capsys, folder, "--device", "cpu", "--skip-tokenizer-init", "--port", 0)
    assert status == 0
    assert "whole by their headers" in found["model", "files"]["text"]
    assert found["model", "architecture"]["result"] == "fine"
    assert found["model", "memory"]["result"] == "fine"
    assert found["torch", "torch"]["result"] == "fine"
    assert found["CPU kernels", "kernels"]["result"] in ("fine", "warning")


def test_a_damaged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_decoder(tmp_path / "tiny", 0)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    status, found = examined(capsys, folder, "--quick", "--port", 0)
    assert status == 1
    assert "is corrupt or truncated" in found["model", "files"]["text"]
    assert ("model", "architecture") not in found


def test_a_model_without_a_tokenizer_and_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "vocab_size": 8}))
    found = model.read(wish(str(tmp_path)))
    assert found is not None
    assert "tokenizer" in (found.text_problem or "")
    assert "NoSuchModel" in (found.config_problem or "")
    assert model.judge_files(found).result is Result.FINE


def test_a_model_of_the_catalogue_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    found = model.read(wish("smollm2"))
    assert found is not None
    assert found.absent == "octavo pull smollm2"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("total", "used", "fits"), [(24, 0, True), (24, 12, False), (8, 0, False)])
def test_whether_a_model_fits_what_others_leave_of_a_gpu(
    total: int, used: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    library = FakeNvml(FakeGpu(name="NVIDIA L4", memory=(total * GIB, used * GIB)))
    monkeypatch.setattr(Nvml, "load", lambda: Nvml(library))
    monkeypatch.setattr(model, "is_cpu", lambda device: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = model.read(wish(str(tmp_path)))
    assert found is not None
    judged = model.judge_fit(found)
    assert judged is not None
    assert judged.result is (Result.FINE if fits else Result.BROKEN), judged


def test_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(FakeGpu(), FakeGpu(uuid="GPU-1", mode=2))
    monkeypatch.setattr(Nvml, "load", lambda: Nvml(library))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = gpus.read(wish())
    assert found is not None
    assert (found.driver, found.cuda, found.problem) == ("580.65.06", (13, 0), "")
    assert [gpu.uuid for gpu in found.states] == ["GPU-1"]
    assert len(found.all_states) == 2
    judged = gpus.judge_mode(found)
    assert judged is not None
    assert judged.result is Result.BROKEN
    engine = EngineConfig.of(device="cpu")
    assert gpus.read(wish(engine=engine)) is None


def test_a_driver_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Nvml:
        raise NvmlError("nvmlInit_v2 failed with status 18")

    monkeypatch.setattr(Nvml, "load", refuse)
    found = gpus.read(wish())
    assert found is not None
    assert found.problem == "nvmlInit_v2 failed with status 18"


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    devices = {"0": ("0x10de", "0x030200"), "1": ("0x10de", "0x068000"), "2": ("0x1002", "0x030000")}
    for name, (vendor, kind) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert gpus.num_on_bus(tmp_path) == 1, "not an NVSwitch, nor another maker's GPU"


def test_torch_is_tried_in_its_own_process() -> None:
    tried, died = torch_checks.run_probe([sys.executable, "-m", "octavo.cli.doctor.probe"])
    assert died == ""
    assert tried.import_s > 0
    tried.import_s = 0
    here = probe(gpu=False)
    here.import_s = 0
    assert tried == here
    assert tried.torch


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "it was ended by SIGILL: without a message"),
        ("raise SystemExit('undefined symbol: cudaFoo')", "it ended with status 1: undefined symbol: cudaFoo"),
        ("import time; time.sleep(600)", "it had not ended after 0.2 s"),
    ],
)
def test_a_probe_that_gives_no_answer(program: str, text: str) -> None:
    patience_s = 0.2 if "sleep" in program else 300
    _, died = torch_checks.run_probe([sys.executable, "-c", program], patience_s)
    assert died == text


def test_a_folder_that_is_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = folders.look_at(tmp_path / "a" / "b")
    assert (found.existing, found.writable, found.executes) == (tmp_path, True, True)
    assert found.free > 0
    (tmp_path / "file").write_text("")
    assert not folders.look_at(tmp_path / "file" / "b").writable
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
    found = folders.look_at(tmp_path)
    assert (found.executes, found.free) == (False, 5)


def test_the_folders_that_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_KERNEL_CACHE", str(tmp_path / "k"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "t"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "h"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    found = folders.read(wish(server=ServerConfig(jobs_dir=str(tmp_path / "j"))))
    assert found.kernels.path == tmp_path / "k"
    assert found.triton.path == tmp_path / "t"
    assert found.models[1].path == tmp_path / "h" / "hub"
    assert found.jobs.path == tmp_path / "j"


def test_the_hub_folder_is_that_of_its_library() -> None:
    program = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert str(folders.hub_cache()) == told


@pytest.fixture
def answering() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A hub that refuses every token; its address, and the (path, token) of requests."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers["Authorization"]
            asked.append((self.path, token))
            self.send_response(200 if token is None else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as there:
        Thread(target=there.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{there.server_port}", asked
        there.shutdown()


def test_the_hub_is_asked_for_the_token(answering: tuple[str, list[tuple[str, str | None]]]) -> None:
    endpoint, asked = answering
    assert hub.ask(endpoint, None) == ("", 200)
    assert hub.ask(endpoint, "old") == ("", 401)
    assert asked == [("/api/models?limit=1", None), ("/api/whoami-v2", "Bearer old")]


def test_a_hub_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        problem, status = hub.ask(f"http://127.0.0.1:{port}", None, patience_s=0.2)
    assert "ReadTimeout" in problem
    assert status == 0
    problem, _ = hub.ask(f"http://127.0.0.1:{port}", None)
    assert "ConnectError" in problem


def test_the_hub_is_not_asked_without_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ask", lambda *args: pytest.fail("asked"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert not hub.read(wish()).asked
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.read(wish(online=True)).offline == "HF_HUB_OFFLINE"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = kernels.read(wish(quick=True, engine=EngineConfig.of(device="cpu")))
    assert found is not None
    assert kernels.judge_compiler(found).result is Result.WARNING
