"""Models in Hugging Face repositories, through `huggingface_hub`, whose cache and settings (HF_HOME, HF_TOKEN) hold."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.core.errors import ModelNotFoundError
from octavo.hub.progress import Progress

# A repository that can't be looked up within this many seconds is taken from the cache, or not at all.
_LOOKUP_TIMEOUT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
# Folders hold other formats of the same model; consolidated.safetensors holds the same weights under other names.
_NOT_WANTED = ("*/*", "consolidated*")


def looks_like_repository(model: str) -> bool:
    return len(model) <= 200 and _NAME.fullmatch(model) is not None and ".." not in model


def fetch_repository(
    model: str, *, revision: str | None, weights: bool, unknown: str, progress: Progress | None = None
) -> Path:
    """The folder of a repository's snapshot, of which only the needed files are downloaded.

    Without a network, or with HF_HUB_OFFLINE=1, what an earlier run has downloaded is used.

    Args:
        unknown: the beginning of the error's text: where else was looked.

    Raises:
        ModelNotFoundError: no such repository, no access, or no network and nothing in the cache.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if progress is not None:
        progress(f"looking up {model} on the Hugging Face Hub", 0, 0)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=[*_SMALL_FILES, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_NOT_WANTED),
            etag_timeout=_LOOKUP_TIMEOUT_S,
        )
    except GatedRepoError as exc:
        raise ModelNotFoundError(
            f"The Hugging Face model {model!r} needs its owner's consent. Ask for it on the model's page, then set "
            "HF_TOKEN to your access token."
        ) from exc
    except RevisionNotFoundError as exc:
        raise ModelNotFoundError(f"The Hugging Face model {model!r} has no revision {revision!r}.") from exc
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise ModelNotFoundError(
            f"{unknown} The Hugging Face Hub has no such model, or hides it: check the spelling, and set HF_TOKEN to "
            "your access token if it is private."
        ) from exc
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as exc:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set, so the Hugging Face Hub was not asked; unset it to download the model"
        else:
            why = (
                "The Hugging Face Hub can't be reached or refused to answer "
                f"({_first_line(exc)}); check the network and the proxy settings"
            )
        raise ModelNotFoundError(
            f"{unknown} {why}. Nor is it in the local cache of downloaded models, {constants.HF_HUB_CACHE}: set "
            "HF_HOME to use another one, for example one copied from a machine with a network, or give the path of a "
            "folder or .gguf file."
        ) from exc
    return Path(folder)


def _first_line(exc: Exception) -> str:
    lines = str(exc).strip().splitlines()
    return (lines[0] if lines else type(exc).__name__).removeprefix("Got: ")[:200]
