"""Embedding, final norm and head of a verifier, found by name among hundreds of thousands of tensors.

An index of 25 MB parsed as JSON would be 100 MB of memory: it is searched as bytes, in blocks, for a few names. Names differ by
family and carry prefixes (``language_model.``), so they are found by suffix, as speculators 0.9 ``utils/loading.py`` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from eaglebook.errors import UserError
from eaglebook.paths import show

MAX_INDEX_BYTES = 512_000_000  # 200,000 names of a 64-shard model are 25 MB
MAX_HEADER_BYTES = 32_000_000  # of one shard
_BLOCK, _LONGEST_ENTRY = 1 << 20, 1024  # bytes read at a time; bytes of a `"name": "shard"` that are found for sure
# Parts of a model beside its language model.
OTHER_PARTS = re.compile(
    r"vis(ion|ual)|(^|[._])vit($|[._])|audio|image|speech|talker|code2wav|token2wav|code_predictor|(^|[._])mtp|siglip"
    r"|adapter|projector|merger|connector|aligner|resampler|draft|eagle"
)
_EMBED = ("embed_tokens.weight", "tok_embeddings.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight",
          "llm.embed.weight", "backbone.embeddings.weight")  # fmt: skip
_NORM = ("model.norm.weight", "llm.norm.weight", "norm_f.weight", "final_layernorm.weight", "final_layer_norm.weight",
         "ln_f.weight", "norm.weight")  # fmt: skip
_HEAD = ("lm_head.weight", "lm_head.weight_packed", "lm_head.qweight", "output.weight", "output_layer.weight",
         "embed_out.weight", "llm.unembed.weight")  # fmt: skip
_HEAD_SCALES = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "qweight", "qzeros", "scales")
_USUAL = (b"embed_tokens.weight", b"norm.weight", b"lm_head.")  # all that nearly every model needs: one pass
_VALUE = re.compile(rb'\s{0,64}:\s{0,64}(?:"([^"\\]{0,512})"|\{[^{}]{0,512}?"dtype"\s{0,64}:\s{0,64}"([^"]{0,16})")')


@dataclass(frozen=True)
class Names:
    """Names of the three tensors, "" for one that is not there; ``entries``: name to shard or dtype, as far as looked at."""

    embed: str
    norm: str
    head: str
    head_scales: bool  # scales beside the head: it is quantised
    entries: dict[str, str]


def find(folder: Path) -> Names | None:
    """The three tensors a draft needs, None when the folder lists no tensors. Raises UserError on a damaged file."""
    sources = _sources(folder)
    if not sources:
        return None
    entries = _search(sources, _USUAL)
    embed, norm, head = (_pick(entries, suffixes) for suffixes in (_EMBED, _NORM, _HEAD))
    if not (embed and norm and head):  # another family's names, or a tied head
        rest = {name.encode() for name in (*_EMBED, *_NORM, *_HEAD)}
        entries |= _search(sources, tuple(sorted(rest)))
        embed, norm, head = (_pick(entries, suffixes) for suffixes in (_EMBED, _NORM, _HEAD))
    scales = bool(head) and any(f"{head.rpartition('.')[0]}.{scale}" in entries for scale in _HEAD_SCALES)
    return Names(embed, norm, head, scales, entries)


def shard_of(index: Path, name: str) -> str:
    """The file an index names for one tensor, "" when it names none."""
    return _search([index], (name.encode(),)).get(name, "")


def _sources(folder: Path) -> list[Path]:
    """The files that list the tensors: an index, else every safetensors file, else a ``.bin`` index."""
    for names in (["model.safetensors.index.json"], ["model.safetensors"]):
        if (folder / names[0]).is_file():
            return [folder / names[0]]
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    return files or [file for file in [folder / "pytorch_model.bin.index.json"] if file.is_file()]


def _search(sources: list[Path], needles: tuple[bytes, ...]) -> dict[str, str]:
    """Tensor name → shard (index) or dtype (header) of the names outside layers that hold one of the needles."""
    entries: dict[str, str] = {}
    for file in sources:
        with file.open("rb") as stream:
            length = _header_length(stream, file) if file.suffix == ".safetensors" else _index_length(file)
            entries |= _scan(stream, length, needles)
    return entries


def _scan(stream: BinaryIO, length: int, needles: tuple[bytes, ...]) -> dict[str, str]:
    """Entries of a flat JSON object whose names hold a needle, searched as bytes: 25 MB parsed would be 100 MB."""
    entries: dict[str, str] = {}
    tail = b""
    while length > 0 and (block := stream.read(min(length, _BLOCK))):
        length -= len(block)
        text = tail + block
        for needle in needles:
            at = text.find(needle)
            while at >= 0:
                start = text.rfind(b'"', max(0, at - _LONGEST_ENTRY), at) + 1
                end = text.find(b'"', at, at + 64)
                value = _VALUE.match(text, end + 1) if start and end > 0 else None
                if value:
                    name = text[start:end].decode("utf-8", "replace")
                    if not _inside_a_part(name):
                        entries[name] = (value[1] if value[1] is not None else value[2]).decode("utf-8", "replace")
                at = text.find(needle, at + len(needle))
        tail = text[-2 * _LONGEST_ENTRY :]  # an entry cut by the end of a block is whole in the next one
    return entries


def _inside_a_part(name: str) -> bool:
    """Whether a tensor belongs to a layer, or to a tower, talker or MTP head beside the language model."""
    return any(part.isdigit() for part in name.split(".")) or bool(OTHER_PARTS.search(name))


def _pick(names: dict[str, str], suffixes: tuple[str, ...]) -> str:
    """The shortest name of the first suffix that any name has ("" for none): speculators 0.9 utils/loading.py.

    A suffix starts at a dot or underscore: ``model.language_model.norm.weight`` ends in ``model.norm.weight``.
    """
    for suffix in suffixes:
        matches = [n for n in names if n == suffix or (n.endswith(suffix) and n[-len(suffix) - 1] in "._")]
        if matches:
            return min(matches, key=lambda name: (len(name), name))
    return ""


def stored_dtype(folder: Path, key: str, value: str) -> str:
    """The safetensors dtype of a tensor; `value` is its dtype already, or the shard that holds it. "" when unknown."""
    if not value.endswith((".safetensors", ".bin")):
        return value
    shard = folder / value
    if "/" in value or "\\" in value or shard.suffix != ".safetensors" or not shard.is_file():
        return ""  # a folder of config and index alone, or a pickle; never a file elsewhere
    with shard.open("rb") as stream:
        return _scan(stream, _header_length(stream, shard), (key.encode(),)).get(key, "")


def _index_length(file: Path) -> int:
    size = file.stat().st_size
    if size > MAX_INDEX_BYTES:
        raise UserError(
            f"{show(file)}: not an index",
            expected=f"at most {MAX_INDEX_BYTES:,} bytes",
            found=f"{size:,} bytes",
            fix="copy or download the file again",
        )
    return size


def _header_length(stream: BinaryIO, file: Path) -> int:
    """Bytes of the JSON header, the stream left at its start. Raises UserError when the file cannot hold it."""
    size = file.stat().st_size
    start = stream.read(9)
    length = int.from_bytes(start[:8], "little")
    if len(start) == 9 and start[8:] == b"{" and length <= min(MAX_HEADER_BYTES, size - 8):
        stream.seek(8)
        return length
    pointer = start.startswith(b"version ")  # "version https://git-lfs.github.com/spec/v1"
    raise UserError(
        f"{show(file)}: not a readable safetensors file",
        expected=f"a JSON header of at most {max(0, min(MAX_HEADER_BYTES, size - 8)):,} bytes",
        found="a git-lfs pointer" if pointer else f"{length:,} bytes announced" if size > 8 else f"{size} bytes in all",
        fix="git lfs pull" if pointer else "copy or download the file again",
    )
