"""The one spelling of a draft's tensor names that the rest of this package works with: ``layers.0.…``, no prefixes.

Trainers save under wrappers (``module.``, ``draft_model.``), the original EAGLE-3 calls its only layer ``midlayer``,
vLLM's own state dict calls the map ``draft_id_to_target_id``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_DRAFT_WRAPPERS = ("draft_model.", "eagle_module.", "eagle3.", "ea_layer.", "drafter.", "speculator.")
_WRAPPERS = ("module.", "_orig_mod.", *_DRAFT_WRAPPERS, "model.")
_ROOTS = (
    "layers.", "midlayer.", "fc.", "fc_norm.", "input_norm.", "norm.", "lm_head.", "embed_tokens.", "d2t", "t2d",
    "draft_id_to_target_id", "mask_hidden",
)  # fmt: skip


def owned(stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Stored names of the draft with their plain names, and the names that belong to a verifier saved beside it.

    A trainer that wraps both (``eagle_module.fc…`` beside ``model.layers.0…``) leaves no doubt which is which: tensors in a
    draft's own wrapper are the draft's. Without one, ``model.`` names are the verifier's when a draft stands outside them.
    """
    names = list(stored)
    wrapped = [n for n in names if n.removeprefix("module.").startswith(_DRAFT_WRAPPERS)]
    outside = [n for n in names if n.startswith(("fc.", "midlayer.")) or n == "layers.0.hidden_norm.weight"]
    beside = any(n.removeprefix("module.").startswith("model.layers.") for n in names)
    own_layers = any("model." in n and "hidden_norm" in n for n in names)  # the draft itself stands under model.
    foreign = []
    if wrapped and beside:
        foreign = [n for n in set(names) - set(wrapped) if n.removeprefix("module.").startswith(("model.", "lm_head."))]
    elif outside and beside and not own_layers:
        foreign = [n for n in names if n.startswith("model.")]
    foreign += [n for n in names if n.startswith(("verifier_", "target_model."))]
    return {n: plain(n) for n in names if n not in set(foreign)}, foreign


def unwrapped(name: str) -> str:
    """``name`` without the wrappers a trainer put around a draft; unchanged when it is no draft's tensor inside."""
    inner = name
    while True:
        wrapper = next((w for w in _WRAPPERS if inner.startswith(w)), "")
        if not wrapper:
            return inner if inner.startswith(_ROOTS) else name
        inner = inner.removeprefix(wrapper)


def plain(name: str) -> str:
    """The name in this package's spelling: unwrapped, ``midlayer.`` as ``layers.0.``, the map as ``d2t``."""
    inner = re.sub(r"^midlayer\.", "layers.0.", unwrapped(name))
    return "d2t" if inner.removeprefix("model.") == "draft_id_to_target_id" else inner


def layer(name: str) -> int | None:
    """The number of the decoder layer a plain name belongs to."""
    match = re.match(r"layers\.(\d{1,4})\.", name)
    return int(match[1]) if match else None
