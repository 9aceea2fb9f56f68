"""The runner on notebooks that misbehave: true status, nothing left running, nothing lost."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from eaglebook import execute, manifests, paths, runs
from eaglebook.errors import UserError
from eaglebook.params import Preflight, VocabMapping
from fixture_notebook import notebook

STEM = "00_preflight"
PARAMETERS = 'preset: str = "smollm2"\nrun_dir: str = ""'
GOOD = (
    "from eaglebook.params import Preflight\nfrom eaglebook.stage import Stage\n"
    "p = Preflight.from_namespace(globals())\nrun = Stage('00_preflight', p)\n"
    "(run.artifacts / 'a.txt').write_text(str(p.epochs))\nrun.finish({'answer': 'yes', 'epochs': p.epochs})"
)


@pytest.fixture
def stage(outputs, tmp_path, monkeypatch):
    """Runs cells as stage 00 of a run; returns its manifest."""
    monkeypatch.setattr(paths, "NOTEBOOKS", tmp_path / "notebooks")
    (tmp_path / "notebooks").mkdir()

    def run(*cells: str, params: Preflight | None = None, force: bool = False) -> manifests.Manifest:
        (tmp_path / "notebooks" / f"{STEM}.ipynb").write_text(notebook(PARAMETERS, *cells))
        return execute.run_stage(STEM, params or Preflight(run_dir="outputs/r"), outputs / "r", force=force)

    run.dir = outputs / "r"
    return run


def nothing_left(manifest: manifests.Manifest) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("EAGLEBOOK_TOKEN") == manifest.token and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def test_success_is_recorded_skipped_and_reproducible_with_stock_papermill(stage, outputs, tmp_path) -> None:
    manifest = stage(GOOD)
    assert (manifest.status, manifest.exit_code, manifest.metrics["epochs"]) == ("succeeded", 0, Preflight().epochs)
    folder = stage.dir / STEM
    assert {f.name for f in folder.iterdir()} >= {
        "notebook.ipynb", "report.html", "manifest.json", "params.yaml", "metrics.json", "log.txt", "artifacts", "figures",
    }  # fmt: skip
    assert [a.path for a in manifest.artifacts] == ["a.txt"]
    assert manifests.read(folder) == manifest
    again = stage(GOOD)
    assert again.ended == manifest.ended, "an unchanged stage is skipped"
    assert stage(GOOD, force=True).started >= manifest.ended
    done = subprocess.run(
        [sys.executable, "-m", "papermill", str(paths.NOTEBOOKS / f"{STEM}.ipynb"), str(tmp_path / "out.ipynb"),
         "-f", str(folder / "params.yaml"), "--no-progress-bar", "--kernel", "python3"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    by_hand = manifests.read(outputs / "lab" / STEM)
    assert by_hand is not None
    assert by_hand.metrics == manifest.metrics
    assert by_hand.output_fingerprint == manifest.output_fingerprint


class _Store(http.server.BaseHTTPRequestHandler):
    """An object store: what was PUT under a path can be read there."""

    objects: dict[str, bytes]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.objects[self.path])

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_notebook_parameters_and_result_may_lie_in_a_store(stage, outputs) -> None:
    expected = stage(GOOD).metrics
    store = type("Store", (_Store,), {"objects": {}})
    store.objects["/in.ipynb"] = (paths.NOTEBOOKS / f"{STEM}.ipynb").read_bytes()
    store.objects["/params.yaml"] = (stage.dir / STEM / "params.yaml").read_bytes()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run(
            [sys.executable, "-m", "papermill", f"{at}/in.ipynb", f"{at}/out.ipynb", "-f", f"{at}/params.yaml",
             "--no-progress-bar", "--kernel", "python3"],
            capture_output=True, text=True,
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    executed = nbformat.reads(store.objects["/out.ipynb"].decode(), 4)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")
    by_hand = manifests.read(outputs / "lab" / STEM)
    assert by_hand is not None
    assert by_hand.metrics == expected


def test_a_failing_cell_is_named_and_the_last_success_is_kept(stage) -> None:
    good = stage(GOOD)
    failed = stage("x = 1", "raise ValueError('broken here')")
    assert (failed.status, failed.error) == ("failed", "ValueError: broken here")
    assert failed.failing_cell == "cell 2"
    assert manifests.read(stage.dir / STEM) == good
    report = (stage.dir / f"{STEM}.next" / "report.html").read_text()
    assert "broken here" in report
    assert nothing_left(failed)
    assert stage(GOOD).ended == good.ended


def test_a_dead_kernel_is_a_failure(stage) -> None:
    manifest = stage("import os; os.kill(os.getpid(), 9)")
    assert manifest.status == "failed"
    assert "kernel died" in manifest.error


def test_a_cell_over_its_time_is_timed_out(stage) -> None:
    manifest = stage("import time; time.sleep(60)", params=Preflight(run_dir="outputs/r", cell_timeout_s=3))
    assert manifest.status == "timed_out"
    assert "time.sleep" in (stage.dir / f"{STEM}.next" / "notebook.ipynb").read_text(), "what was executed is kept"
    assert nothing_left(manifest)


def test_a_notebook_that_ends_without_finish_did_not_succeed(stage) -> None:
    manifest = stage("x = 1")
    assert manifest.status == "failed"
    assert "run.finish" in manifest.error


def test_children_are_ended_even_in_sessions_of_their_own(stage, tmp_path) -> None:
    child = "import subprocess\nc = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    manifest = stage(child + f"open('{tmp_path}/pid', 'w').write(str(c.pid))", GOOD)
    assert manifest.status == "succeeded"
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_wrong_parameters_fail_in_the_notebook_too(stage) -> None:
    manifest = stage("epochs = '3'\n" + GOOD)
    assert manifest.status == "failed"
    assert "epochs" in manifest.error


def test_upstream_must_exist_before_anything_starts(outputs) -> None:
    with pytest.raises(UserError, match="03_vocab_mapping needs 01_responses"):
        execute.run_stage("03_vocab_mapping", VocabMapping(preset="smoke"), outputs / "smoke")
    assert not (outputs / "smoke").exists()


RUNNER = """
import sys
from pathlib import Path
from eaglebook import execute, paths
from eaglebook.errors import Interrupted
from eaglebook.params import Preflight
paths.NOTEBOOKS = Path(sys.argv[1])
try:
    print(execute.run_stage("00_preflight", Preflight(run_dir="outputs/r"), paths.outputs() / "r").status)
except Interrupted as e:
    sys.exit(128 + e.signum)
"""


def test_a_success_killed_before_its_swap_is_kept(stage, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runs, "swap_in", lambda *args: None)
        manifest = stage(GOOD)
    assert not (stage.dir / STEM).exists()
    assert stage(GOOD).ended == manifest.ended
    assert (stage.dir / STEM / "artifacts" / "a.txt").exists()


def test_force_does_not_go_on_from_an_unfinished_attempt(stage) -> None:
    half = GOOD.replace("run.finish", "seen = (run.artifacts / 'half').exists()\n(run.artifacts / 'half').touch()\n"
                        "assert seen, 'first time'\nrun.finish")  # fmt: skip
    assert stage(half).status == "failed"
    assert stage(half, force=True).status == "failed"
    assert stage(half).status == "succeeded"


LONG = (
    "import subprocess, time\nfrom eaglebook.params import Preflight\nfrom eaglebook.stage import Stage\n"
    "run = Stage('00_preflight', Preflight.from_namespace(globals()))\n"
    "half = run.artifacts / 'half'\nwas_there = half.exists()\nhalf.write_text('x')\n"
    "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    "(run.dir / 'child').write_text(str(child.pid))\n"
    "time.sleep(0 if was_there else 300)\nchild.kill()\nrun.finish({'answer': 'x', 'resumed': was_there})"
)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_at_any_moment_nothing_runs_on_and_a_rerun_resumes(stage, outputs, tmp_path, signum) -> None:
    folder = paths.NOTEBOOKS
    (folder / f"{STEM}.ipynb").write_text(notebook(PARAMETERS, LONG))
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(folder)], env=os.environ | {"HF_HUB_OFFLINE": "1"})
    marker = stage.dir / f"{STEM}.next" / "child"
    wait(lambda: marker.exists() and marker.read_text(), 60)
    child = psutil.Process(int(marker.read_text()))
    runner.send_signal(signum)
    code = runner.wait(60)
    killed = manifests.read(stage.dir / f"{STEM}.next")
    assert killed is not None
    assert killed.shown_status == "killed"
    if signum != signal.SIGKILL:
        assert code == 128 + signum
        assert killed.status == "killed"
        assert nothing_left(killed)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    again = stage(LONG)  # after SIGKILL this also ends what was left
    assert again.status == "succeeded"
    assert again.metrics["resumed"] is True
    assert nothing_left(killed)


def wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_nothing_private_is_in_what_is_shared(stage) -> None:
    stage(f"print('{Path.home()}/secret', '{paths.ROOT}')", GOOD)
    for name in ("notebook.ipynb", "report.html", "manifest.json"):
        text = (stage.dir / STEM / name).read_text()
        assert str(paths.ROOT) not in text, name
        assert f"{Path.home()}/" not in text, name
