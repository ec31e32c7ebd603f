"""The forms in which checkpoints have a layer for multi-token prediction (https://arxiv.org/abs/2412.19437, 2.2).

All of them project a normed embedding and the target's normed state to the input of one layer like the target's. They
differ in the names of tensors and in the choices of `MtpForm`.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class MtpForm:
    """One form; compared by identity.

    Attributes:
        marks: beginnings of the names of its tensors; empty for DeepSeek's, which has those of `model.layers.N`.
        layer: what stands before the names of the decoder layer's tensors.
        own: names of the other tensors, without ".weight" -> those of DeepSeek's form.
        state_first: the projection reads state and embedding in this order.
        masks_first: the first pair of a sequence has no embedding.
        normed: further drafts are made from states after its last norm.
        final_norm: it has a norm before the output head.
        dense: its feed-forward is like that of the target's first layer, in place of the last one's.
    """

    marks: tuple[str, ...] = ()
    layer: str = ""
    own: dict[str, str] = field(default_factory=dict)
    state_first: bool = False
    masks_first: bool = True
    normed: bool = False
    final_norm: bool = True
    dense: bool = False

    def renaming(self, last: int) -> Callable[[str], str | None]:
        """Return the renaming of its tensors to those of DeepSeek's form, in the layer `last`."""
        at = f"model.layers.{last}."
        names = {f"{name}.weight": f"{at}{ours}.weight" for name, ours in self.own.items()}

        def renamed(name: str) -> str | None:
            if name in names:
                return names[name]
            return at + name.removeprefix(self.layer) if name.startswith(self.layer) else None

        return renamed


DEEPSEEK = MtpForm()
"""DeepSeek V3, GLM-4.5: `enorm`, `hnorm`, `eh_proj` and `shared_head` in a layer behind the last one."""
QWEN = MtpForm(
    marks=("mtp.",),
    layer="mtp.layers.0.",
    own={
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.fc": "eh_proj",
        "mtp.norm": "shared_head.norm",
    },
    masks_first=False,
    normed=True,
)
"""https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct."""
MIMO = MtpForm(
    marks=("model.mtp_layers.",),
    layer="model.mtp_layers.0.",
    own={
        "model.mtp_layers.0.token_layernorm": "enorm",
        "model.mtp_layers.0.hidden_layernorm": "hnorm",
        "model.mtp_layers.0.input_proj": "eh_proj",
        "model.mtp_layers.0.final_layernorm": "shared_head.norm",
    },
    state_first=True,
    normed=True,
)
"""MiMo (https://arxiv.org/abs/2505.07608)."""
ERNIE = MtpForm(
    marks=("model.mtp_block.",),
    layer="model.mtp_block.0.",
    own={
        "model.mtp_emb_norm.0": "enorm",
        "model.mtp_hidden_norm.0": "hnorm",
        "model.mtp_linear_proj.0": "eh_proj",
    },
    final_norm=False,
    dense=True,
)
"""ERNIE 4.5 with experts (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf)."""


def form_of(names: Set[str]) -> MtpForm:
    """Return the form of a checkpoint with these tensors."""
    marked = (form for form in (QWEN, MIMO, ERNIE) if any(name.startswith(form.marks) for name in names))
    return next(marked, DEEPSEEK)
