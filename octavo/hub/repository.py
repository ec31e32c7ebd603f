"""Models in Hugging Face repositories, through `huggingface_hub`: its cache and settings (HF_HOME, HF_TOKEN) apply."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.core.errors import ModelNotFoundError
from octavo.hub.files import QUANTIZATION_FILES
from octavo.hub.progress import Progress

# If looking up a repository takes longer, the local cache is used instead.
_LOOKUP_TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    *QUANTIZATION_FILES,
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/config.json",
)
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
# Folders hold other formats of the same model, except those of modules, such as 1_Pooling and 2_Dense.
# consolidated.safetensors holds the same weights under other names.
_NOT_WANTED = ("[!0-9]*/*.json", "[!0-9]*/*.safetensors", "consolidated*")


def looks_like_repository(model: str) -> bool:
    return len(model) <= 200 and _NAME.fullmatch(model) is not None and ".." not in model


def fetch_repository(
    model: str,
    *,
    revision: str | None,
    weights: bool,
    unknown: str,
    progress: Progress | None = None,
    download_dir: Path | None = None,
) -> Path:
    """Download the needed files of a repository. Return the folder of its snapshot.

    Without a network, or with HF_HUB_OFFLINE=1, files of an earlier download are used.

    Args:
        unknown: the beginning of the error text, which names the other places that were searched.

    Raises:
        ModelNotFoundError: no such repository, no access, or no network and nothing in the cache.
    """
    from huggingface_hub import snapshot_download

    if progress is not None:
        progress(f"looking up {model} on the Hugging Face Hub", 0, 0)
    problem = _look_up(model, revision)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=[*_SMALL_FILES, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_NOT_WANTED),
            local_files_only=problem is not None,
            cache_dir=download_dir,
        )
    except Exception as exc:  # the HTTP library, and so the exception type, depends on the version
        raise _explain(model, revision, problem or exc, unknown, download_dir) from exc
    return Path(folder)


def _look_up(model: str, revision: str | None) -> Exception | None:
    """Return the reason why the repository can't be downloaded now; None if it can.

    The download makes the same request, but without a timeout for a hub that accepts connections and never answers.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(model, revision=revision, timeout=_LOOKUP_TIMEOUT_S)
    except Exception as exc:  # as above
        return exc
    return None


def _explain(
    model: str, revision: str | None, problem: Exception, unknown: str, download_dir: Path | None
) -> ModelNotFoundError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(problem, GatedRepoError):
        return ModelNotFoundError(
            f"The Hugging Face model {model!r} is gated: its owner must grant you access. Ask for it on the model's "
            "page, then set HF_TOKEN to your access token."
        )
    if isinstance(problem, RevisionNotFoundError):
        return ModelNotFoundError(f"The Hugging Face model {model!r} has no revision {revision!r}.")
    if isinstance(problem, RepositoryNotFoundError | HFValidationError):
        return ModelNotFoundError(
            f"{unknown} The Hugging Face Hub has no such model, or hides it: check the spelling, and set HF_TOKEN to "
            "your access token if it is private."
        )
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set, so the Hugging Face Hub was not asked; unset it to download the model"
    else:
        why = (
            f"The Hugging Face Hub can't be reached or refused to answer ({_first_line(problem)}); check the network "
            "and the proxy settings"
        )
    other = "set HF_HOME to use" if download_dir is None else "name"
    return ModelNotFoundError(
        f"{unknown} {why}. Nor is it in the local cache of downloaded models, "
        f"{download_dir or constants.HF_HUB_CACHE}: {other} another one, for example one copied from a machine with a "
        "network, or give the path of a folder or .gguf file."
    )


def _first_line(exc: Exception) -> str:
    lines = str(exc).strip().splitlines()
    return (lines[0] if lines else type(exc).__name__)[:200]
