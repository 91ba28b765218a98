"""Checks of a checkpoint folder before its weights are loaded or any code in it can run.

A checkpoint is untrusted data: half downloaded, mixed from two versions, or malicious. Only names and headers are read.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lean.errors import ModelError, shown

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
DOUBT = "incomplete download or LFS pointer?"


def check_checkpoint(folder: Path, *, trust_remote_code: bool = False) -> dict[str, dict[str, Any]]:
    """Refuse a folder that transformers would load wrongly, only in part, or by running code from the folder.

    The loader checks later that no tensor of the model is missing.

    Returns:
        By name, the tensors as the headers of the files describe them.

    Raises:
        ModelError: no config, no safetensors, an unknown architecture, untrusted code, or missing or damaged weights.
    """
    if not folder.is_dir():
        raise ModelError(f"no such folder: {folder}")
    try:
        listed = {entry.name for entry in folder.iterdir() if entry.is_file()}
        _require_safetensors(folder, listed)
        config = read_object(folder / CONFIG)
        tokenizer = read_object(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in listed else {}
        _check_code(folder, config, tokenizer, trust_remote_code)
        _check_routes(config, listed)
        if SINGLE in listed:  # transformers prefers it to an index, too
            return read_header(folder / SINGLE)
        return _check_shards(folder, listed)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def _require_safetensors(folder: Path, listed: set[str]) -> None:
    if "adapter_config.json" in listed:
        raise ModelError(f"{folder} holds a PEFT adapter: merge it into its base model and pass the result")
    if not any(name.endswith(".safetensors") for name in listed):
        if any(fnmatch(name, pattern) for name in listed for pattern in PICKLES):
            raise ModelError(
                f"{folder} has only pickled weights, and unpickling runs any code in them: if you trust them, convert "
                "them with transformers' from_pretrained(...).save_pretrained(...) and pass the result"
            )
        models = (name for name in listed if name.lower().endswith(".gguf"))
        if gguf := sorted(models, key=lambda name: ("mmproj" in name.lower(), name)):
            raise ModelError(f"{folder} holds GGUF files: pass the file itself, {folder / gguf[0]}")
    if CONFIG not in listed:
        raise ModelError(f"no {CONFIG} in {folder}: pass the folder of a transformers checkpoint")
    if SINGLE not in listed and INDEX not in listed:
        raise ModelError(f"neither {SINGLE} nor {INDEX} in {folder}: the weights are missing or renamed")


def _check_code(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a model for which transformers has no class, unless the user trusts the code in the folder.

    For known models transformers ignores `auto_map` with trust_remote_code=False; with None it would ask on stdin.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING, tokenizer_class_from_name

    model_type = str(config.get("model_type"))
    known = model_type in CONFIG_MAPPING
    if not known and "auto_map" not in config:
        raise ModelError(
            f"model_type {shown(model_type, 60)} is unknown to transformers {__version__}: try a newer transformers"
        )
    if known and "auto_map" in tokenizer:
        tokenizer_class = tokenizer_class_from_name(str(tokenizer.get("tokenizer_class")))
        known = tokenizer_class is not None or CONFIG_MAPPING[model_type] in TOKENIZER_MAPPING
    if not known and not trust_remote_code:
        raise ModelError(f"{folder} needs the Python code in it: read that code, then pass --trust-remote-code")


def _check_routes(config: dict[str, Any], listed: set[str]) -> None:
    """Refuse settings that make transformers load other files than those checked here."""
    if config.get("transformers_weights") is not None:
        raise ModelError(f'{CONFIG} sets "transformers_weights": remove it and name the file {SINGLE} or {INDEX}')
    for key, value in config.items():
        if key.startswith(("_attn_implementation", "_experts_implementation")) and "/" in str(value):
            raise ModelError(f"{CONFIG} asks for kernel code from {shown(value, 80)}: remove {shown(key, 60)}")
    if rank := next((name for name in sorted(listed) if re.match(r"shard-\d{5}-model-\d{5}-of-", name)), None):
        raise ModelError(f"{rank} belongs to a distributed training checkpoint: export it with save_pretrained")


def _check_shards(folder: Path, listed: set[str]) -> dict[str, dict[str, Any]]:
    """Every file of the index must exist, be whole, and hold the tensors assigned to it. Other files are never read."""
    index = read_object(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(index.get("metadata"), dict):
        raise ModelError(f'{INDEX} is malformed: it needs a "metadata" and a non-empty "weight_map"')
    shards = sorted(set(map(str, weight_map.values())))
    for shard in shards:
        # Only the name is checked. Links are followed: in the hub's cache every file is a link to another folder.
        # Whoever can place a link can place any bytes, but the index may come from someone else.
        if not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise ModelError(f"{INDEX} names {shown(shard, 80)}: not a .safetensors file of this folder")
    if missing := [shard for shard in shards if shard not in listed]:
        names = ", ".join(shown(shard, 80) for shard in missing[:8])
        raise ModelError(f"{len(missing)} of {len(shards)} weight files are missing: {names}; incomplete download?")
    owner: dict[str, str] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for shard in shards:
        header = read_header(folder / shard)
        tensors |= header
        for tensor in header:
            if owner.setdefault(tensor, shard) != shard:
                raise ModelError(
                    f"{owner[tensor]} and {shard} both hold {shown(tensor, 80)}: files of two checkpoints?"
                )
    if absent := [tensor for tensor, shard in weight_map.items() if owner.get(tensor) != shard]:
        first = f"{shown(absent[0], 80)} to {weight_map[absent[0]]!r}, which does not hold it"
        raise ModelError(f"{INDEX} assigns {first} ({len(absent)} tensors in all): stale index?")
    return tensors


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file as its header describes them, after checking that the file holds them all.

    ``file`` and ``start`` are added to each: where its bytes lie.

    Raises:
        ModelError: the header is damaged, or the file is not exactly as long as it says.
    """
    from safetensors import SafetensorError, safe_open

    actual = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            pointed = re.search(rb"^size (\d{1,20})$", stream.read(1024), re.MULTILINE)
            raise wrong_size(file, int(pointed[1]) if pointed else "a safetensors header", actual)
        length = int.from_bytes(prefix, "little")
        if 8 + length > actual:
            raise wrong_size(file, f"at least {8 + length}", actual)
        if length > MAX_HEADER_BYTES:
            raise wrong_size(file, f"a header of at most {MAX_HEADER_BYTES}, not {length},", actual)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
            for entry in header.values():
                entry |= {"file": str(file), "start": 8 + length + int(entry["data_offsets"][0])}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelError(f"{file.name} ({actual} bytes): unreadable header: {DOUBT}") from error
    if actual != expected:
        raise wrong_size(file, expected, actual)
    try:
        with safe_open(file, framework="numpy"):  # its own validation: gaps, overlaps, shapes against sizes
            return header
    except SafetensorError as error:
        raise ModelError(
            f"{file.name} ({actual} bytes): inconsistent header, {shown(str(error), 200)}: {DOUBT}"
        ) from error


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError for anything else."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}): {DOUBT}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def wrong_size(file: Path, expected: object, actual: int) -> ModelError:
    return ModelError(f"{file.name}: expected {expected} bytes, found {actual}: {DOUBT}")
