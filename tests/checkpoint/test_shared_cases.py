"""Real configs and tensor lists of others, where a checkout has them beside it: every one is read, none ends in a traceback.

They are not part of this project, so their expected findings are not compared here; `test_published` holds values of the
same kind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eaglebook import paths
from eaglebook.checkpoint import inspection, verifier_config
from eaglebook.errors import UserError

CASES = paths.ROOT.parent / "shared" / "cases"
FILES = (
    sorted(f for f in CASES.rglob("*") if f.is_file() and f.suffix in (".json", ".txt", ".tsv"))
    if CASES.is_dir()
    else []
)


@pytest.mark.skipif(not FILES, reason="no cases beside this checkout")
def test_every_case_can_be_read() -> None:
    for file in FILES:
        try:
            json.dumps(inspection.inspect(file).as_dict())
        except UserError as error:
            assert "next:" in str(error), file


@pytest.mark.skipif(not FILES, reason="no cases beside this checkout")
def test_every_verifier_config_gives_its_sizes() -> None:
    for file in [f for f in FILES if f.suffix == ".json" and "verifier" in f.parent.name]:
        facts = verifier_config.read(Path(file))
        assert not facts.missing, (file.name, facts.missing)
        assert facts.default_aux_layer_ids
