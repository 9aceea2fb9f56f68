"""Params files: one YAML file per preset, merged into the models of `params`.

Merge order: the model's default < ``common:`` < the notebook's block < ``--set stem.key=value``; a file that names another
one as its ``base:`` changes that one, key by key. Every message names the file, the key and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from eaglebook import paths
from eaglebook.errors import UserError
from eaglebook.params import STAGES, Notebook, build

_ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9_.]+)+)")  # octal and base 60 in YAML 1.1


def names() -> list[str]:
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


def _blocks(preset: str, seen: tuple[Path, ...] = ()) -> tuple[Path, dict[str, Any]]:
    """A params file and its blocks, over those of its base."""
    file = Path(preset) if preset.endswith((".yaml", ".yml")) else paths.PARAMS / f"{preset}.yaml"
    if not file.is_file():
        raise UserError(
            f"{f'{seen[-1].name}: base' if seen else 'no preset'} {preset!r}",
            expected=f"one of {', '.join(names())}, or the path of a YAML file",
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
