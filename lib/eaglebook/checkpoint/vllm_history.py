"""What changed for EAGLE-3 drafts from one vLLM to the next, and which of it concerns this draft."""

from __future__ import annotations

from dataclasses import dataclass

from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.formats import NESTED
from eaglebook.checkpoint.vllm_rules import Version


@dataclass(frozen=True)
class Change:
    """``since``: the first version that knows ``what``. ``here``: what it means for this draft, "" when it is not concerned."""

    since: Version
    what: str
    here: str


def changes(case: Case) -> list[Change]:
    """Every known change in the order of versions."""
    spec, facts = case.spec, case.verifier
    flags = [flag for flag in ("fc_norm", "norm_output") if getattr(spec, flag).value]
    ids = spec.aux_layer_ids.value or []
    nested_ids = spec.aux_layer_ids.where.startswith("eagle_config")
    architecture = (spec.architectures.value or ["?"])[0]
    registered = rules.ARCHITECTURES.get(rules.rewritten(architecture), ("", rules.OLDEST))[1]
    stretching = (spec.rope.value or {}).get("rope_type") in rules.STRETCHING_ROPE
    short = bool(facts and (spec.max_position_embeddings.value or 0) < (facts.max_position_embeddings or 0))
    full = spec.draft_vocab_size.value is not None and spec.draft_vocab_size.value == case.target_vocab
    after_the_list = (0, rules.TARGET_WHITELIST_UNTIL[1] + 1)
    known: list[tuple[Version, str, bool, str]] = [
        (after_the_list, "any verifier family", _unlisted(case), "before, refused"),
        (rules.NORM_BEFORE_FC, "norm_before_fc", bool(spec.norm_before_fc.value), "before, ignored: accepts little"),
        (rules.LAST_LAYER_ID, "an aux id of the last output", bool(facts and facts.num_layers in ids), "before, never captured"),
        (rules.FC_NORM, "fc_norm and norm_output", bool(flags), f"before, {' and '.join(flags)} ignored: accepts little"),
        (rules.AUX_COUNT, "other than three aux states", len(ids) not in (0, 3), f"before, {len(ids)} are refused"),
        (rules.NESTED_AUX_IDS, "ids in eagle_config only", nested_ids, "before, the verifier's default ids are used"),
        (rules.CPU_SERVES, "drafting on a CPU", True, "before, a CPU refuses (to 0.19) or never drafts"),
        (rules.SPECULATORS_QWEN3, "Qwen3 in the speculators layout", _nested_qwen3(case), "before, refused"),
        (rules.STRAY_BIAS_DROPPED, "a bias without a place is dropped", _biases(case), "before, a KeyError"),
        (rules.ROPE_TABLE_FOLLOWS_VERIFIER, "as many positions as the verifier", short, "before, drafts nothing past its own"),
        (rules.D2T_FORBIDDEN_WHEN_FULL, "no d2t beside a full vocabulary", full and "d2t" in case.stored, "refused from here on"),
        (rules.V2_BY_DEFAULT, "another runner on a GPU", nested_ids, "from here on, on a GPU, the default ids are used"),
        (rules.ROPE_TABLE_ONLY_SAFE_TYPES, "its own length if rope stretches", stretching and short, "before, other frequencies"),
        (registered, f"architecture {architecture}", registered > rules.OLDEST, "before, refused"),
    ]  # fmt: skip
    known.sort(key=lambda change: change[0])
    return [
        Change(since, what, here if concerned else "") for since, what, concerned, here in known if since > rules.OLDEST
    ]


def _unlisted(case: Case) -> bool:
    return case.verifier is not None and not any(name in case.verifier.model_type for name in rules.TARGET_WHITELIST)


def _nested_qwen3(case: Case) -> bool:
    return case.format.layout == NESTED and case.spec.model_type.value == "qwen3"


def _biases(case: Case) -> bool:
    return any(name.endswith(".bias") for name in case.stored)
