"""The Hugging Face Hub, which models are downloaded from. It is asked only with --online: work without a network is
fine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.request import getproxies

from octavo.cli.doctor.check import Area, Check, Finding, Wish, broken, fine, warning

_PATIENCE_S = 5.0
_TRUE = ("1", "true", "yes", "on")
_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What is known of the hub.

    Attributes:
        offline: the variable that forbids to ask it; "" for none.
        asked: it was asked.
        problem: why it does not answer; "" if it does.
        status: HTTP status of its answer to the question whose access token this is; 0 without one.
        has_token: there is an access token.
        proxy: that its requests go through.
    """

    offline: str = ""
    asked: bool = False
    problem: str = ""
    status: int = 0
    has_token: bool = False
    proxy: str = ""


def read(wish: Wish) -> Hub:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    offline = next((name for name in names if os.environ.get(name, "").lower() in _TRUE), "")
    proxy = getproxies().get("https", "")
    if offline or not wish.online:
        return Hub(offline=offline, proxy=proxy)
    from huggingface_hub import constants, get_token

    token = get_token()
    problem, status = ask(constants.ENDPOINT, token)
    return Hub(asked=True, problem=problem, status=status, has_token=token is not None, proxy=proxy)


def ask(endpoint: str, token: str | None, patience_s: float = _PATIENCE_S) -> tuple[str, int]:
    """Ask the hub whose token this is, or whether it answers. Return why it does not ("" if it does), and the status of
    its answer."""
    import httpx

    path, headers = ("/api/whoami-v2", {"Authorization": f"Bearer {token}"}) if token else ("/api/models?limit=1", {})
    try:
        return "", httpx.get(endpoint + path, headers=headers, timeout=patience_s, follow_redirects=True).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{endpoint} does not answer ({type(error).__name__}: {error})", 0


def judge_reachable(found: Hub) -> Finding:
    if found.offline:
        return fine(f"it is not asked ({found.offline} is set); models on this machine are used")
    if not found.asked:
        return fine("it is not asked without --online; models on this machine need none")
    through = f", through the proxy {found.proxy}" if found.proxy else ""
    if found.problem:
        return warning(
            f"{found.problem}{through}: models can't be downloaded, and those on this machine work",
            "check the network and https_proxy, set HF_ENDPOINT to a mirror, or copy the model and name its folder",
        )
    if found.status >= 500:
        return warning(f"it answers with status {found.status}{through}", "try again later")
    return fine(f"it answers{through}")


def judge_token(found: Hub) -> Finding | None:
    if not found.asked or found.problem:
        return None
    if not found.has_token:
        return fine("there is none, which is enough for public models")
    if found.status in _REFUSED:
        return broken(
            f"the hub refuses the access token (status {found.status}): downloads fail, of public models, too",
            "make a new token on the hub's settings page and set HF_TOKEN to it, or remove it (hf auth logout)",
        )
    return fine("the hub takes it")


AREA = Area("model hub", read, (Check("network", judge_reachable), Check("access token", judge_token)))
