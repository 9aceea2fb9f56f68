"""A notebook's handle on its directory: where to read, where to write, what it found out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglebook import machine, manifests, paths, runs
from eaglebook.errors import UserError
from eaglebook.manifests import Status
from eaglebook.params import Notebook


class Stage:
    """A notebook's handle on its directory: where to read, where to write, what it found out."""

    def __init__(self, stem: str, params: Notebook) -> None:
        given = os.environ.get("EAGLEBOOK_STAGE_DIR")
        self.stem, self.params = stem, params
        self.by_hand = not given
        self.run_dir = runs.run_dir(params)
        self._write_run = paths.outputs() / "lab" if self.by_hand else self.run_dir
        self.dir = Path(given) if given else runs.next_dir(self._write_run, stem)
        self.started = time.time()
        self.checks: dict[str, tuple[bool, str]] = {}
        self._found = {u: runs.find_upstream(stem, u, self.run_dir, params.preset) for u in runs.needed(stem, params)}
        self._refuse_mixed_upstream()
        if self.by_hand:
            self._begin_by_hand()
        self.artifacts = self.dir / "artifacts"
        self.figures = self.dir / "figures"
        for folder in (self.artifacts, self.figures):
            folder.mkdir(parents=True, exist_ok=True)

    def upstream(self, stem: str) -> Path:
        """The ``artifacts/`` folder of an upstream stage."""
        return self._found[stem] / "artifacts"

    def share(self, rank: int) -> Path:
        """The ``artifacts/`` folder of another machine's finished share of this stage."""
        return runs.stage_dir(runs.rank_dir(self.run_dir, rank), self.stem) / "artifacts"

    def upstream_metrics(self, stem: str) -> dict[str, Any]:
        return json.loads((self._found[stem] / "metrics.json").read_text())

    def card(self) -> None:
        """Print the run card: at most six lines that say what this is a run of."""
        versions = ", ".join(f"{k} {v}" for k, v in machine.versions().items() if k not in {"eaglebook", "papermill"})
        where = f"by hand, written to {paths.show(self.dir)}" if self.by_hand else paths.show(self.run_dir)
        print(f"{self.stem} · preset {self.params.preset} · {where} · seed {self.params.seed}")
        print(f"verifier {self.params.verifier_name_or_path}")
        print(versions)
        for stem, folder in self._found.items():
            manifest = manifests.read(folder)
            print(f"input {stem}: {paths.show(folder)} ({manifest.output_fingerprint[:8] if manifest else '?'})")

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Record a named invariant. `finish` prints all of them and refuses when one failed."""
        self.checks[name] = (bool(passed), detail)

    def require(self) -> None:
        """Stop here when a check has failed already: what follows would cost time for nothing."""
        if not all(passed for passed, _ in self.checks.values()):
            self.finish({})

    def figure(self, figure: Any, name: str, alt: str) -> Any:
        """Save a figure as PNG and return it as an image with alternative text, for the notebook to show."""
        import matplotlib.pyplot as plt
        from IPython.display import Image

        file = self.figures / f"{name}.png"
        figure.savefig(file, dpi=110, bbox_inches="tight")
        plt.close(figure)
        return Image(filename=str(file), alt=alt, retina=False)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Write ``metrics.json``, print the checks, raise when one failed. By hand, also sign the manifest and swap."""
        manifests.write_atomically(self.dir / "metrics.json", json.dumps(manifests.plain(metrics), indent=1))
        manifests.write_atomically(
            self.dir / "checks.json", json.dumps({n: ok for n, (ok, _) in self.checks.items()}, indent=1)
        )
        for name, (passed, detail) in self.checks.items():
            print(f"{'pass' if passed else 'FAIL'}  {name}{f'  ({detail})' if detail else ''}")
        failed = [f"{name} ({detail})" for name, (passed, detail) in self.checks.items() if not passed]
        if failed and self.by_hand:
            self._sign("failed")
        if failed:
            raise UserError(
                f"{self.stem}: {len(failed)} of {len(self.checks)} checks failed",
                found="; ".join(failed),
                fix="read the section above that measured it",
            )
        if self.by_hand:
            self._sign("succeeded")
            self.dir = runs.swap_in(self._write_run, self.stem)
            self.artifacts, self.figures = self.dir / "artifacts", self.dir / "figures"
            print(f"written to {paths.show(self.dir)}")

    def _sign(self, status: Status) -> None:
        manifests.close(self._manifest, self.dir, status, self.started)
        manifests.write(self.dir, self._manifest)

    def _begin_by_hand(self) -> None:
        found = runs.inputs(self.stem, self.params, self.run_dir)
        mark = runs.fingerprint(self.stem, self.params, found)
        self._manifest = manifests.new(self.stem, self._write_run.name, self.params, found, mark)
        self._manifest.written_by = "notebook"
        runs.repair(self._write_run, self.stem)
        runs.prepare(self.dir, mark)
        manifests.write(self.dir, self._manifest)
        manifests.write_params(self.dir, self.params)

    def _refuse_mixed_upstream(self) -> None:
        """What is read together must belong together: one verifier, one version of every stage behind it."""
        from eaglebook import verifier

        seen = {"verifier": (verifier.fingerprint(self.params.verifier_name_or_path), self.stem)} if self._found else {}
        for stem, folder in self._found.items():
            manifest = manifests.read(folder)
            marks = {stem: manifest.output_fingerprint, **manifest.inputs} if manifest else {}
            foreign = [u for u in runs.UPSTREAM[stem] if u in self._found and u not in marks]
            if foreign:
                raise UserError(
                    f"{self.stem}: {stem} was not made from this run's {foreign[0]}",
                    expected=f"{stem} without a draft of one's own",
                    found=paths.show(folder),
                    fix=runs.command(stem, self.run_dir, self.params.preset),
                )
            for name, mark in marks.items():
                known, by = seen.setdefault(name, (mark, stem))
                if known != mark:
                    older = by if name == stem else stem
                    raise UserError(
                        f"{self.stem}: {by} and {stem} belong to different versions of {name}",
                        expected=f"both made from {name} {known[:8]}",
                        found=f"{mark[:8]} in {stem}",
                        fix=runs.command(older, self.run_dir, self.params.preset),
                    )


def is_the_runners_environment() -> bool:
    """Whether this kernel runs in the environment that started it (a wrong kernel is the commonest first failure)."""
    return os.environ.get("EAGLEBOOK_PREFIX", sys.prefix) == sys.prefix
