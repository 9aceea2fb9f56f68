"""The plain reference: right on a pair whose answers are known, and one with speculators' own model on a random draft."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from eaglebook import acceptance, hidden_states, reference, train_serve
from eaglebook.checkpoint import convert, inspection
from eaglebook.errors import UserError
from eaglebook.faults import library, perfect

K = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    base = tmp_path_factory.mktemp("perfect")
    built = library.build_bases(base)[tuple(perfect.AUX_IDS)]
    return base, built, AutoModelForCausalLM.from_pretrained(built.verifier, dtype=torch.float32)


def walk(draft: reference.Draft, model, ids: list[int], prompt: int) -> list[int]:
    states = hidden_states.capture(model, [ids], draft.spec.aux_layer_ids.value)[0]
    return reference.walk(draft, states[:, :-1], ids, prompt, K)


def test_the_perfect_draft_is_accepted_fully(pair) -> None:
    _, built, model = pair
    prompt = built.prompt(0, 6)
    draft = reference.load(built.draft, model)
    assert walk(draft, model, prompt + built.answer(prompt, 41), 6) == [K] * 10
    assert walk(draft, model, prompt + built.answer(prompt, 39), 6) == [K] * 9, "one token past the end"


@pytest.mark.parametrize("name", ["ids one less", "rope left out", "another theta"])
def test_a_broken_file_is_not(pair, tmp_path, name) -> None:
    base, built, model = pair
    folder = library.write(next(f for f in library.FAULTS if f.name == name), base, tmp_path / "draft")
    prompt = built.prompt(0, 6)
    steps = walk(reference.load(folder, model), model, prompt + built.answer(prompt, 81), 6)
    assert acceptance.of_steps(steps, K).mean_acceptance_length < 3


REFUSED = {
    "no self_attn.v_proj": r"self_attn\.v_proj",
    "d2t missing": "d2t",
    "fc_norm without its tensors": r"fc_norm\.0",
    "activation gelu": "hidden_act",
    "a window of one token": "sliding",
}


@pytest.mark.parametrize(("name", "says"), REFUSED.items())
def test_what_it_cannot_compute_it_refuses(pair, tmp_path, name, says) -> None:
    base, _, model = pair
    folder = library.write(next(f for f in library.FAULTS if f.name == name), base, tmp_path / "draft")
    with pytest.raises(UserError, match=says):
        reference.load(folder, model)
    found, why_not = reference.load_if_covered(folder, model)
    assert found is None and "next:" in why_not


@pytest.fixture
def one_thread():
    """Thousands of tiny products: two threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


ALL_FLAGS = [f for f in itertools.product([False, True], repeat=4) if not (f[1] and f[2])]


@pytest.mark.parametrize(
    ("kind", "flags"), [*(("llama", f) for f in ALL_FLAGS), ("qwen3", (True, False, False, False))]
)
@pytest.mark.usefixtures("one_thread")
def test_it_agrees_with_speculators_on_a_random_draft(tiny_verifier, tmp_path, flags, kind) -> None:
    """Every combination of norm flags, both decoders, nested and flat: the same guesses as the library that trains."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    vocab = model.config.vocab_size
    layer = create_transformer_layer_config(str(tiny_verifier), 1, kind, "silu", 2048, [0])
    kept = torch.arange(10, 110)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    trained = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=kept - torch.arange(100), draft_vocab_size=100, verifier_name_or_path=str(tiny_verifier), ttt_steps=3,
        **dict(zip(FLAGS, flags, strict=True)),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    trained.to(torch.float32).save_pretrained(tmp_path / "nested")
    config = json.loads((tmp_path / "nested" / "config.json").read_text())
    assert [config[f] for f in FLAGS] == list(flags)
    convert.run(
        inspection.inspect(tmp_path / "nested").case,
        tmp_path / "flat",
        convert.VLLM,
        convert.Told(verifier_name="tiny"),
    )
    loaded = acceptance.load_draft(tmp_path / "nested", tiny_verifier)
    answers = [likely_answer(model, loaded)]
    for folder in ("nested", "flat"):
        found = train_serve.compare(model, loaded, reference.load(tmp_path / folder, model), answers, K)
        assert found.autoregressive == found.teacher_forced, folder
        assert 1 < found.teacher_forced.mean_acceptance_length < K + 1


def likely_answer(model, draft) -> tuple[list[int], list[int], list[int]]:
    """A random prompt, and an answer that a draft guesses more often than not: its own guesses, a random token at times."""
    generator = torch.Generator().manual_seed(0)

    def random_token() -> int:
        return int(torch.randint(10, 110, (1,), generator=generator))

    ids = [random_token() for _ in range(9)]
    while len(ids) < 34:
        states = hidden_states.capture(model, [ids], draft.config.eagle_aux_hidden_state_layer_ids)[0]
        features = states[:-1, :-1].flatten(1)[None].float()
        follow, places = torch.tensor([ids[1:]]), torch.arange(1, len(ids))[None]
        with torch.inference_mode():
            guess = draft(features, follow, torch.zeros_like(follow), position_ids=places, ttt_steps=1)[0][0, -1]
        ids.append(random_token() if torch.rand(1, generator=generator) < 0.25 else int(guess + draft.d2t[guess]))
    return ids[:8], ids[8:], []
