"""The chat page of a model that reads images."""

from __future__ import annotations

import re

import msgspec
from server_kit import get_now, make_house, saying

from octavo.features.media.decode import FORMATS
from octavo.features.media.payload import NAME, MediaInfo

BROWSER = {"accept": "text/html"}


def page(info: MediaInfo) -> tuple[str, str]:
    """Return the page, and its policy."""
    facts = {NAME: msgspec.Raw(msgspec.msgpack.encode(info))}
    app = make_house(saying("x"), features=[NAME], feature_info=facts).app
    answer = get_now(app, "/", headers=BROWSER)
    return answer.body.decode(), answer.headers["content-security-policy"]


def test_images_can_be_attached() -> None:
    text, policy = page(MediaInfo(limit=4))
    (button,) = re.findall(r'<button id="attach"[^>]*>', text)
    assert "hidden" not in button
    assert 'accept="image/png,image/jpeg,' in text
    assert policy.endswith("; img-src data:; media-src data:")


def test_images_that_the_model_can_not_read_are_not_offered() -> None:
    text, policy = page(MediaInfo(refused="its tower is not known"))
    (button,) = re.findall(r'<button id="attach"[^>]*>', text)
    assert "hidden" in button
    assert 'accept=""' in text
    assert "img-src" not in policy


def test_what_can_be_attached_is_read() -> None:
    text, _ = page(MediaInfo(limit=4))
    (accept,) = re.findall(r'accept="(.*?)"', text)
    assert {one.removeprefix("image/").upper() for one in accept.split(",")} <= set(FORMATS)
