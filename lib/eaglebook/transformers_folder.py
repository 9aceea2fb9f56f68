"""A verifier's folder as transformers, and speculators through it, can read it.

Some published model types have no class in transformers 5.19, though another type's is the same. Loaded by that class under its own
name, the routed experts stay random without an error, as their packing is looked up by type; with the repository's own code
(``trust_remote_code``) speculators 0.9 stops all the same, as ``Eagle3DraftModel.load_verifier_weights`` asks without it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from eaglebook import paths

_SAME_CLASS = {"kimi_k2": "deepseek_v3"}


def known_as(model_type: str) -> str:
    """The name under which transformers has the class of a model type."""
    return _SAME_CLASS.get(model_type, model_type)


def of(path: Path) -> Path:
    """``path``, or a folder of links to its files whose config names the type that transformers knows."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    known = known_as(config.get("model_type", ""))
    if known == config.get("model_type", ""):
        return path
    here = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    folder = paths.models() / f"{path.name}-as-{known}-{here}"
    folder.mkdir(parents=True, exist_ok=True)
    files = {file.name: file.resolve() for file in path.iterdir() if file.name != "config.json"}
    for name in {link.name for link in folder.iterdir()} - {"config.json"} - set(files):
        (folder / name).unlink()
    for name, file in files.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(file)
    text = json.dumps(
        {key: value for key, value in config.items() if key != "auto_map"} | {"model_type": known}, indent=1
    )
    written = folder / "config.json"
    if not written.is_file() or written.read_text(encoding="utf-8") != text:  # another process may be reading it
        written.write_text(text, encoding="utf-8")
    return folder
