"""JupyterLab: it starts, lists the notebooks, and *Run all* works with nothing injected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import nbformat
import pytest
from eaglebook import manifests, paths, runs
from eaglebook.engine.server import free_port
from nbclient import NotebookClient


@pytest.mark.timeout(180)
def test_lab_starts_lists_the_notebooks_and_offers_this_environments_kernel(tmp_path) -> None:
    port, token = free_port(), "test"
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", f"--IdentityProvider.token={token}",
            "--allow-root", f"--notebook-dir={paths.NOTEBOOKS}"]  # fmt: skip
    environment = os.environ | {"JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    lab = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", params={"token": token}, trust_env=False)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                listing = client.get("/api/contents").raise_for_status().json()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline
                assert lab.poll() is None, "JupyterLab ended"
                time.sleep(0.5)
        names = {item["name"] for item in listing["content"]}
        assert {f"{stem}.ipynb" for stem in runs.UPSTREAM} <= names
        kernel = client.get("/api/kernelspecs").json()["kernelspecs"]["python3"]
        started = client.post("/api/kernels", json={"name": "python3"}).raise_for_status().json()
        assert kernel["spec"]["argv"][0] in ("python", sys.executable)
        assert started["id"]
        client.delete(f"/api/kernels/{started['id']}")
        assert client.get("/lab").status_code == 200
    finally:
        lab.terminate()
        lab.wait(30)


@pytest.mark.timeout(300)
def test_run_all_works_from_the_notebooks_folder(outputs) -> None:
    notebook = nbformat.read(paths.NOTEBOOKS / "00_preflight.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(paths.NOTEBOOKS)}}
    )
    client.execute()
    manifest = manifests.read(outputs / "lab" / "00_preflight")
    assert manifest is not None
    assert (manifest.status, manifest.written_by) == ("succeeded", "notebook")
    assert manifest.params["run_dir"] == ""
    assert (outputs / "lab" / "00_preflight" / "figures" / "plan.png").exists()


def test_a_notebook_opened_too_early_says_what_to_run(outputs) -> None:
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(paths.NOTEBOOKS / "03_vocab_mapping.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(paths.NOTEBOOKS)}}
    )
    with pytest.raises(CellExecutionError) as error:
        client.execute()
    assert "eaglebook run --preset smollm2 --stage 01_responses" in str(error.value)


def test_the_kernel_is_this_environments() -> None:
    from jupyter_client.kernelspec import KernelSpecManager

    spec = KernelSpecManager().get_kernel_spec("python3")
    assert Path(spec.resource_dir).is_relative_to(sys.prefix), json.dumps(spec.to_dict())
