"""What changed for EAGLE-3 drafts from one vLLM to the next, and which of it concerns this draft."""

from __future__ import annotations

from dataclasses import dataclass

from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.formats import NESTED
from eaglebook.checkpoint.vllm_rules import Version


@dataclass(frozen=True)
class Change:
    """``since``: the first version that does ``what``. ``here``: what it means for this draft, "" when it is not concerned."""

    since: Version
    what: str
    here: str


def changes(case: Case) -> list[Change]:
    """Every known change in the order of versions."""
    spec, facts = case.spec, case.verifier
    flags = [flag for flag in ("fc_norm", "norm_output") if getattr(spec, flag).value]
    count = len(spec.aux_layer_ids.value or ())
    registered = rules.ARCHITECTURES.get(rules.rewritten((spec.architectures.value or [""])[0]))
    architecture = (spec.architectures.value or ["?"])[0]
    nested_ids = spec.aux_layer_ids.where.startswith("eagle_config")
    stretching = (spec.rope.value or {}).get("rope_type") in rules.STRETCHING_ROPE
    short = bool(facts and (spec.max_position_embeddings.value or 0) < (facts.max_position_embeddings or 0))
    full = spec.draft_vocab_size.value is not None and spec.draft_vocab_size.value == case.target_vocab
    last = bool(facts and facts.num_layers in (spec.aux_layer_ids.value or ()))
    listed = not facts or any(name in (facts.model_type or "") for name in rules.TARGET_WHITELIST)
    known = [
        (
            (0, rules.TARGET_WHITELIST_UNTIL[1] + 1),
            f"verifiers are no longer limited to a list ({', '.join(rules.TARGET_WHITELIST)})",
            "" if listed else "before, this verifier is refused",
        ),
        (rules.NORM_BEFORE_FC, "norm_before_fc is honoured", "before, it is ignored: accepts little" if spec.norm_before_fc.value else ""),
        (rules.LAST_LAYER_ID, "an aux id may be the number of layers", "before, that state is never captured" if last else ""),
        (rules.FC_NORM, "fc_norm and norm_output are honoured", f"before, {' and '.join(flags)} ignored: accepts little" if flags else ""),
        (rules.AUX_COUNT, "another number of aux states than three", f"before, {count} are refused" if count not in (0, 3) else ""),
        (rules.NESTED_AUX_IDS, "ids in eagle_config alone are read (V1 runner)", "before, the verifier's default ids are used" if nested_ids else ""),
        (rules.CPU_SERVES, "a CPU drafts", "before, on a CPU, it is refused (up to 0.19) or cannot draft"),
        (rules.SPECULATORS_QWEN3, "Qwen3 drafts in the speculators layout", "before, refused" if _nested_qwen3(case) else ""),
        (rules.STRAY_BIAS_DROPPED, "a .bias without a place is dropped", "before, a KeyError" if _biases(case) else ""),
        (rules.ROPE_TABLE_FOLLOWS_VERIFIER, "max_position_embeddings is raised to the verifier's", "before, positions past it draft nothing" if short else ""),
        (rules.D2T_FORBIDDEN_WHEN_FULL, "d2t is refused beside a full vocabulary", "from here on, refused" if full and "d2t" in case.stored else ""),
        (rules.V2_BY_DEFAULT, "the V2 runner is the default on a GPU", "from here on, on a GPU, the verifier's default ids are used" if nested_ids else ""),
        (rules.ROPE_TABLE_ONLY_SAFE_TYPES, "but not for dynamic and longrope", "before, its frequencies change with that length" if stretching and short else ""),
    ]  # fmt: skip
    if registered and registered[1] > rules.OLDEST:
        known.append((registered[1], f"the architecture {architecture} is registered", "before, refused"))
    return [Change(*change) for change in sorted(known, key=lambda c: c[0])]


def _nested_qwen3(case: Case) -> bool:
    return case.format.layout == NESTED and case.spec.model_type.value == "qwen3"


def _biases(case: Case) -> bool:
    return any(name.endswith(".bias") for name in case.stored)
