"""Hidden states from a vLLM server: the same files as the hooks of `hidden_states` write, by the engine that will serve.

vLLM's dummy speculative method ``extract_hidden_states`` captures the streams, a KV connector writes one file a request
(vLLM 0.32, speculators 0.9 ``data_generation``). The requests are speculators' own function; here files are held until they
are whole, judged, and renamed into place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from eaglebook import states_files
from eaglebook.engine import background
from eaglebook.engine.server import Server, died, on_cpu
from eaglebook.errors import UserError
from eaglebook.hidden_states import Extraction
from eaglebook.progress import Progress


def server_args(layer_ids: Sequence[int], num_layers: int, scratch: Path) -> tuple[str, ...]:
    """Arguments that turn a server into one that writes hidden states to ``scratch``. The last slot is id ``num_layers``."""
    ids = [*layer_ids, num_layers]
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if on_cpu():
        connector = {
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "eaglebook.engine.cpu_connector",
        }
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    transfer = {
        **connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(scratch)},
    }
    return (
        "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer),
        "--no-enable-prefix-caching",  # a prompt out of the cache would be read from the cache, not computed
    )  # fmt: skip


def extract(
    servers: Sequence[Server],
    sequences: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    hidden_size: int,
    folder: Path,
    scratch: Path | None,
    *,
    rows: Sequence[int] | None = None,
    concurrency: int = 8,
    storage: states_files.Storage = "bfloat16",
) -> Extraction:
    """Write ``hs_<row>.safetensors`` for every sequence (or those in ``rows``); complete files are skipped.

    ``scratch`` is where the servers write, on the disk of ``folder``; it is removed at the end, None leaves it alone.
    Several servers share the work. A request that fails is tried again, on the next server. Raises UserError when one
    fails for good, or a file is not what was asked.
    """
    import openai
    from speculators.data_generation.vllm_client import generate_hidden_states_async, wait_for_lock_async

    wanted = range(len(sequences)) if rows is None else rows
    todo = states_files.missing(folder, sequences, wanted, len(layer_ids), hidden_size, storage)
    todo.sort(key=lambda row: -len(sequences[row]))  # short ones last: no long one is left to wait for at the end
    bar = Progress("hidden states", len(wanted), start=len(wanted) - len(todo), unit="conversations")

    async def one(clients: list[openai.AsyncClient], gate: asyncio.Semaphore, turn: int, row: int) -> None:
        ids = list(sequences[row])
        async with gate:
            for attempt in range(2 if len(servers) > 1 else 1):
                at = (turn + attempt) % len(servers)
                try:
                    path, _ = await generate_hidden_states_async(
                        clients[at], servers[at].model, {"input_ids": ids}, timeout=600, max_retries=1
                    )
                    break
                except Exception as error:  # whatever the client raises, the server's log knows more
                    failed = died(servers[at], f"{type(error).__name__}: {error}"[:300])
            else:
                raise failed
            lock = Path(f"{path}.lock")
            if lock.exists():
                await wait_for_lock_async(lock, timeout=600, poll_interval=0.01)
            found = Path(path)
            shape = (len(ids), len(layer_ids), hidden_size)
            as_asked = states_files.is_complete(found, *shape)
            if not as_asked and not states_files.is_complete(found, *shape, "float32"):  # of a verifier served in it
                raise UserError(
                    f"vLLM wrote another file than was asked for row {row}",
                    expected=f"{len(ids)} tokens, {len(layer_ids) + 1} slots of {hidden_size}",
                    found=found.name if found.exists() else "no file",
                    fix="see the server's log; the server must see the same disk as this process",
                )
            if as_asked and storage == "bfloat16":
                found.replace(folder / states_files.file_name(row))
            else:
                states_files.write(folder / states_files.file_name(row), states_files.read(found)[0], ids, storage)
                found.unlink()
            with contextlib.suppress(OSError):
                found.parent.rmdir()
            bar.step(tokens=len(ids))

    async def everything() -> None:
        gate = asyncio.Semaphore(concurrency)
        clients = [openai.AsyncClient(base_url=f"{s.url}/v1", api_key="EMPTY", max_retries=0) for s in servers]
        tasks = [asyncio.ensure_future(one(clients, gate, turn, row)) for turn, row in enumerate(todo)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            for client in clients:
                await client.close()

    began = time.monotonic()
    try:
        if todo:
            background.run(everything)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    tokens, seconds = sum(len(sequences[row]) for row in todo), time.monotonic() - began
    bar.close()
    return Extraction(len(wanted), len(wanted) - len(todo), tokens, seconds, 0.0)
