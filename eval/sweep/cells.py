"""The cells of a sweep, their results, and the folder that keeps the results across interruptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lean.config import EngineConfig
from lean.errors import UserError, one_line
from lean.eval.score.fidelity import Fidelity, floor_config
from lean.eval.sweep.speed import Speed
from lean.store.home import exclusive, write_atomically

EXACT = "exact"


@dataclass(frozen=True)
class Cell:
    """One cache configuration of a grid. ``kv_dtype`` is a KV format, or EXACT for the model's dtype."""

    kv_dtype: str
    residual: int = 0
    window: int | None = None

    @property
    def name(self) -> str:
        residual = f" + {self.residual} exact" if self.residual else ""
        window = f", window {self.window:,}" if self.window else ""
        return f"{self.kv_dtype}{residual}{window}"

    def config(self, base: EngineConfig) -> EngineConfig:
        """Engine options of the cell. The exact cell without a window is the floor: it runs at another chunk size."""
        config = replace(base, window=self.window)
        if self.kv_dtype == EXACT:
            return config.exact() if self.window else floor_config(config)
        config = replace(config, kv_dtype=self.kv_dtype)
        return replace(config, kv_residual_length=self.residual) if self.residual else config.without_residual()


@dataclass(frozen=True)
class CacheBytes:
    """Sizes for a bf16 model.

    per_token: bytes of one token in the format, without exact copies. held: bytes of one sequence of ``context``
    tokens, with whole blocks and exact copies. ``*_bf16``: bytes of the same tokens in bf16 without blocks; for
    ``held`` of all tokens that the model's own windows leave visible.
    """

    per_token: int
    per_token_bf16: int
    held: int
    held_bf16: int
    context: int

    @property
    def token_ratio(self) -> float:
        return self.per_token_bf16 / self.per_token

    @property
    def held_ratio(self) -> float:
        return self.held_bf16 / self.held


@dataclass(frozen=True)
class Measured:
    """The result of a cell.

    Attributes:
        fidelity: compared with the exact cache without a window, also for cells with a window.
        window_reached: False where the text is too short to reach beyond the window: then its cost is unknown.
        speed: decoding speed compared with the exact cache.
        needle, tasks: reports of `lean.eval.score.needle` and `lean.eval.tasks`.
        notes: the cache plan's notes on this configuration.
        seconds: time of the whole measurement. date: its end, ISO 8601, UTC.
    """

    cell: Cell
    fidelity: Fidelity
    nbytes: CacheBytes
    speed: Speed
    window_reached: bool = True
    needle: dict[str, Any] | None = None
    tasks: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    date: str = ""


@dataclass(frozen=True)
class Impossible:
    """A cell that cannot run on this model, and the reason."""

    cell: Cell
    reason: str


Result = Measured | Impossible


def to_json(result: Result) -> dict[str, Any]:
    """A result as one line of ``results.jsonl`` holds it."""
    return {"name": result.cell.name, **asdict(result)}


def from_json(values: dict[str, Any]) -> Result:
    """The inverse of `to_json`. Raises KeyError or TypeError for anything else."""
    cell = Cell(**values.pop("cell"))
    del values["name"]
    if "reason" in values:
        return Impossible(cell, **values)
    fidelity, nbytes, speed = (
        Fidelity(**values.pop("fidelity")),
        CacheBytes(**values.pop("nbytes")),
        values.pop("speed"),
    )
    return Measured(cell, fidelity, nbytes, Speed(**speed), notes=tuple(values.pop("notes")), **values)


class SweepFolder:
    """``config.yaml``, everything that decides the figures, and ``results.jsonl``, one line per cell as it ends.

    ``config.yaml`` is written with the first result: a sweep that fails before leaves the folder free for another one.
    """

    def __init__(self, folder: Path, file: BinaryIO, config: dict[str, Any], results: list[Result]) -> None:
        self.results = results
        self._config_file, self._config = folder / "config.yaml", config
        self._file = file

    def append(self, result: Result) -> None:
        """Write a result to disk: after this call it survives a crash and a power cut."""
        if not self._config_file.exists():
            text = yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True)
            write_atomically(self._config_file, text.encode())
        self._file.write(json.dumps(to_json(result), allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results.append(result)


@contextmanager
def open_folder(folder: Path, config: dict[str, Any]) -> Iterator[SweepFolder]:
    """Begin a sweep in a folder, or continue it. An incomplete last line is dropped, and its cell runs again.

    Args:
        config: plain values. A folder that was begun with other values is refused.

    Raises:
        UserError: the folder belongs to or is in use by another sweep, has files that lean did not write, or cannot be
            written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "results.jsonl").open("ab+")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write into {folder}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    with file:
        taken = UserError(f"another sweep writes into {folder}: wait for it, or give another --out")
        exclusive(file, refusal=taken)
        file.seek(0)
        written = file.read()
        _check_config(folder, config, begun=bool(written))
        whole = written[: written.rfind(b"\n") + 1]
        results = [_read_line(folder, number, line) for number, line in enumerate(whole.splitlines(), 1)]
        file.truncate(len(whole))
        yield SweepFolder(folder, file, config, results)


def _read_line(folder: Path, number: int, line: bytes) -> Result:
    try:
        return from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{folder / 'results.jsonl'} line {number} is not a result of a sweep: give another --out"
        ) from None


def _check_config(folder: Path, config: dict[str, Any], begun: bool) -> None:
    """Raise UserError where the folder has another configuration, or results without one."""
    file = folder / "config.yaml"
    if not file.exists():
        if begun:
            raise UserError(f"{folder} holds results.jsonl without its config.yaml: give another --out")
        return
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}") from None
    if difference := _first_difference(found, config):
        raise UserError(
            f"{folder} holds another sweep: {difference}; give another --out, or use the options in its config.yaml"
        )


def _first_difference(found: Any, wanted: Any, name: str = "") -> str | None:
    """The first key at which two plain values differ, with both values; None where they are equal."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys((*wanted, *found)):
            if difference := _first_difference(found.get(key), wanted.get(key), f"{name}.{key}" if name else str(key)):
                return difference
        return None
    if found == wanted:
        return None
    return f"{name or 'config.yaml'} is {one_line(found, 60)} there and {one_line(wanted, 60)} here"
