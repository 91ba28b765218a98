"""The rules of the source tree: who may import whom, and how large a class, a function or a file may be."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("lean", "eval", "kernels", "quant")  # lean/eval, lean/kernels and lean/quant are links to the other three

MAX_METHODS, MAX_FUNCTION_LINES, MAX_FILE_LINES = 22, 80, 400

# Modules directly in lean/ belong to one of two rooms; every other room is a package, and so is the leaf machine. A new
# room needs a row below.
LEAVES = {"config", "device", "errors", "layer_formats", "machine", "options", "sampling_params", "threads", "units"}
LEAVES |= {"yaml_file"}
BESIDE_LLM = {"conversation", "llm", "probe", "report", "scoring"}

# What a room may import beside itself and the leaves. Each room stands below those that import it.
MAY_IMPORT = {
    "leaves": {"quant"},  # and kernels.layout
    "quant": set(),
    "kernels": {"quant"},
    "cache": {"kernels", "quant"},
    "store": set(),
    "text": set(),
    "model": {"store", "cache", "kernels", "quant"},
    "engine": {"model", "store", "text", "cache", "kernels", "quant"},
    "llm": {"engine", "model", "store", "text", "cache", "kernels", "quant"},
    "eval": {"server", "llm", "engine", "model", "store", "text", "cache", "kernels", "quant"},
    "server": {"llm", "engine", "text", "cache", "kernels", "quant"},
    "cli": {"server", "eval", "llm", "engine", "model", "store", "text", "cache", "kernels", "quant"},
    "__main__": {"cli"},  # nothing else imports cli
    "lean": {"llm", "engine", "cache"},  # lean/__init__.py
}

IMPORT_TIME, IN_FUNCTION, FOR_TYPES = "at import time", "in a function", "under TYPE_CHECKING"


class Import(NamedTuple):
    """``module`` imports ``target``, of this package or another; ``kind`` says when; ``where`` is file and line."""

    module: str
    target: str
    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.module} imports {self.target} {self.kind}"


def files(*folders: str) -> list[Path]:
    """Python files of some folders, each file once, by whichever link it is found."""
    return sorted({path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")})


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def modules() -> dict[str, Path]:
    """Files of the package by the name that the package imports them under."""
    found = {}
    for path in files(*PACKAGE):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "lean" else ("lean", *parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> Iterator[Import]:
    """Every import statement of the package."""
    known = modules()

    def targets(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:  # of a package its module, of a module the module
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base

    def walk(node: ast.AST, kind: str, module: str, path: Path) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            yield from (Import(module, target, kind, place(path, node)) for target in targets(node, package))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            kind = IN_FUNCTION
        for_types = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from walk(child, FOR_TYPES if child in for_types else kind, module, path)

    for module, path in known.items():
        yield from walk(parsed(path), IMPORT_TIME, module, path)


def own_imports() -> Iterator[Import]:
    """Imports inside the package."""
    return (found for found in imports() if found.target.split(".")[0] == "lean")


def room(module: str) -> str:
    first = f"{module}.".split(".")[1]
    return "leaves" if first in LEAVES else "llm" if first in BESIDE_LLM else first or "lean"


def circles(found: Iterable[Import]) -> list[str]:
    """Every circle as the lines of its imports; a circle is cut at its last import before the next one is sought."""
    edges = {(one.module, one.target): one for one in found if one.module != one.target}
    rings = []
    while True:
        graph: dict[str, list[str]] = {}
        for module, target in edges:
            graph.setdefault(module, []).append(target)
        try:
            TopologicalSorter(graph).prepare()
            return rings
        except CycleError as error:
            ring = error.args[1][::-1]  # each module imports the next one
            rings.append("\n  ".join(["circle:", *(str(edges[pair]) for pair in pairwise(ring))]))
            del edges[ring[-2], ring[-1]]


def none(findings: Iterable[object]) -> None:
    lines = [str(finding) for finding in findings]
    assert not lines, "\n" + "\n".join(lines)


def test_no_modules_import_each_other_in_a_circle_at_import_time() -> None:
    none(circles(found for found in own_imports() if found.kind == IMPORT_TIME))


def test_every_module_has_a_room() -> None:
    unknown = (path for name, path in modules().items() if room(name) not in MAY_IMPORT)
    none(f"{place(path)}: its room is missing in MAY_IMPORT" for path in unknown)


def test_rooms_import_only_rooms_below_them_and_leaves() -> None:
    """Imports in functions and for types count too, so no two rooms need each other."""

    def allowed(found: Import) -> bool:
        own, other = room(found.module), room(found.target)
        if own == "leaves" and found.target == "lean.kernels.layout":
            return True
        return other in {own, "leaves"} | MAY_IMPORT.get(own, set())

    none(found for found in own_imports() if not allowed(found))


def test_the_order_of_the_rooms_has_no_circle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_the_command_line_does_not_import_the_evaluation_at_import_time() -> None:
    early = (found for found in own_imports() if found.kind == IMPORT_TIME)
    none(found for found in early if (room(found.module), room(found.target)) == ("cli", "eval"))


def test_the_block_manager_and_the_limits_of_the_machine_need_no_torch() -> None:
    """Nor does any module that they import."""
    loaded = [found for found in imports() if found.kind == IMPORT_TIME]
    waiting = {name for name in modules() if name.startswith("lean.machine")}
    waiting |= {"lean.cache.block_manager", "lean.cache.prefix"}
    reached: set[str] = set()
    while waiting:
        reached |= waiting
        waiting = {found.target for found in loaded if found.module in waiting} - reached
    none(found for found in loaded if found.module in reached and found.target.split(".")[0] == "torch")


def definitions(*kinds: type) -> list[tuple[Path, ast.AST]]:
    return [(path, node) for path in files(*PACKAGE) for node in ast.walk(parsed(path)) if isinstance(node, kinds)]


def test_no_class_has_more_than_22_methods() -> None:
    for_each = (
        (place(path, node), node.name, sum(isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) for x in node.body))
        for path, node in definitions(ast.ClassDef)
    )
    none(f"{where}: class {name} has {count} methods" for where, name, count in for_each if count > MAX_METHODS)


def test_no_function_has_more_than_80_lines() -> None:
    """Kernels in Triton are exempt: a kernel cannot be split without a price in speed."""
    for_each = (
        (place(path, node), node.name, node.end_lineno - node.lineno + 1)
        for path, node in definitions(ast.FunctionDef, ast.AsyncFunctionDef)
        if not path.is_relative_to(ROOT / "kernels/triton")
    )
    none(f"{where}: {name} has {lines} lines" for where, name, lines in for_each if lines > MAX_FUNCTION_LINES)


def test_no_file_has_more_than_400_lines() -> None:
    counts = ((place(path), len(path.read_text(encoding="utf-8").splitlines())) for path in files(*PACKAGE, "tests"))
    none(f"{where}: the file has {lines} lines" for where, lines in counts if lines > MAX_FILE_LINES)
