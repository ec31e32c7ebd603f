"""What an adapter's files say is checked against the model; each refusal names the file, the field and a remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import PREFIX, save_adapter

from octavo.core.errors import ModelFileError
from octavo.features.lora.adapter_file import ROWS, TABLE, WHOLE
from octavo.features.lora.checks import Checker, read_adapter
from octavo.features.lora.layout import Piece, StoredPart, Target, TargetPart
from octavo.features.lora.peft_names import ROLES, ending_of

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def targets_of(layers: int = 2, hidden: int = 32) -> tuple[Target, ...]:
    def target(path: str, *parts: tuple[str, int, int], **kinds: bool) -> Target:
        return Target(path, tuple(TargetPart(name, i, o, i, o) for name, i, o in parts), **kinds)

    found = [target("model.embed_tokens", ("", 50, hidden), embedding=True)]
    for i in range(layers):
        at = f"model.layers.{i}"
        found += [
            target(f"{at}.self_attn", ("q_proj", hidden, hidden), ("k_proj", hidden, 16), ("v_proj", hidden, 16)),
            target(f"{at}.self_attn", ("o_proj", hidden, hidden)),
            target(f"{at}.mlp", ("gate_proj", hidden, 48), ("up_proj", hidden, 48)),
            target(f"{at}.mlp", ("down_proj", 48, hidden)),
        ]
    return (*found, target("", ("lm_head", hidden, 50), head=True))


TARGETS = targets_of()


def changed(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda _: None, **fields: Any) -> Path:
    """Change an adapter's tensors and fields of its configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_fused_projections_are_found_by_their_parts(tmp_path: Path) -> None:
    adapter = save_adapter(
        tmp_path,
        CONFIG,
        seed=1,
        rank=4,
        alpha=2,
        targets=("v_proj", "gate_proj", "embed_tokens", "lm_head"),
        rank_pattern={"gate_proj": 6},
        alpha_pattern={"v_proj": 12},
    )
    assert read_adapter(adapter, TARGETS, 64).manifest.pieces == (
        Piece(0, 0, 4, 0.5),
        Piece(1, 2, 4, 3.0),
        Piece(3, 0, 6, 2 / 6),
        Piece(5, 2, 4, 3.0),
        Piece(7, 0, 6, 2 / 6),
        Piece(9, 0, 4, 0.5),
    )


def test_the_base_of_an_embedding_is_no_saved_module(tmp_path: Path) -> None:
    """PEFT saves it beside adapters of embeddings, and the head, too."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("embed_tokens",))
    extra = {f"{PREFIX}model.embed_tokens.base_layer.weight": (50, 32), f"{PREFIX}lm_head.weight": (50, 32)}
    changed(adapter, lambda tensors: tensors.update({name: torch.zeros(shape) for name, shape in extra.items()}))
    assert [piece.whole for piece in read_adapter(adapter, TARGETS, 64).manifest.pieces] == [False]
    changed(adapter, modules_to_save=["lm_head"])
    file = read_adapter(adapter, TARGETS, 64)
    assert [piece.whole for piece in file.manifest.pieces] == [False, True]
    assert file.tensors[1] == {WHOLE: f"{PREFIX}lm_head.weight"}


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("peft_type", "LOHA", "peft_type is 'LOHA'"),
        ("bias", "all", "bias is 'all'"),
        ("layer_replication", [[0, 1]], "layer_replication is set"),
        ("alora_invocation_tokens", [], "alora_invocation_tokens is []; it must be a list of token ids"),
        ("alora_invocation_tokens", "<|start|>", "alora_invocation_tokens is '<|start|>'; it must be a list"),
        ("alora_invocation_tokens", [3, 50], "token 50 of its invocation tokens is out of vocabulary"),
        (
            "trainable_token_indices",
            [3],
            "has no rows for the tokens of the embedding, which adapter_config.json names",
        ),
        ("trainable_token_indices", {"lm_head": [3]}, "has no rows for the tokens of lm_head, which"),
        ("trainable_token_indices", [3, 3], "has token 3 twice"),
        ("trainable_token_indices", {"lm_head": 3}, "must be a list of token ids, or an object"),
        ("target_parameters", ["mlp.experts.down_proj"], "target_parameters), which adapters can't change here"),
        ("target_parameters", "mlp.experts.down_proj", "it must be a list of names"),
        ("init_lora_weights", "pissa_niter_4", "path_initial_model_for_weight_conversion"),
        ("r", 0, "r is 0; it must be a positive integer"),
        ("lora_alpha", "high", "lora_alpha is 'high'"),
        ("target_modules", 3, "target_modules is 3"),
        ("target_modules", "(q_proj", "is no regular expression"),
        ("rank_pattern", [3], "rank_pattern is [3]"),
        ("rank_pattern", {"(q_proj": 8}, "'(q_proj' is no regular expression"),
        ("layers_to_transform", 1.5, "layers_to_transform is 1.5; it must be the number of a layer"),
        ("layers_pattern", 3, "layers_pattern is 3"),
        ("rank_pattern", {"q_proj": 3}, "q_proj has rank 8, but adapter_config.json makes it 3"),
        ("use_dora", True, "has no magnitude vector, and use_dora"),
    ],
)
def test_fields_that_change_results_are_refused_by_name(field: str, value: Any, text: str, tmp_path: Path) -> None:
    adapter = changed(save_adapter(tmp_path, CONFIG, seed=1), **{field: value})
    with pytest.raises(ModelFileError, match=r"adapter_(config|model)") as error:
        read_adapter(adapter, TARGETS, 64)
    assert text in str(error.value)


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, CONFIG, seed=1)
    with pytest.raises(ModelFileError, match=r"q_proj.* has shape \[8, 32\]; the served model makes it \[rank, 64\]"):
        read_adapter(adapter, targets_of(hidden=64), 64)
    with pytest.raises(
        ModelFileError, match=r"layers.1.* belongs to no layer of the model.*another base model \(tiny\)"
    ):
        read_adapter(adapter, targets_of(layers=1), 64)
    with pytest.raises(ModelFileError, match=r"has nothing for model.layers.2.self_attn.q_proj, which adapter_config"):
        read_adapter(adapter, targets_of(layers=3), 64)
    changed(adapter, lambda tensors: tensors.pop(f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight"))
    with pytest.raises(ModelFileError, match="up_proj lacks its matrix B"):
        read_adapter(adapter, TARGETS, 64)


def renamed(folder: Path, old: str, new: str) -> Path:
    """Change the beginnings of all tensors' names."""
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new, 1): tensor for name, tensor in load_file(path).items()}, path)
    return folder


@pytest.mark.parametrize(
    "root", ["", "model.language_model.", "language_model.model.", "module.model.", "backbone.", "transformer."]
)
def test_what_comes_before_the_layers_may_differ(root: str, tmp_path: Path) -> None:
    """PEFT names modules as the class of Transformers that it changed, which may be one with images."""
    expected = read_adapter(save_adapter(tmp_path, CONFIG, seed=1), TARGETS, 64).manifest
    assert read_adapter(renamed(tmp_path, f"{PREFIX}model.", PREFIX + root), TARGETS, 64).manifest == expected


@pytest.mark.parametrize("root", ["", "model.language_model."])
def test_patterns_are_for_the_names_in_the_file(root: str, tmp_path: Path) -> None:
    """Those of the bare model, or of one with images, not those of the model that is served."""
    adapter = renamed(save_adapter(tmp_path, CONFIG, seed=1, alpha=8), f"{PREFIX}model.", PREFIX + root)
    changed(adapter, alpha_pattern={rf"^{re.escape(root)}layers\.0\.self_attn\.q_proj": 2})
    scales = [piece.scale for piece in read_adapter(adapter, TARGETS, 64).manifest.pieces]
    assert scales == [0.25] + [1.0] * 13


def test_weights_of_modules_as_parameters(tmp_path: Path) -> None:
    """PEFT turns all-linear into them for routers, and matches patterns to the names of the tensors."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("q_proj",), alpha=8)
    changed(adapter, target_modules=[], target_parameters=["q_proj.weight"], alpha_pattern={"q_proj": 16})
    assert [piece.scale for piece in read_adapter(adapter, TARGETS, 64).manifest.pieces] == [1.0, 1.0]
    changed(adapter, alpha_pattern={"layers.1.self_attn.q_proj.weight": 16})
    assert [piece.scale for piece in read_adapter(adapter, TARGETS, 64).manifest.pieces] == [1.0, 2.0]
    with pytest.raises(
        ModelFileError, match=r"q_proj.weight \(.*there is nothing for model.layers.2.self_attn.q_proj.w"
    ):
        read_adapter(adapter, targets_of(layers=3), 64)


@pytest.mark.parametrize("root", ["vision_model.model.", "audio_tower.", "encoder.", "model.vision_tower."])
def test_layers_of_an_encoder_are_none_of_the_decoder(root: str, tmp_path: Path) -> None:
    adapter = renamed(save_adapter(tmp_path, CONFIG, seed=1), f"{PREFIX}model.", PREFIX + root)
    with pytest.raises(ModelFileError, match=rf"{root}layers.* belongs to no layer of the model"):
        read_adapter(adapter, TARGETS, 64)


def test_only_the_stated_layers_are_needed(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("q_proj",))
    changed(adapter, layers_to_transform=[0, 1])
    assert len(read_adapter(adapter, targets_of(layers=4), 64).manifest.pieces) == 2
    with pytest.raises(ModelFileError, match=r"'\(layers' is no regular expression"):
        read_adapter(changed(adapter, layers_pattern="(layers"), targets_of(layers=4), 64)
    changed(adapter, layers_pattern=["layers", "h"])
    assert len(read_adapter(adapter, targets_of(layers=4), 64).manifest.pieces) == 2
    changed(adapter, layers_to_transform=None, exclude_modules=r".*layers\.[23].*")
    assert len(read_adapter(adapter, targets_of(layers=4), 64).manifest.pieces) == 2


def test_ranks_over_the_limit_are_refused(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, CONFIG, seed=1, rank=16)
    with pytest.raises(ModelFileError, match=r"rank 16; this engine takes 1 to 8\. Start it with --max-lora-rank 16"):
        read_adapter(adapter, TARGETS, 8)


def test_files_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is not an adapter: give PEFT's folder"):
        read_adapter(tmp_path / "none", TARGETS, 64)
    with pytest.raises(ModelFileError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path, TARGETS, 64)
    adapter = save_adapter(tmp_path / "a", CONFIG, seed=1)
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelFileError, match=r"a pickle, which can run any code.*safe_serialization=True"):
        read_adapter(adapter, TARGETS, 64)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(ModelFileError, match=r"has no adapter_model\.safetensors"):
        read_adapter(adapter, TARGETS, 64)
    weights.write_bytes(b"12345678901234567890")
    with pytest.raises(ModelFileError, match="is corrupt or truncated"):
        read_adapter(adapter, TARGETS, 64)


def test_other_vocabularies_and_saved_layers_are_refused(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, CONFIG | {"vocab_size": 53}, seed=1, modules_to_save=["lm_head"])
    with pytest.raises(
        ModelFileError, match=r"tensor .*lm_head.weight has 53 tokens, the served model 50. .*adds 3, and this"
    ):
        read_adapter(adapter, TARGETS, 64)
    fewer = save_adapter(tmp_path / "fewer", CONFIG | {"vocab_size": 48}, seed=1, modules_to_save=["embed_tokens"])
    with pytest.raises(
        ModelFileError, match=r"embed_tokens.weight has 48 .*can't remove 2.*resize the base model to 48 tok"
    ):
        read_adapter(fewer, TARGETS, 64)
    name = f"{PREFIX}model.layers.0.mlp.up_proj.weight"
    changed(
        adapter, lambda tensors: tensors.update({name: torch.zeros(48, 32)}), modules_to_save=["lm_head", "up_proj"]
    )
    with pytest.raises(ModelFileError, match=r"both a saved module and a low-rank one|saved embeddings and heads only"):
        read_adapter(adapter, TARGETS, 64)


def test_added_tokens_that_only_copies_of_the_tables_show_are_refused(tmp_path: Path) -> None:
    """PEFT saves the tables of a resized model, and its configuration does not say so."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1)
    for end in ("weight", "base_layer.weight", "token_adapter.base_layer.weight"):
        name = f"{PREFIX}model.embed_tokens.{end}"
        changed(adapter, lambda tensors, name=name: tensors.update({name: torch.zeros(53, 32)}))
        with pytest.raises(
            ModelFileError, match=r"embed_tokens.* has 53 tokens, the served model 50\. The adapter adds 3"
        ):
            read_adapter(adapter, TARGETS, 64)
        changed(adapter, lambda tensors, name=name: tensors.update({name: torch.zeros(50, 32)}))
        assert not any(piece.replaces for piece in read_adapter(adapter, TARGETS, 64).manifest.pieces)


def test_saved_modules_under_three_names_are_one(tmp_path: Path) -> None:
    """PEFT saves them so if it believes that the vocabulary was changed."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1, modules_to_save=["lm_head"])
    names = [f"{PREFIX}lm_head.{kind}.weight" for kind in ("modules_to_save", "original_module")]
    changed(adapter, lambda tensors: tensors.update({name: torch.zeros(50, 32) for name in names}))
    assert read_adapter(adapter, TARGETS, 64).tensors[-1] == {WHOLE: f"{PREFIX}lm_head.weight"}


def test_names_of_saved_modules_may_be_any_ends(tmp_path: Path) -> None:
    """PEFT saves every module whose name ends so, also without a dot before."""
    saved = save_adapter(tmp_path / "a", CONFIG, seed=1, targets=("q_proj",), modules_to_save=["lm_head"])
    changed(saved, modules_to_save=["head"])
    assert read_adapter(saved, TARGETS, 64).manifest.pieces[-1] == Piece(len(TARGETS) - 1, 0, whole=True)
    rows = {"embed_tokens": [4]}
    adapter = save_adapter(tmp_path / "b", CONFIG, seed=1, targets=("q_proj",), trainable_token_indices=rows)
    changed(adapter, trainable_token_indices={"tokens": [4]})
    assert read_adapter(adapter, TARGETS, 64).manifest.pieces[0] == Piece(0, 0, tokens=(4,))


@pytest.mark.parametrize("saved", [["mlp"], None])
def test_weights_that_no_name_in_the_configuration_fits_are_refused(saved: list[str] | None, tmp_path: Path) -> None:
    """PEFT loads them. It saves those of all layers below a module to save."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("q_proj",))
    name = f"{PREFIX}model.layers.0.mlp.up_proj.weight"
    changed(adapter, lambda tensors: tensors.update({name: torch.zeros(48, 32)}), modules_to_save=saved)
    with pytest.raises(ModelFileError, match=r"up_proj.weight replaces the weights .*saved embeddings and heads only"):
        read_adapter(adapter, TARGETS, 64)


def test_the_copy_of_a_biased_heads_bias(tmp_path: Path) -> None:
    """PEFT saves it beside an adapter of the head."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("lm_head",))
    expected = read_adapter(adapter, TARGETS, 64).manifest
    head, inner = f"{PREFIX}lm_head.base_layer.bias", f"{PREFIX}model.layers.0.self_attn.o_proj.base_layer.bias"
    changed(adapter, lambda tensors: tensors.update({head: torch.zeros(50)}))
    assert read_adapter(adapter, TARGETS, 64).manifest == expected
    changed(adapter, lambda tensors: tensors.update({inner: torch.zeros(32)}))
    with pytest.raises(ModelFileError, match=r"o_proj.base_layer.bias belongs to no layer .* Or it changes norms, bia"):
        read_adapter(adapter, TARGETS, 64)


TIED = (*TARGETS[:-1], msgspec.structs.replace(TARGETS[-1], tied=True))


def test_a_saved_embedding_that_stays_tied_is_the_heads_too(tmp_path: Path) -> None:
    """With `ensure_weight_tying`, PEFT saves it twice and names the embedding only; in a resized model more often."""
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("q_proj",), modules_to_save=["embed_tokens"])
    changed(adapter, lambda tensors: tensors.update({f"{PREFIX}lm_head.weight": torch.zeros(50, 32)}))
    whole = [Piece(0, 0, whole=True), Piece(len(TIED) - 1, 0, whole=True)]
    for tied in (False, True):
        changed(adapter, ensure_weight_tying=tied)
        pieces = read_adapter(adapter, TIED, 64).manifest.pieces
        assert [piece for piece in pieces if piece.whole] == whole[: 1 + tied]
    names = [f"{PREFIX}lm_head.{kind}" for kind in ("weight", "modules_to_save.weight", "original_module.weight")]
    names += [f"{PREFIX}model.embed_tokens.weight"]
    changed(adapter, lambda tensors: tensors.update({name: torch.zeros(53, 32) for name in names}))
    pieces = read_adapter(adapter, TIED, 64, 3).manifest.pieces
    assert [piece for piece in pieces if piece.replaces] == [msgspec.structs.replace(one, rows=53) for one in whole]


def test_a_copy_of_rows_as_the_heads(tmp_path: Path) -> None:
    """With save_embedding_layers, PEFT saves the rows of a tied head, too, and names those of the embedding only."""
    rows = {"embed_tokens": [7, 3]}
    adapter = save_adapter(tmp_path, CONFIG, seed=1, targets=("q_proj",), trainable_token_indices=rows)
    copy = f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"
    changed(adapter, lambda tensors: tensors.update({copy: torch.zeros(2, 32)}))
    pieces = read_adapter(adapter, TIED, 64).manifest.pieces
    assert [piece for piece in pieces if piece.tokens] == [Piece(i, 0, tokens=(7, 3)) for i in (0, len(TIED) - 1)]


def test_rows_of_single_tokens(tmp_path: Path) -> None:
    listed = save_adapter(tmp_path / "listed", CONFIG, seed=1, targets=("q_proj",), trainable_token_indices=[7, 3])
    tensor = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    for targets, places in ((TARGETS, [0]), (TIED, [0, len(TIED) - 1])):
        file = read_adapter(listed, targets, 64)
        found = [
            (piece, roles) for piece, roles in zip(file.manifest.pieces, file.tensors, strict=True) if ROWS in roles
        ]
        assert found == [(Piece(place, 0, tokens=(7, 3)), {ROWS: tensor}) for place in places]
    other = {"embed_tokens": [7, 3], "lm_head": [4]}
    both = save_adapter(tmp_path / "both", CONFIG, seed=1, targets=("q_proj",), trainable_token_indices=other)
    assert read_adapter(both, TIED, 64).manifest.pieces[-1] == Piece(len(TIED) - 1, 0, tokens=(4,))


@pytest.mark.parametrize(
    ("settings", "fields", "text"),
    [
        (
            {"trainable_token_indices": [50]},
            {},
            "has token 50 .*the served model has 50 tokens.* to at least 51 tokens",
        ),
        (
            {"trainable_token_indices": [3]},
            {"trainable_token_indices": [3, 4]},
            r"has shape \[1, 32\].* makes it \[2, 32",
        ),
        (
            {"trainable_token_indices": [3], "targets": ("embed_tokens",)},
            {},
            "rows of single tokens .* and other changes",
        ),
        ({"trainable_token_indices": {"lm_head": [3]}}, {"trainable_token_indices": [3]}, "tokens of the embedding"),
    ],
)
def test_rows_of_tokens_that_can_not_be_used(
    settings: dict[str, Any], fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    adapter = changed(save_adapter(tmp_path, CONFIG, seed=1, **settings), **fields)
    with pytest.raises(ModelFileError, match=text):
        read_adapter(adapter, TARGETS, 64)


def test_tokens_that_are_added(tmp_path: Path) -> None:
    """As tables, as copies of tables that the configuration does not name, and as rows that were trained alone."""
    embed, head = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
    ends = {f"{embed}.weight": torch.zeros(53, 32), f"{head}.weight": torch.zeros(53, 32)}

    def read(name: str, *gone: str, **settings: Any) -> Any:
        adapter = save_adapter(tmp_path / name, CONFIG, seed=1, targets=("q_proj",), **settings)
        tensors = {key: value for key, value in ends.items() if key not in gone}
        file = read_adapter(changed(adapter, lambda found: found.update(tensors)), TARGETS, 64, 3)
        assert file.manifest.added_tokens(TARGETS) == 3
        return [
            (piece, roles) for piece, roles in zip(file.manifest.pieces, file.tensors, strict=True) if piece.replaces
        ]

    last = len(TARGETS) - 1
    saved = read("saved", modules_to_save=["embed_tokens", "lm_head"])
    assert [piece for piece, _ in saved] == [Piece(0, 0, whole=True, rows=53), Piece(last, 0, whole=True, rows=53)]
    new = (50, 51, 52)
    copies = read("copies")
    assert copies == [(Piece(i, 0, tokens=new), {TABLE: f"{path}.weight"}) for i, path in ((0, embed), (last, head))]
    ends[f"{embed}.token_adapter.base_layer.weight"] = ends.pop(f"{embed}.weight")
    trained = read("trained", trainable_token_indices=[51, 4])
    assert trained[0][0] == Piece(0, 0, tokens=(51, 4, 50, 52))
    assert set(trained[0][1]) == {ROWS, TABLE}
    assert read("all", f"{embed}.token_adapter.base_layer.weight", trainable_token_indices=[*new])[0][0].tokens == new
    with pytest.raises(
        ModelFileError, match=r"row for the added token 52 and none for 50\. Save the adapter with save_emb"
    ):
        read("some", f"{embed}.token_adapter.base_layer.weight", trainable_token_indices=[51, 52])
    with pytest.raises(
        ModelFileError, match="adds 3 tokens to the embedding and 0 to the head, which must be the same"
    ):
        read("one", f"{head}.weight", trainable_token_indices=[*new])


def test_numbers_in_other_formats_are_refused(tmp_path: Path) -> None:
    def to_integers(tensors: dict[str, Any]) -> None:
        tensors.update({name: tensor.to(torch.int8) for name, tensor in tensors.items()})

    adapter = changed(save_adapter(tmp_path, CONFIG, seed=1), to_integers)
    with pytest.raises(ModelFileError, match="is stored as I8; adapters are read from F32, F16, BF16"):
        read_adapter(adapter, TARGETS, 64)


def test_gguf_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    def written(kind: str, tensor: str, alpha: float | None = 4.0, arch: str = "llama") -> Path:
        path = tmp_path / f"{kind}-{tensor}-{arch}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_type(kind)
        writer.add_string("adapter.type", "lora")
        if alpha is not None:
            writer.add_float32("adapter.lora.alpha", alpha)
        writer.add_tensor(tensor, np.zeros((4, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    with pytest.raises(ModelFileError, match=r"is no LoRA adapter: general\.type is 'model'"):
        read_adapter(written("model", "a"), TARGETS, 64)
    with pytest.raises(ModelFileError, match=r"general\.architecture is 'mistral3', whose order of queries and keys"):
        read_adapter(written("adapter", "blk.0.attn_q.weight.lora_b", arch="mistral3"), TARGETS, 64)
    with pytest.raises(ModelFileError, match=r"tensor blk.0.attn_q.weight is not part of a low-rank pair"):
        read_adapter(written("adapter", "blk.0.attn_q.weight"), TARGETS, 64)
    with pytest.raises(ModelFileError, match=r"blk.9.attn_q.weight.lora_a belongs to no layer"):
        read_adapter(written("adapter", "blk.9.attn_q.weight.lora_a"), TARGETS, 64)
    with pytest.raises(ModelFileError, match=r"adapter\.lora\.alpha is None"):
        read_adapter(written("adapter", "blk.0.attn_q.weight.lora_b", None), TARGETS, 64)


def fused_targets() -> tuple[Target, ...]:
    """Queries, keys and values that a checkpoint has as one module."""
    sizes = (32, 16, 16)
    ends = (32, 48, 64)
    stored = [
        StoredPart("model.layers.0.self_attn.qkv_proj", end - n, end, 64) for n, end in zip(sizes, ends, strict=True)
    ]
    names = zip("qkv", sizes, stored, strict=True)
    parts = tuple(TargetPart(f"{name}_proj", 32, size, 32, size, one) for name, size, one in names)
    return (Target("model.layers.0.self_attn", parts),)


def fused_adapter(folder: Path, module: str, rows: int) -> Path:
    path = f"base_model.model.model.layers.0.self_attn.{module}"
    tensors = {f"{path}.lora_A.weight": torch.zeros(4, 32), f"{path}.lora_B.weight": torch.zeros(rows, 4)}
    folder.mkdir(exist_ok=True)
    before = load_file(folder / "adapter_model.safetensors") if (folder / "adapter_model.safetensors").exists() else {}
    save_file(before | tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return folder


def test_a_module_that_holds_several_projections(tmp_path: Path) -> None:
    found = read_adapter(fused_adapter(tmp_path, "qkv_proj", 64), fused_targets(), 64)
    assert [(piece.part, piece.rank) for piece in found.manifest.pieces] == [(0, 4), (1, 4), (2, 4)]
    with pytest.raises(ModelFileError, match=r"lora_B.weight has shape \[60, 4\]; the served model makes it \[64, 4\]"):
        read_adapter(fused_adapter(tmp_path, "qkv_proj", 60), fused_targets(), 64)


def test_a_projection_twice_is_refused(tmp_path: Path) -> None:
    fused_adapter(tmp_path, "qkv_proj", 64)
    with pytest.raises(ModelFileError, match=r"are the same weights of the model"):
        read_adapter(fused_adapter(tmp_path, "k_proj", 16), fused_targets(), 64)


def test_adapters_of_experts_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"experts.3.down_proj.* belongs to no layer of the model"):
        read_adapter(fused_adapter(tmp_path, "experts.3.down_proj", 32), fused_targets(), 64)


def test_adapters_that_are_alike_are_matched_once(tmp_path: Path) -> None:
    checker = Checker(TARGETS, 64)
    first = checker.read(save_adapter(tmp_path / "first", CONFIG, seed=1))
    second = checker.read(save_adapter(tmp_path / "second", CONFIG, seed=2))
    assert second.form is first.form
    assert second == read_adapter(tmp_path / "second", TARGETS, 64), "as without the first one"
    scaled = checker.read(changed(tmp_path / "second", lora_alpha=1))
    assert scaled.manifest.pieces[0].scale != first.manifest.pieces[0].scale
    weights = tmp_path / "first" / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(
        ModelFileError, match=r"first/adapter_model\.safetensors is corrupt or truncated: its header prom"
    ):
        checker.read(tmp_path / "first")


def test_few_forms_of_adapters_are_kept(tmp_path: Path) -> None:
    checker = Checker(TARGETS, 64)
    ranks = range(1, 11)
    for rank in ranks:
        save_adapter(tmp_path / str(rank), CONFIG, seed=1, rank=rank)
    forms = [checker.read(tmp_path / str(rank)).form for rank in ranks]
    assert len(checker._forms) == 8
    again = [checker.read(tmp_path / str(rank)).form for rank in (10, 1)]
    assert [again[0] is forms[-1], again[1] is forms[0]] == [True, False]


def test_the_longest_ending_of_a_name_counts() -> None:
    for end in ROLES:
        assert ending_of(f"model.layers.0.mlp{end}") == end
    for name in ("", "weight", "lora_A.weight.bias", "model.layers.0.mlp.bias"):
        assert ending_of(name) is None
