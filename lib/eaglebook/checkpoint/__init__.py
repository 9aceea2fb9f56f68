"""Draft checkpoints as data. Nothing here imports torch, transformers, vllm or speculators at import time."""
