"""The package from outside: its public names, what importing it loads, its type marker, its documents' links."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import lean

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def imported_for_type_checkers() -> dict[str, str]:
    """name -> module of the imports that lean/__init__.py makes under TYPE_CHECKING."""
    tree = ast.parse((ROOT / "lean/__init__.py").read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_importing_lean_loads_neither_torch_nor_transformers():
    code = "import sys, lean; lean.LeanError; print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_type_checkers_see_the_public_names_and_no_others():
    assert set(imported_for_type_checkers()) == set(lean.__all__)


@pytest.mark.parametrize("name", lean.__all__)
def test_a_public_name_is_what_type_checkers_take_it_for(name):
    assert getattr(lean, name) is getattr(import_module(imported_for_type_checkers()[name]), name)
    assert name in dir(lean)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'lean' has no attribute 'Engine'"):
        lean.Engine  # noqa: B018


def test_every_error_raised_on_purpose_is_a_lean_error():
    user = {lean.ConfigError, lean.ModelError, lean.RequestError}
    assert all(issubclass(error, lean.UserError) for error in user)
    assert issubclass(lean.UserError, lean.LeanError)
    assert issubclass(lean.EngineError, lean.LeanError)
    assert not issubclass(lean.EngineError, lean.UserError)


def test_the_type_marker_is_part_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["lean"]
    assert (ROOT / "lean/py.typed").is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_of_a_document_leads_to_a_file(document):
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_a_document_names_is_in_the_tree(document):
    named = re.findall(
        r"`((?:lean|kernels|quant|eval|tests|configs|docs|examples)/[\w./-]*)`", document.read_text("utf-8")
    )
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing
