"""Routes of other engines that Octavo doesn't have, with the reason or the alternative."""

from __future__ import annotations

ROUTES = {
    "/v1/load_lora_adapter": "this server serves no adapters",
    "/v1/unload_lora_adapter": "this server serves no adapters",
    "/v1/audio/": "transcriptions need a model that reads audio, and speech is not supported by this version",
    "/v1/realtime": "speech is not supported by this version",
    "/v1/images/": "image generation is not supported by this version",
    "/api/": "requests can't load, change or copy models; of Ollama's API, this server has what docs/ollama.md lists",
    "/generate": "POST /v1/completions continues a text",
    "/v1/engines": "GET /v1/models lists the models",
    "/v1/assistants": "use /v1/responses",
    "/v1/threads": "use /v1/responses",
    "/v1/fine_tuning/": "training is not supported",
    "/v1/moderations": "serve a classifier and ask /classify instead",
}
"""Path, or path prefix ending with a slash -> why there is no such route."""
