"""What a run will cost: disk, memory and time, from configs and parameters alone, before anything is computed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from eaglebook import machine, paths, states_files
from eaglebook.checkpoint.verifier_config import VerifierFacts
from eaglebook.draft_size import Geometry, asked
from eaglebook.params import Preflight
from eaglebook.prompts import load as load_prompts

# Where no rate is given: the share of a processor's measured bf16 GEMM rate that each stage reaches, and what starts cost,
# on the two-core machine of the README. Orders of magnitude; the run itself measures.
_GENERATION_SHARE, _EXTRACTION_SHARE, _TRAINING_SHARE = 0.3, 0.6, 0.42
_SERVER_START_S, _KERNEL_START_S, _LADDER_AND_FAULTS_S, _LOAD_TESTS_S = 40, 12, 150, 320
_QUESTION_TOKENS = 60  # of a question that the verifier writes itself
_BESIDE_WEIGHTS = 6e9  # bytes on a GPU: CUDA, graphs, activations


@dataclass(frozen=True)
class Machine:
    """What a run has. ``memory_bytes``: of one GPU where there are GPUs, else what is free in all."""

    gpus: int
    memory_bytes: float
    free_disk_bytes: float


@dataclass(frozen=True)
class Rates:
    """Tokens a second of each stage, and what is read a second when a server loads the verifier."""

    generation: float
    extraction: float
    training: float
    load_bytes: float


@dataclass(frozen=True)
class Problem:
    """Why a plan does not fit, and what to change."""

    what: str
    expected: str
    found: str
    fix: str


@dataclass(frozen=True)
class Plan:
    """Upper bounds: every prompt and every answer at its longest. Bytes and seconds by stage.

    ``disk_bytes`` is what a stage adds and ``disk_after`` what lies there when it has ended; the deletion of the hidden
    states is in the latter. ``memory_bytes`` is of each GPU where there are GPUs, of the machine otherwise.
    """

    tokens: int
    bytes_per_token: int
    draft: Geometry
    disk_bytes: dict[str, int]
    disk_after: dict[str, int]
    memory_bytes: dict[str, int]
    seconds: dict[str, float]

    @property
    def peak_disk_bytes(self) -> int:
        return max(self.disk_after.values())


def geometry(p: Preflight, facts: VerifierFacts) -> Geometry:
    """The draft of a params file: the verifier's sizes where it says 0."""
    return asked(p, facts, p.draft_vocab_size, len(p.aux_hidden_state_layer_ids) or 3)


def rates(p: Preflight, parameters: int, draft: Geometry, gemm_flops: float) -> Rates:
    """The rates a params file gives, and for those it does not what ``gemm_flops`` of this processor would do."""
    trained = draft.trained + draft.draft_vocab_size * draft.hidden_size
    body = parameters - draft.vocab_size * draft.hidden_size
    return Rates(
        generation=p.generation_tokens_per_s or _GENERATION_SHARE * gemm_flops / (2 * parameters),
        extraction=p.extraction_tokens_per_s or _EXTRACTION_SHARE * gemm_flops / (2 * body),
        training=p.training_tokens_per_s or _TRAINING_SHARE * gemm_flops / (6 * p.ttt_steps * trained),
        load_bytes=p.load_mb_per_s * 1e6 or 1e9,
    )


def of_machine(p: Preflight) -> Machine:
    """The machine a params file plans for; what it leaves at 0 is looked up here."""
    outputs = next(folder for folder in (paths.outputs(), *paths.outputs().parents) if folder.exists())
    return Machine(
        p.gpus or machine.accelerators(),
        p.gpu_memory_gb * 1e9 or machine.memory_to_plan_with(),
        p.free_disk_gb * 1e9 or shutil.disk_usage(outputs).free,
    )


def benchmark_prompts(p: Preflight) -> int:
    """How many benchmark questions are answered beside the prompts."""
    return sum(len(load_prompts(name, p.max_benchmark_prompts)) for name in p.benchmarks)


def estimate(
    p: Preflight, draft: Geometry, weight_bytes: int, speed: Rates, has: Machine, *,
    prompts: int, prompt_tokens: int, benchmark_prompts: int,
) -> Plan:  # fmt: skip
    """Plan of a run. ``prompt_tokens`` is the mean length of the rendered prompts, ``benchmark_prompts`` are answered and
    measured beside them, ``weight_bytes`` are the verifier's."""
    answered = prompts + p.own_questions + benchmark_prompts
    tokens = answered * (prompt_tokens + p.max_new_tokens)
    trained = (prompts + p.own_questions) * (prompt_tokens + p.max_new_tokens)
    states = states_files.sample_bytes(tokens, draft.num_aux, draft.hidden_size, p.storage)
    disk = {
        "01_responses": tokens * 12,
        "02_hidden_states": states,
        "04_train": draft.kept_bytes(p.optimizer, p.epochs) + tokens * 24,
        "05_checkpoint": 2 * draft.checkpoint_bytes,
    }
    after, used = {}, 0
    for stage, size in disk.items():
        used += size
        after[stage] = used
        if stage == "04_train" and p.delete_hidden_states:
            used -= states
    start_s = _KERNEL_START_S + _SERVER_START_S + weight_bytes / speed.load_bytes
    load_tests = 2 + len(set(p.num_speculative_tokens_sweep) - {p.num_speculative_tokens})  # servers that 07 starts
    return Plan(
        tokens=tokens,
        bytes_per_token=states_files.sample_bytes(1, draft.num_aux, draft.hidden_size, p.storage),
        draft=draft,
        disk_bytes=disk,
        disk_after=after,
        memory_bytes=_memory(p, draft, weight_bytes, has.gpus),
        seconds={
            "01_responses": start_s
            + (answered * p.max_new_tokens + p.own_questions * _QUESTION_TOKENS) / speed.generation,
            "02_hidden_states": _KERNEL_START_S + start_s + tokens / speed.extraction,
            "03_vocab_mapping": _KERNEL_START_S,
            "04_train": 2 * _KERNEL_START_S + p.epochs * trained / speed.training,
            "05_checkpoint": _KERNEL_START_S,
            "06_load_ladder": _LADDER_AND_FAULTS_S,
            "07_serve": _LOAD_TESTS_S + load_tests * (start_s - _SERVER_START_S),
        },
    )


def _memory(p: Preflight, draft: Geometry, weight_bytes: int, gpus: int) -> dict[str, int]:
    training = draft.training_bytes(
        optimizer=p.optimizer, pack_tokens=p.pack_tokens, ttt_steps=p.ttt_steps,
        processes=p.processes * p.nodes, sharded=p.fsdp_shard,
    )  # fmt: skip
    if not gpus:
        return {
            "01_responses": int(2 * weight_bytes + 3e9),
            "02_hidden_states": int(weight_bytes + 1.5e9),
            "04_train": int(training + 1.5e9),
            "07_serve": int(2 * (weight_bytes + draft.checkpoint_bytes) + 3e9),
        }
    share = weight_bytes / p.tensor_parallel_size + p.kv_cache_gb * 1e9 + _BESIDE_WEIGHTS
    return {
        "01_responses": int(share),
        "02_hidden_states": int(share if p.engine == "vllm" else weight_bytes + _BESIDE_WEIGHTS),
        "04_train": training,
        "07_serve": int(share + draft.checkpoint_bytes / p.tensor_parallel_size),
    }


def problems(p: Preflight, facts: VerifierFacts, plan: Plan, has: Machine) -> list[Problem]:
    """Everything about a plan that does not fit."""
    return [
        *_verifier_problems(p, facts),
        *_gpu_problems(p, plan, has),
        *_disk_problems(p, plan, has),
        *_memory_problems(p, plan, has),
    ]


def _verifier_problems(p: Preflight, facts: VerifierFacts) -> list[Problem]:
    found = []
    if facts.supports_eagle3 is False:
        served = "an architecture beside which vLLM 0.32 serves EAGLE-3 drafts"
        found.append(
            Problem("the verifier", served, ", ".join(facts.architectures), "another verifier, or another engine")
        )
    layers, ids = facts.num_layers or 0, p.aux_hidden_state_layer_ids
    if ids and (sorted(set(ids)) != ids or ids[0] < 1 or ids[-1] >= layers):
        between = f"ascending, between 1 and {layers - 1}"
        found.append(Problem("the aux hidden state layer ids", between, str(ids), "correct aux_hidden_state_layer_ids"))
    vocabulary, wanted = facts.vocab_size or 0, p.draft_vocab_size
    if wanted > vocabulary:
        most = f"at most {vocabulary:,} tokens"
        found.append(Problem("the draft vocabulary", most, f"{wanted:,}", "lower draft_vocab_size"))
    if facts.latent_attention and not p.draft_head_dim:
        readings = (
            "nothing: some readers take the hidden size over the heads, some the rope dimension, some the value's"
        )
        said = "said, as this verifier has latent attention"
        found.append(Problem("the draft's head_dim", said, readings, "set draft_head_dim"))
    return found


def _gpu_problems(p: Preflight, plan: Plan, has: Machine) -> list[Problem]:
    found, most = [], max(p.tensor_parallel_size, p.processes)
    if plan.draft.heads % p.tensor_parallel_size:
        divisor = f"a divisor of the draft's {plan.draft.heads} heads"
        found.append(Problem("tensor_parallel_size", divisor, str(p.tensor_parallel_size), "change one of the two"))
    if has.gpus and most > has.gpus:
        fix = "lower tensor_parallel_size or processes, or plan for another machine: 00_preflight.gpus"
        found.append(Problem("the GPUs", f"at least {most} on the machine", str(has.gpus), fix))
    return found


def _disk_problems(p: Preflight, plan: Plan, has: Machine) -> list[Problem]:
    needed = plan.peak_disk_bytes + p.reserve_disk_gb * 1e9
    if has.free_disk_bytes >= needed:
        return []
    ways = ["fewer prompts", "shorter answers"]
    ways += ['storage: "float8"'] if p.storage == "bfloat16" else []
    ways += ["one share of the prompts at a time with delete_hidden_states"] if not p.delete_hidden_states else []
    expected = f"{needed / 1e9:,.1f} GB free, the reserve of {p.reserve_disk_gb:g} GB in it"
    return [Problem("the disk", expected, f"{has.free_disk_bytes / 1e9:,.1f} GB", ", or ".join(ways))]


def _memory_problems(p: Preflight, plan: Plan, has: Machine) -> list[Problem]:
    each = "on each GPU" if has.gpus else "free"
    serving = "a larger tensor_parallel_size, a smaller kv_cache_gb" if has.gpus else "more memory, a smaller verifier"
    return [
        Problem(
            f"the memory for {stage}",
            f"{size / 1e9:,.1f} GB {each}",
            f"{has.memory_bytes / 1e9:,.1f} GB",
            _less_memory_in_training(p) if stage == "04_train" else serving,
        )
        for stage, size in plan.memory_bytes.items()
        if has.memory_bytes < size
    ]


def _less_memory_in_training(p: Preflight) -> str:
    ways = [f"pack_tokens: {p.pack_tokens // 2}", "a smaller draft_vocab_size"]
    ways += ['optimizer: "muon"'] if p.optimizer == "adamw" else []
    ways += ["fsdp_shard: true"] if p.processes * p.nodes > 1 and not p.fsdp_shard else []
    return ", or ".join(ways)
