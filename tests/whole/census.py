"""``make census``: every text decoder of transformers, built small, on lean and on transformers.

Each type runs in a process of its own. One line is printed for each, and a table of counts at the end. The results are
kept as JSON lines, the last line of a name being the valid one. What the processes print is in ``build/census``.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from threads
os.environ["HF_HUB_OFFLINE"] = "1"

import census_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from census_check import Row, check  # noqa: E402
from census_page import PATH, counts, page  # noqa: E402
from census_workers import run_each  # noqa: E402

FOLDER = ROOT / "build" / "census"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make census", description=__doc__.split("\n\n")[0])
    parser.add_argument("--types", nargs="+", metavar="NAME", help="types and variants to run; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--seconds", type=float, default=300, help="most time of one type (default: 300)")
    results = FOLDER / f"transformers-{transformers.__version__}.jsonl"
    parser.add_argument("--results", type=Path, default=results, metavar="FILE", help=f"default: {results}")
    parser.add_argument("--write", action="store_true", help="write docs/models.md from the results when all are there")
    options = parser.parse_args()
    known = {*census_models.types(), *census_models.variants()}
    for name in options.types or ():
        if name not in known:
            parser.error(f"{name} is no type of transformers {transformers.__version__} and no variant")
    return options


def read(path: Path) -> dict[str, Row]:
    """Results by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row.name: row for row in (Row(**json.loads(line)) for line in lines)}


def work(name: str) -> Row:
    """In a process of its own."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return check(name)


def run(names: list[str], options: argparse.Namespace) -> None:
    """Run types and add their rows to the file of results."""
    for number, (name, row, problem, seconds) in enumerate(
        run_each(work, names, FOLDER, jobs=options.jobs, seconds=options.seconds), 1
    ):
        row = row or Row(name, "traceback", f"the process {problem}")
        row.seconds = round(seconds, 1)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        window = f", with a window {row.window}" if row.window else ""
        why = "; ".join(filter(None, (row.transformers, row.why, row.window_why)))
        print(f"[{number}/{len(names)}] {name} ({seconds:.1f} s): {row.state}{window}{why and ': '}{why}", flush=True)


def main() -> int:
    """Exit code 1 where something is left to mend: a wrong answer, a traceback or a late refusal."""
    options = arguments()
    names = options.types or [*census_models.types(), *census_models.variants()]
    for folder in (FOLDER, options.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if not options.types:
        options.results.unlink(missing_ok=True)
    run(names, options)
    rows = read(options.results)
    print("\n" + "\n".join(counts(rows.values())))
    faults = [row for row in map(rows.get, names) if not row.good]
    for row in faults:
        late = " late" if row.late else ""
        print(f"to mend: {row.name}: {row.state}{late} {row.why} {row.window} {row.window_why}")
    if options.write:
        missing = {*census_models.types(), *census_models.variants()} - rows.keys()
        if missing:
            print(f"not written: {len(missing)} types have no result yet: run all of them once")
            return 1
        PATH.write_text(page(rows.values(), transformers.__version__), encoding="utf-8")
        print(f"written: {PATH}")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
