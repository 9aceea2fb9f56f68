"""The text beside a published draft: a model card that says for which verifier, how it was measured, how to serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eaglebook.checkpoint.spec import AUX_IDS, DraftSpec


def serving(
    spec: DraftSpec,
    vllm_draft: str,
    sglang_draft: str = "PATH/TO/OUT",
    verifier: str = "",
    num_speculative_tokens: int = 0,
) -> dict[str, str]:
    """The commands that serve a draft: vLLM's, SGLang's, and the conversion SGLang needs first. Paths as given.

    ``num_speculative_tokens``: 0 for what the checkpoint says, else 3.
    """
    target = verifier or spec.verifier.value or "VERIFIER"
    k = num_speculative_tokens or spec.speculative_tokens.value or 3
    speculative = json.dumps({"method": "eagle3", "model": vllm_draft, "num_speculative_tokens": k})
    return {
        "vLLM": f"vllm serve {target} --speculative-config '{speculative}'",
        "for SGLang first": f"eaglebook convert {vllm_draft} {sglang_draft} --to sglang",
        "SGLang": f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 --speculative-draft-model-path "
        f"{sglang_draft} --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}",
    }


def model_card(
    config: Mapping[str, Any],
    spec: DraftSpec,
    name: str,
    measured: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> str:
    """The README.md of a draft's folder. ``measured``: metrics of a finished 07_serve; ``data``: the manifest of 01_responses.

    Serving commands name the verifier as the checkpoint does, or ``VERIFIER`` when it does not say.
    """
    verifier = spec.verifier.value or "VERIFIER"
    commands = serving(spec, f"PATH/TO/{name}")
    ids = config.get(AUX_IDS) or (config.get("eagle_config") or {}).get(AUX_IDS)
    front = ["---", "library_name: vllm", "tags: [eagle3, speculative-decoding, draft]"]
    front += [f"base_model: {verifier}"] if "/" in str(verifier) else []
    lines = [
        *front, "---", "", f"# {name}", "", f"An EAGLE-3 draft for `{verifier}`. It proposes tokens that the verifier checks, so the output stays the verifier's own.",
        "", "| | |", "|---|---|",
        f"| decoder | {spec.num_hidden_layers.value} layer, hidden {spec.hidden_size.value}, {spec.num_attention_heads.value} heads of {spec.head_dim.value}, {spec.num_key_value_heads.value} key-value heads |",
        f"| draft vocabulary | {spec.draft_vocab_size.value} of {spec.vocab_size.value} tokens |",
        f"| aux hidden state layer ids | {ids}, counting the input of a layer |",
        f"| norms | {', '.join(f'{flag} {str(bool(getattr(spec, flag).value)).lower()}' for flag in ('norm_before_residual', 'norm_before_fc', 'fc_norm', 'norm_output'))} |",
        "", "## Serve it", "", "vLLM 0.22 or newer:", "", "```", commands["vLLM"], "```", "",
        "SGLang counts the layers of the ids in another way: convert first, then serve.", "", "```", commands["for SGLang first"], commands["SGLang"], "```", "",
    ]  # fmt: skip
    return "\n".join([*lines, *_data(data), *_measured(measured)]) + "\n"


def _data(manifest: Mapping[str, Any] | None) -> list[str]:
    if not manifest:
        return []
    metrics, params = manifest.get("metrics") or {}, manifest.get("params") or {}
    kind, colon, path = str(params.get("prompt_source", "")).partition(":")
    shown = kind + colon + path.rsplit("/", 1)[-1]  # a whole path would name one machine
    return ["## Trained on", "", f"{metrics.get('answer', 'Answers of the verifier itself.')} Prompts: `{shown}`.", ""]


def _measured(run: Mapping[str, Any] | None) -> list[str]:
    if not run:
        return ["## Measured", "", "Nothing was measured for this card.", ""]
    rows = []
    for name, value in (run.get("acceptance") or {}).items():
        rates = " / ".join(f"{rate:.3f}" for rate in value.get("position_rates", ()))
        rows.append(f"| {name} | {value['mean_acceptance_length']:.3f} | {rates} |")
    how = f"temperature {run['temperature']:g}" if run.get("temperature") else "greedy"
    lines = [
        "## Measured",
        "",
        f"By vLLM's own counters, {how}, {run.get('num_speculative_tokens', '?')} draft tokens a step.",
        "",
        "| prompts | mean acceptance length | accepted by position |",
        "|---|---|---|",
        *rows,
        "",
    ]
    if isinstance(run.get("speed_up"), int | float):
        flight = run.get("speed_up_concurrency", 1)
        lines += [f"Speed against the verifier alone, with {flight} in flight: {run['speed_up']:.2f}.", ""]
    return lines
