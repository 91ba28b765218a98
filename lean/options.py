"""Options of a run, merged from flags, a YAML file and defaults, and checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lean.config import EngineConfig
from lean.errors import ConfigError, RequestError, one_line
from lean.sampling_params import SamplingParams
from lean.units import parse_size

ENGINE_KEYS = tuple(item.name for item in fields(EngineConfig))
SAMPLING_KEYS = tuple(item.name for item in fields(SamplingParams))
_KINDS = {item.name: str(item.type).split(" | ") for item in (*fields(EngineConfig), *fields(SamplingParams))}


@dataclass(frozen=True)
class Options:
    """A model's name (None: the default model), the engine's options, and the sampling parameters."""

    model: str | None
    engine: EngineConfig
    sampling: SamplingParams

    @classmethod
    def merge(cls, *layers: Mapping[str, Any]) -> Options:
        """Later layers win. Keys are ``model`` and the fields of EngineConfig and SamplingParams.

        Raises ConfigError or RequestError for impossible values and combinations.
        """
        values: dict[str, Any] = {}
        for layer in layers:
            values |= layer
        for key in ("kv_memory", "prefix_tail_memory", "prefix_cache_size"):
            if isinstance(values.get(key), str):
                values[key] = parse_size(values[key])
        model = values.get("model")
        if not isinstance(model, str | None):
            raise ConfigError(f"model {one_line(model)} must be a name or a path")
        engine = {key: values[key] for key in ENGINE_KEYS if key in values}
        sampling = {key: values[key] for key in SAMPLING_KEYS if key in values}
        return cls(model, EngineConfig(**engine), SamplingParams(**sampling))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Options:
        """The options of a YAML file, defaults for the others. Raises ConfigError, naming file and key."""
        values = read_yaml(path)
        try:
            return cls.merge(values)
        except (ConfigError, RequestError) as error:
            raise ConfigError(f"{path}: {error}") from None

    def to_yaml(self, leave_out: Collection[str] = ()) -> str:
        """All options as YAML that `read_yaml` reads. null: the engine derives the value from model and machine.

        Args:
            leave_out: options that are not written.
        """
        from lean import yaml_file

        sampling = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.sampling).items()}
        values = {"model": self.model, **asdict(self.engine), **sampling}
        return yaml_file.write({key: value for key, value in values.items() if key not in leave_out})


def read_yaml(path: str | Path, also: Collection[str] = ()) -> dict[str, Any]:
    """The options of a YAML file. Each is checked alone: flags may change a combination.

    Args:
        also: further keys that the file may have; the caller checks their values.

    Raises:
        ConfigError: names file and key.
    """
    from lean import yaml_file

    try:
        values = yaml_file.read(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines")
    known = ("model", *ENGINE_KEYS, *SAMPLING_KEYS, *also)
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {one_line(key)!r}; known keys are {', '.join(known)}")
    values = {key: _as_meant(key, value) for key, value in values.items()}
    try:
        for key, value in values.items():
            Options.merge({"max_num_seqs": 1}, {key: value})
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return values


def _as_meant(key: str, value: Any) -> Any:
    """A whole number for an option that takes one, as in ``max_model_len: 8e3``; a single layer as the text it is."""
    kinds = _KINDS.get(key, [])
    if type(value) is float and value.is_integer() and "int" in kinds and "float" not in kinds:
        return int(value)
    return str(value) if key == "kv_skip_layers" and type(value) is int else value
