"""The fingerprint of an engine: equal for engines that would store the same bytes for the same tokens.

Blocks of the prefix cache that lie on disk are only read by engines with the fingerprint of their writer. It covers the
weights, and everything that decides what attention sees, how K and V are encoded and where they lie in a block. Not
covered: the tokenizer, as contents are known by token ids; the chunk size and the number of threads, as without
``deterministic`` their bits may differ within one run, too.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lean.cache.disk_folder import DiskFolder, EngineFolder
from lean.cache.plan import CachePlan
from lean.config import DEFAULT_PREFIX_CACHE_SIZE, EngineConfig
from lean.errors import ConfigError, one_line
from lean.machine.processor import cpu_features, cpu_name
from lean.model.load import LoadedModel
from lean.model.rotary import rotary_modules
from lean.quant.formats import CODEC_VERSION
from lean.store.home import write_atomically

DIGESTS = "weights.json"


def open_folder(config: EngineConfig, *, loaded_here: bool) -> DiskFolder | None:
    """The folder of the configuration, made where it is missing; None where it names none.

    Args:
        loaded_here: False: the caller gave a loaded model, whose weights may have been changed in memory.

    Raises:
        ConfigError: the folder cannot be used, or the weights are not those of files.
    """
    if config.prefix_cache_dir is None:
        return None
    if not loaded_here:
        raise ConfigError(
            "prefix-cache-dir needs a model that the engine loads itself: give its name or path, not a LoadedModel"
        )
    try:
        path = Path(config.prefix_cache_dir).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"prefix-cache-dir {one_line(config.prefix_cache_dir)}: there is no such user") from None
    return DiskFolder.create(path, config.prefix_cache_size or DEFAULT_PREFIX_CACHE_SIZE)


def engine_folder(
    folder: DiskFolder, model: LoadedModel, config: EngineConfig, plan: CachePlan, kernel_name: str
) -> EngineFolder:
    """Where this engine keeps its prefix cache in a folder. The model's rotary frequencies are installed."""
    about = describe(model, config, plan, kernel_name, weights_digest(model, folder.path / DIGESTS))
    text = json.dumps({key: value for key, value in about.items() if key != "model"}, sort_keys=True)
    return EngineFolder(folder, hashlib.sha256(text.encode()).digest(), about)


def describe(
    model: LoadedModel, config: EngineConfig, plan: CachePlan, kernel_name: str, weights: str
) -> dict[str, Any]:
    """What the fingerprint is made of, as JSON. The name of the model is for people, and no part of it."""
    info = model.info
    rotary = [
        (str(kind), frequencies.double().cpu().tolist(), scaling)
        for module in rotary_modules(model.module)
        for kind, (frequencies, scaling) in module.lean_tables.items()  # type: ignore[union-attr, operator]
    ]
    about: dict[str, Any] = {
        "model": info.source.name,
        "weights": weights,
        "codec": CODEC_VERSION,
        "dtype": str(info.dtype).removeprefix("torch."),
        "quantization": info.quantization,
        "weight_formats": list(model.weights.formats) if model.weights is not None else [],
        "device": model.device.type,
        "block_size": plan.block_size,
        "window": [plan.window, plan.num_sink_tokens],
        "pools": [
            {
                "format": pool.name,
                "layers": list(pool.layers),
                "window": pool.window,
                "sinks": pool.num_sink_tokens,
                "exact": pool.exact,
                "layouts": hashlib.sha256(repr(pool.layouts).encode()).hexdigest(),
            }
            for pool in plan.pools
        ],
        "groups": [[group.residual_length, group.num_exact_sinks] for group in plan.groups],
        "states": [repr(state) for state in plan.states],
        "rotary": hashlib.sha256(repr(rotary).encode()).hexdigest(),
        "code": _code_digest(),
        "versions": [_version(package) for package in ("lean-inference", "transformers", "bitsandbytes")],
        "deterministic": None,
    }
    if config.deterministic:  # bits are promised, so everything that may change one counts
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu_name()
        versions = [torch.__version__, _version("triton"), torch.get_float32_matmul_precision(), cpu_features()]
        about["deterministic"] = [*versions, kernel_name, torch.backends.cpu.get_cpu_capability(), device]
    return about


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _code_digest() -> str:
    """sha256 of lean's own code that computes K and V: a fault that is mended there makes old files worthless."""
    root, total = Path(__file__).parents[1], hashlib.sha256()
    folders = ("model", "kernels", "quant", "store/gguf", "store/prequantized")
    files = [file for folder in folders for file in sorted((root / folder).rglob("*"))]
    for file in (*files, root / "store/matrix.py"):
        if file.suffix in (".py", ".cpp", ".h") and file.is_file():
            total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def weights_digest(model: LoadedModel, known: Path) -> str:
    """sha256 of all files that the model was loaded from: weights, configuration, and code where that may run.

    Args:
        known: a file that keeps digests by path, size and time of change, so that large files are read once.
    """
    source = model.info.source
    files = [file for file, _, _ in source.weight_files()]
    if source.gguf_file is None:
        files += [source.folder / "config.json", *sorted(source.folder.glob("*.safetensors.index.json"))]
    if model.info.trust_remote_code:
        files += sorted(source.folder.glob("*.py"))
    stamp = repr([(os.path.realpath(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]])
    key = hashlib.sha256(stamp.encode()).hexdigest()
    digests = _read(known)
    if key not in digests:
        total = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest())
        digests[key] = total.hexdigest()
        with suppress(OSError):  # in a read-only folder it is computed again next time
            write_atomically(known, json.dumps(digests, indent=1).encode())
    return digests[key]


def _read(known: Path) -> dict[str, str]:
    try:
        digests = json.loads(known.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return digests if isinstance(digests, dict) and all(isinstance(value, str) for value in digests.values()) else {}
