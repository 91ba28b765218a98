"""A run of the GPU benchmark as a file, which is written anew after every part."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lean.eval.bench.gpu.facts import machine_facts, without_names
from lean.eval.bench.gpu.plan import Figure, missed
from lean.eval.bench.gpu.run import Run
from lean.store.home import write_result


def measure(run: Run, parts: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Run the parts, and return what they found, ready for JSON. A run that is ended early leaves what it had in
    ``file``.

    Raises:
        UserError: the file cannot be written; found out before anything is measured.
        CompilerError: no kernel can be compiled on this machine.
    """
    started, facts = time.perf_counter(), machine_facts(run.device)

    def results() -> dict[str, Any]:
        return facts | {
            "copy_gb_s": next((f.value for f in run.figures if f.part == "bandwidth"), None),
            "seconds": round(time.perf_counter() - started, 1),
            "parts": {"done": run.done, "not_done": [part for part in parts if part not in run.done]},
            "missed": missed(run.figures),
            "left_out": [without_names(line) for line in run.left_out],
            "failed": [without_names(line) for line in run.failed],
            "figures": [_plain(figure) for figure in run.figures],
        }

    def keep() -> None:
        if file is not None:
            write_result(file, (json.dumps(results(), indent=1, allow_nan=False) + "\n").encode())

    keep()
    for part in parts:
        try:
            run.run(part)
        finally:
            keep()
    return results()


def _plain(figure: Figure) -> dict[str, Any]:
    """A figure for JSON, which has no infinity: null is the error of bytes or numbers that are wrong altogether."""
    return asdict(figure) | {"value": figure.value if math.isfinite(figure.value) else None}
