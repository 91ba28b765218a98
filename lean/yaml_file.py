"""YAML as people write options: the numbers of YAML 1.2, and errors where YAML readers disagree about a spelling."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader is one of YAML 1.1: it reads 1e-6 as text, 1:30 as 90, 0123 as 83, and the last of two keys.

    Source: https://yaml.org/spec/1.2.2/#103-core-schema
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            if isinstance(key, str) and key in lines:
                raise ValueError(f"line {line}: key {key!r} is given twice, first in line {lines[key]}: remove one")
            lines[key] = line
        return super().construct_mapping(node, deep)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    digits = text.lstrip("+-")
    if digits.isdigit() and len(digits) > 1 and digits[0] == "0":
        octal = f", or as {int(digits, 8)} (octal)" if set(digits) <= set("01234567") else ""
        raise ValueError(
            f"line {node.start_mark.line + 1}: {text} can be read as {int(digits)}{octal}: "
            "write it without the leading zero"
        )
    return int(text, 0)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or 1.2 would take for something else."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}int", f"{_TAG}float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
    _kind.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(f"{_TAG}int", _int)
_Loader.add_constructor(f"{_TAG}float", _float)


def read(text: str) -> Any:
    """The value of a YAML text. Raises ValueError, which names the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def write(values: Any) -> str:
    """YAML that `read` turns back into ``values``, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
