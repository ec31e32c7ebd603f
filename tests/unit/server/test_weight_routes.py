"""Routes by which trainers give the model other weights, and call methods by name."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import House, ask_now, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.pausing import PauseMode

DISK = "/update_weights_from_disk"


@pytest.fixture
def house() -> House:
    return make_house(saying("hi"), ServerConfig(server_dev_mode=True))


def test_weights_come_from_a_folder(house: House) -> None:
    body = {"model_path": "/new", "load_format": "safetensors", "weight_version": "7", "flush_cache": False}
    assert ask_now(house.app, DISK, body).json() == {
        "success": True,
        "message": "Succeeded to update model weights.",
        "weight_version": "7",
        "num_paused_requests": 0,
    }
    assert get_now(house.app, "/weight_info").json() == {"weight_version": "7"}
    assert get_now(house.app, "/server_info").json()["weight_version"] == "7"
    assert ask_now(house.app, DISK, {"model_path": "/new", "abort_all_requests": True}).status == 200
    keep = {"mode": PauseMode.KEEP, "flush_cache": False, "version": "7"}
    abort = {"mode": PauseMode.ABORT, "flush_cache": True, "version": None}
    assert house.engine.commands == [
        ("update_weights", "/new", "safetensors", keep),
        ("update_weights", "/new", None, abort),
    ]
    assert get_now(house.app, "/get_world_size").json() == {"world_size": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": 3}, "model_path"),
        ({"model_path": "/odd"}, "model_path"),
        ({"model_path": "/new", "flush_cache": "no"}, "flush_cache"),
        ({"model_path": "/new", "weight_version": 7}, "weight_version"),
    ],
)
def test_what_can_not_be_is_refused(house: House, body: Any, param: str) -> None:
    answer = ask_now(house.app, DISK, body)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert house.engine.commands == []


def test_tensors_are_sent_by_files(house: House) -> None:
    told = [
        ("/init_weight_transfer_engine", {"init_info": {}}, "Weight transfer initialized"),
        ("/start_weight_update", None, "Weight update started"),
        ("/update_weights", {"update_info": {"path": "/dev/shm/1.safetensors"}}, "Weights updated"),
        ("/finish_weight_update", {"weight_version": "step-3"}, "Weight update finished"),
        ("/finish_weight_update", None, "Weight update finished"),
    ]
    for path, body, message in told:
        assert ask_now(house.app, path, body).json()["message"] == message
    assert house.engine.commands == [
        ("begin_weights",),
        ("receive_weights", {"path": "/dev/shm/1.safetensors"}),
        ("update_weights", None, None, {"received": True, "flush_cache": True, "version": "step-3"}),
        ("update_weights", None, None, {"received": True, "flush_cache": True, "version": None}),
    ]
    nccl = {"init_info": {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}}
    refused = ask_now(house.app, "/init_weight_transfer_engine", nccl)
    assert (refused.status, refused.error()["param"]) == (400, "init_info")
    for path, param in (("/init_weight_transfer_engine", "init_info"), ("/update_weights", "update_info")):
        assert ask_now(house.app, path, {}).error()["param"] == param


def test_methods_are_called_by_name(house: House) -> None:
    def call(method: Any, *args: Any, **kwargs: Any) -> Any:
        return ask_now(house.app, "/collective_rpc", {"method": method, "args": args, "kwargs": kwargs})

    assert call("reload_weights").json() == {"results": [None]}
    assert call("reload_weights", "/new", weight_version="9").json() == {"results": [None]}
    assert call("get_weight_version").json() == {"results": ["9"]}
    assert call("check_health").json() == call("reset_prefix_cache").json() == {"results": [None]}
    assert call("profile", profile_prefix="x").json() == {"results": [None]}
    assert call("profile", False).json() == {"results": ["/profiles/fake.json"]}
    assert house.engine.commands == [
        ("update_weights", None, None, {"version": None}),
        ("update_weights", "/new", None, {"version": "9"}),
        ("start_profile", "x"),
        ("stop_profile",),
    ]
    assert house.engine.resets == 1
    for answer, param in (
        (call("__init__"), "method"),
        (call(None), "method"),
        (call("load_model"), "method"),
        (call("reload_weights", "/new", more=1), "args"),
        (call("reload_weights", 3), "weights_path"),
        (call("reload_weights", is_checkpoint_format=False), "is_checkpoint_format"),
    ):
        assert (answer.status, answer.error()["param"]) == (400, param)
    house.engine.die("It burnt.")
    assert call("check_health").status == 503


def test_none_of_it_is_there_without_the_flag() -> None:
    house = make_house(saying("hi"))
    for path in (DISK, "/start_weight_update", "/collective_rpc"):
        assert ask_now(house.app, path, {}).status == 404
