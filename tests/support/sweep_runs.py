"""Small sweeps: a grid, a text, progress that stops the sweep, and the figures that do not depend on time."""

from pathlib import Path

from lean import EngineConfig
from lean.eval.corpus import Corpus
from lean.eval.sweep.cells import to_json
from lean.eval.sweep.grid import Grid
from lean.eval.sweep.run import run_sweep
from lean.store.source import resolve

TEXT = Corpus("letters", "A short text, read again and again by a model that knows nothing. " * 4, "made here")
BASE = EngineConfig(max_num_seqs=1, prefill_chunk=64)
GRID = Grid(("int8", "int4"), (None, 64), (0, 32), max_tokens=120, context=256)


class Silent:
    """Progress that prints nothing."""

    def begin(self, cells, done, tokens_per_cell):
        self.cells, self.done = cells, done

    def say(self, what): ...
    def advance(self, tokens): ...
    def ended(self, result): ...


class KilledAfter(Silent):
    """Stops the sweep when ``cells`` cells have ended, or while the next one runs."""

    def __init__(self, cells, inside=False):
        self.left, self.inside = cells, inside

    def ended(self, result):
        self.left -= 1
        if not self.left and not self.inside:
            raise KeyboardInterrupt

    def say(self, what):
        if not self.left and self.inside and what.endswith("speed"):
            raise KeyboardInterrupt


def run(model, out, grid=GRID, base=BASE, corpus=TEXT, progress=None):
    return run_sweep(resolve(str(model)), base, grid, corpus, Path(out), progress or Silent())


def figures(sweep):
    """The fields that do not depend on time."""
    timed = {"speed", "seconds", "date"}
    return [{key: value for key, value in to_json(cell).items() if key not in timed} for cell in sweep.results]


def copy_results(source, target):
    """Copy the files of a sweep that a second run continues."""
    for name in ("config.yaml", "results.jsonl"):
        (target / name).write_bytes((source / name).read_bytes())
