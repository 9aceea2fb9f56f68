"""The thin helper library behind the EAGLE-3 workbook's notebooks.

Dependencies point one way: notebooks → cli, execute, report → stages → checkpoint, runs, params, paths.
Heavy packages (torch, transformers, speculators) are imported inside functions; vLLM only in its own process.
"""

import os

# Everything here works from files on disk. A user who wants the hub says so: HF_HUB_OFFLINE=0.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__version__ = "0.1.0"
