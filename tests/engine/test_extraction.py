"""Hidden states from a real vLLM server: the files of the hooks, by another engine; a dead endpoint; a wrong answer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from eaglebook import hidden_states, states_files, verifier
from eaglebook.engine import extraction, server
from eaglebook.errors import UserError

IDS, LAYERS, HIDDEN = [2, 4, 5], 8, 64
pytestmark = pytest.mark.timeout(300)


def test_a_server_writes_what_the_hooks_write(tiny_verifier, tmp_path) -> None:
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (5, 40, 17, 63, 16, 33)]
    folder, scratch = tmp_path / "states", tmp_path / "scratch"
    folder.mkdir()
    arguments = extraction.server_args(IDS, LAYERS, scratch)
    with server.serve(
        tiny_verifier,
        log=tmp_path / "log",
        max_model_len=72,
        max_num_seqs=4,
        kv_cache_bytes=64 << 20,
        extra_args=arguments,
    ) as vllm:
        gone = dataclasses.replace(vllm, url="http://127.0.0.1:9")
        ask = {"rows": [0, 1, 2], "concurrency": 3}
        first = extraction.extract([gone, vllm], sequences, IDS, HIDDEN, folder, scratch, **ask)
        assert (first.files, first.skipped, first.tokens) == (3, 0, 62)  # what the dead one failed, the other did
        (folder / states_files.file_name(1)).write_bytes(b"torn")
        rest = extraction.extract([vllm], sequences, IDS, HIDDEN, folder, scratch)
        assert (rest.files, rest.skipped) == (6, 2)
        assert extraction.extract([gone], sequences, IDS, HIDDEN, folder, scratch).skipped == 6
        (folder / states_files.file_name(4)).unlink()
        with pytest.raises(UserError, match="another file than was asked"):
            extraction.extract([vllm], sequences, IDS, HIDDEN + 1, folder, scratch, rows=[4])
        with pytest.raises(UserError, match="died while serving"):
            extraction.extract([gone], sequences, IDS, HIDDEN, folder, scratch, rows=[4])
        extraction.extract([vllm], sequences, IDS, HIDDEN, folder, scratch)
    assert not server.leftovers()
    assert not scratch.exists()
    assert states_files.validate(folder, sequences) == {}
    assert sorted(f.name for f in folder.iterdir()) == sorted(map(states_files.file_name, range(6)))
    model = verifier.load_model(verifier.resolve(str(tiny_verifier)))
    for row, sequence in enumerate(sequences):
        theirs = states_files.read(folder / states_files.file_name(row))[0].float()
        ours = hidden_states.capture(model, [sequence], IDS)[0].float()
        assert (theirs - ours).norm() / ours.norm() < 0.03, row
    streams = hidden_states.identify(model, theirs, sequence)
    assert hidden_states.convention(IDS, streams) == "input"
    assert (streams[-1].id, streams[-1].normed) == (LAYERS, False)
