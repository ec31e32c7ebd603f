"""Heads that draft from hidden states: their layout, what training does to them, and the command."""

from __future__ import annotations

import json
import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from toy_models import save_decoder

from octavo import LLM
from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.features.speculation.eagle.command import _context
from octavo.features.speculation.eagle.corpus import Example, Target
from octavo.features.speculation.eagle.head import EagleHead, HeadShape, Passes, load_head, save_head
from octavo.features.speculation.eagle.prompts import read_prompts, write_prompts
from octavo.features.speculation.eagle.training import Recipe, acceptance, frequent_tokens, train

SHAPE = HeadShape(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=40,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


def scrambled(head: EagleHead) -> EagleHead:
    """Give all parameters random values, also those that begin as zeros."""
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(torch.randn_like(value) * 0.2)
    return head


def test_a_head_is_written_as_published_ones_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head, table = scrambled(EagleHead(SHAPE)), torch.randn(40, 32)
    save_head(head, table, tmp_path, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "layers.0."
    attention = [f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert set(stored) == {
        *("embed_tokens.weight", "fc.weight", "fc.bias", f"{layer}post_attention_layernorm.weight"),
        *attention,
        *mlp,
    }
    assert stored["fc.weight"].shape == (32, 64)
    assert torch.equal(stored["embed_tokens.weight"], table)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["num_key_value_heads"] == 2
    inputs = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    assert torch.equal(load_head(tmp_path)(*inputs), head(*inputs))


def test_its_layer_is_that_of_llama_without_the_first_norm() -> None:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    head = scrambled(EagleHead(SHAPE))
    config = LlamaConfig(**{name: getattr(SHAPE, name) for name in HeadShape.__dataclass_fields__})
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    layer.load_state_dict(head.layers[0].state_dict(), strict=False)
    layer.input_layernorm = nn.Identity()
    embeddings, states = torch.randn(1, 7, 32), torch.randn(1, 7, 32)
    x = head.fc(torch.cat([embeddings, states], -1))
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(7)[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    out = layer(x, attention_mask=mask, position_embeddings=positions)
    expected = out if isinstance(out, Tensor) else out[0]
    torch.testing.assert_close(head(embeddings, states), expected, atol=1e-5, rtol=1e-5)


def cycle(target: Target, begin: int, step: int, length: int = 12) -> Example:
    """A model's answer in which each token is `step` more than the one before; its states name the next token."""
    tokens = (begin + step * torch.arange(length)) % len(target.output)
    states = target.output[(tokens + step) % len(target.output)]
    return Example(tokens, states, num_prompt=3)


def small_target() -> Target:
    torch.manual_seed(0)
    return Target(SHAPE, torch.randn(40, 32), torch.randn(40, 32))


def test_a_trained_head_drafts_what_it_has_learned() -> None:
    target = small_target()
    examples = [cycle(target, begin, step) for begin in range(40) for step in (1, 3)]
    torch.manual_seed(0)
    head = EagleHead(SHAPE)
    tests = [cycle(target, 7, 1), cycle(target, 20, 3)]
    before = acceptance(head, target, tests)
    train(head, target, examples, Recipe(epochs=8, batch=20, rate=1e-2))
    after = acceptance(head, target, tests)
    assert before.first < 0.1
    assert after.first > 0.9
    assert after.length > 1


@torch.no_grad()
def test_later_passes_compute_what_drafts_in_a_row_do() -> None:
    """The draft after each position in pass n is that after n - 1 others, each from the head's own state before."""
    torch.manual_seed(0)
    head = scrambled(EagleHead(SHAPE)).double()
    embedded, states = torch.randn(2, 7, 32).double(), torch.randn(2, 7, 32).double()
    passes: Passes = []
    given = states
    for number in range(3):
        predicted = head(embedded, given, passes)
        for place in range(number, 7):
            known = place + 1 - number
            row = states[:, :known]
            for count in range(known, place + 1):
                row = torch.cat([row, head(embedded[:, :count], row)[:, -1:]], dim=1)
            expected = head(embedded[:, : place + 1], row)[:, -1]
            torch.testing.assert_close(predicted[:, place], expected)
        given = torch.cat([states[:, :1], predicted[:, :-1]], dim=1)


def test_answers_may_have_a_single_token() -> None:
    """Such an answer has no second draft to learn."""
    target, head = small_target(), EagleHead(SHAPE)
    whole = cycle(target, 3, 1)
    short = Example(whole.tokens[:4], whole.states[:4], num_prompt=3)
    losses: list[float] = []
    train(head, target, [short], Recipe(epochs=2, batch=1), lambda step, steps, loss: losses.append(loss))
    assert all(map(math.isfinite, losses))
    assert all(value.isfinite().all() for value in head.parameters())


def test_the_rows_of_drawn_tokens_are_trained_too() -> None:
    target = small_target()
    examples = [cycle(target, begin, 1) for begin in range(20)]
    drawn = frequent_tokens(examples, 25, target)
    output, rows = target.output.clone(), drawn.output.clone()
    train(EagleHead(SHAPE), target, examples, Recipe(epochs=2, batch=10, rate=1e-2), drawn=drawn)
    assert torch.equal(target.output, output)
    assert ((drawn.output - rows).abs().amax(dim=1) > 1e-3).all()
    assert not drawn.output.requires_grad


class Knowing(EagleHead):
    """Returns the states of `example`, `late` positions too early or too late."""

    def __init__(self, example: Example, late: int = 0) -> None:
        super().__init__(SHAPE)
        self.example, self.late = example, late

    def forward(self, embeddings: Tensor, states: Tensor, passes: Passes | None = None) -> Tensor:
        count = states.shape[1]
        return self.example.states[1 + self.late :][:count][None]


def test_acceptance_counts_the_drafts_that_are_the_models_tokens() -> None:
    target = small_target()
    example = cycle(target, 5, 1)
    perfect = acceptance(Knowing(example), target, [example])
    assert (perfect.first, perfect.length, perfect.chain) == (1.0, 3.0, 3)
    short = cycle(target, 5, 1, length=16)
    wrong = acceptance(Knowing(short, late=1), target, [example])
    assert (wrong.first, wrong.length) == (0.0, 0.0)


def test_a_head_may_draw_frequent_tokens_only(tmp_path: Path) -> None:
    target = small_target()
    examples = [cycle(target, 5, 1), cycle(target, 5, 1), cycle(target, 30, 2)]
    drawn = frequent_tokens(examples, 11, target)
    # Answers have 8 to 16 twice each, then 36, 38, 0, 2, ...; of tokens that are seen as often, the lower ones.
    assert drawn.tokens.tolist() == [0, 2, *range(8, 17)]
    assert torch.equal(drawn.output, target.output[drawn.tokens])
    inside, outside = cycle(target, 5, 1), cycle(target, 20, 1)
    assert acceptance(Knowing(inside), target, [inside], drawn=drawn).first == 8 / 9  # the last one is 17
    assert acceptance(Knowing(outside), target, [outside], drawn=drawn).first == 0.0

    save_head(EagleHead(SHAPE), target.embeddings, tmp_path, drawn=drawn, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(11), drawn.tokens)
    assert torch.equal(stored["lm_head.weight"], drawn.output)
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 11
    assert load_head(tmp_path).shape == SHAPE


def test_prompts_are_read_from_lines_of_json_or_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "One"}\n\n{"messages": [{"role": "user", "content": "Two"}]}\nThree\n')
    assert read_prompts(file) == ["One", [{"role": "user", "content": "Two"}], [{"role": "user", "content": "Three"}]]
    # JSON may have other line ends in its strings; some editors begin a file with a mark of its byte order.
    file.write_text('\ufeff{"prompt": "a\u2028b\x85c"}\r\nx\n', encoding="utf-8")
    assert read_prompts(file) == ["a\u2028b\x85c", [{"role": "user", "content": "x"}]]
    for text, said in (
        ("{oops}\nx\n", "line 1 is not valid JSON"),
        ('x\n\n{"a": 1}\n', "line 3 has neither"),
        ('x\n{"prompt": ""}\n', "line 2 has neither messages .* or it is empty"),
        ("x\n", "1 prompts"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_prompts(file)


def with_template(folder: Path, template: str) -> str:
    """A tiny model whose users' texts are where the template says."""
    save_decoder(folder, 3)
    template = template.replace("text", "messages[0]['content']")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


@pytest.mark.parametrize(
    ("template", "before", "ends"),
    [
        ("<s>User: {{ text }}</s>Bot:", "<s>User:", {"stop_token_ids": [2], "stop": None}),
        ("User: {{ text }}\n\nBot: ", "User:", {"stop_token_ids": None, "stop": ["Bot:"]}),
    ],
)
def test_a_written_prompt_is_where_the_template_has_the_users_text(
    template: str, before: str, ends: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    with closing(LLM(with_template(tmp_path / "model", template), device="cpu")) as llm:
        monkeypatch.setattr(llm, "generate", lambda *given, **_: asked.append(given) or [])
        with pytest.raises(ConfigError, match="the model wrote 0 prompts in 11 attempts"):
            write_prompts(llm, 10, context=128, seed=4, progress=lambda *_: None)
        prompts, params = asked[0]
        assert {llm.get_tokenizer().decode(one["prompt_token_ids"]) for one in prompts} == {before}
    assert [one.seed for one in params] == list(range(4, 15))
    assert all(getattr(one, name) == value for one in params for name, value in ends.items())


def test_written_prompts_are_whole_and_differ(tmp_path: Path) -> None:
    """The same seed gives the same ones."""
    with closing(LLM(with_template(tmp_path / "model", "e{{ text }}e"), device="cpu")) as llm:

        def written(seed: int) -> list[str]:
            return write_prompts(llm, 5, context=128, seed=seed, progress=lambda *_: None)

        first = written(0)
        assert len(set(first)) == 5
        assert not any("e" in text or text != text.strip() for text in first)
        assert written(0) == first
        assert written(10**6) != first


def test_a_model_without_a_template_writes_no_prompts(tmp_path: Path) -> None:
    with (
        closing(LLM(str(save_decoder(tmp_path / "model", 3)), device="cpu")) as llm,
        pytest.raises(ConfigError, match=r"--write-prompts: the model can't begin a chat: .* Use --data"),
    ):
        write_prompts(llm, 2, context=128, seed=0, progress=lambda *_: None)


@pytest.mark.slow
@pytest.mark.features("pooling")
def test_the_command_trains_a_head_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_decoder(tmp_path / "model", 3, tie_word_embeddings=True)
    (tmp_path / "prompts").write_text("".join(json.dumps({"prompt": f"abc {i}"}) + "\n" for i in range(4)))
    words = ["spec-train", str(model), "--data", str(tmp_path / "prompts"), "-o", str(tmp_path / "head")]
    words += ["--epochs", "2", "--max-tokens", "12", "--context", "64", "--device", "cpu"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "before: " in printed.err
    assert re.match(r"after: [\d.]+% of first drafts accepted; [\d.]+ of 3 drafts in a row\n", printed.out)
    assert load_head(tmp_path / "head").shape.hidden_size == 64
    assert main(words) == 1
    assert "is not empty" in capsys.readouterr().err
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "e{{ messages[0]['content'] }}e"}))
    words[2:6] = ["--write-prompts", "5", "-o", str(tmp_path / "another")]
    assert main([*words, "--draft-vocab", "50"]) == 0
    assert "written prompts: 5 of 5" in capsys.readouterr().err


def test_the_command_is_listed_and_refuses_odd_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "spec-train" in capsys.readouterr().out
    odd = (
        ("--write-prompts", "1"),
        ("--epochs", "0"),
        ("--held-out", "1"),
        ("--context", "2"),
        ("--learning-rate", "nan"),
        ("--draft-vocab", "0"),
    )
    for flag, value in odd:
        assert main(["spec-train", "m", "--data", "d", "-o", str(tmp_path / "h"), flag, value]) == 1
        assert f"{flag} {value.removesuffix('.0')}" in capsys.readouterr().err.replace("1.0", "1")
    assert main(["spec-train", "m", "-o", str(tmp_path / "h")]) == 1
    assert "give --data FILE, --write-prompts N, or both" in capsys.readouterr().err
    (tmp_path / "two").write_text("a\nb\n")
    assert main(["spec-train", "m", "--data", str(tmp_path / "two"), "-o", "h", "--held-out", "0.8"]) == 1
    assert "--held-out 0.8 leaves none of the 2 prompts to train on" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["spec-train", "m", "--data", "d", "-o", str(tmp_path / "file")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    for device in ("auto", "cuda:1"):  # a training step has one device by name
        with pytest.raises(SystemExit):
            main(["spec-train", "m", "--data", "d", "-o", str(tmp_path / "h"), "--device", device])
        assert "--device" in capsys.readouterr().err


def test_prompts_and_answers_fit_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest is that of the model where it is less than the default; an encoder answers nothing."""
    assert [_context(given, longest) for given, longest in ((None, 64), (None, 4096), (64, 64))] == [64, 512, 64]
    model = save_decoder(tmp_path / "model", 3)
    (tmp_path / "prompts").write_text("a\nb\n")
    words = ["spec-train", str(model), "--data", str(tmp_path / "prompts"), "-o", str(tmp_path / "head")]
    for flag in ("--context", "--draft-vocab"):
        assert main([*words, flag, "1000000"]) == 1
        assert f"{flag} 1000000: the model has" in capsys.readouterr().err
    (tmp_path / "prompts").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "word " * 400}) + "\n")
    assert main([*words, "--device", "cpu"]) == 1
    assert "Prompt 2 of 2 can't be answered: This model's maximum context length is 128" in capsys.readouterr().err
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    assert main(words) == 1
    assert "makes embeddings; heads draft for models that generate" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
