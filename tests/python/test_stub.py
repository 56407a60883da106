"""``_C.pyi`` describes the built module completely: every name, parameter, default and type, in both directions.

pybind11 writes the signature that it really has into the first line of a docstring; that line is compared.
"""

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import allfinite
from allfinite import _C

STUB = Path(allfinite.__file__).with_name("_C.pyi")
# What pybind11 takes where a stub says float or int, since each caller's static type is the narrower one. Its older
# versions, torch 2.9's among them, name one protocol only.
WIDER = {
    "typing.SupportsFloat | typing.SupportsIndex": "float",
    "typing.SupportsFloat": "float",
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsInt": "int",
}
# In every extension class or module, and not part of its description.
ALWAYS = {"__doc__", "__module__", "__hash__", "__repr__", "_pybind11_conduit_v1_"}

Signature = tuple[list[tuple[str, str, Any]], str]


def types(node: ast.expr | None) -> str:
    text = "" if node is None else ast.unparse(node).replace("allfinite._C.", "")
    return WIDER.get(text, text)


def signature(function: ast.FunctionDef) -> Signature:
    """(name, type, default) of each parameter but self, and the return type."""
    arguments = function.args.posonlyargs + function.args.args
    defaults = [None] * (len(arguments) - len(function.args.defaults)) + list(function.args.defaults)
    parameters = [
        (a.arg, types(a.annotation), None if d is None else ast.literal_eval(d))
        for a, d in zip(arguments, defaults, strict=True)
        if a.arg != "self"
    ]
    return parameters, types(function.returns)


def built_signature(function: Any) -> Signature:
    """That of a pybind11 function; of several overloads, which the module does not have, it would be an error."""
    line = (function.__doc__ or "").splitlines()[0].strip()
    line = line if line[0] != "(" else f"accessor{line}"
    (parsed,) = ast.parse(f"def {line}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return signature(parsed)


def stubbed(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The names that a stub's module or class declares."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


def built(owner: type | ModuleType) -> dict[str, Any]:
    """The names that a module or class of the extension defines."""
    if isinstance(owner, ModuleType):
        return {name: value for name, value in vars(owner).items() if not name.startswith("__")}
    return {name: getattr(owner, name) for name in vars(owner) if name not in ALWAYS}


def differences(owner: type | ModuleType, body: list[ast.stmt], path: str = "_C") -> list[str]:
    """What differs between the extension and its stub, one line each."""
    here, there = built(owner), stubbed(body)
    found = [f"{path}.{name}: only in the module" for name in sorted(here.keys() - there.keys())]
    found += [f"{path}.{name}: only in the stub" for name in sorted(there.keys() - here.keys())]
    for name in sorted(here.keys() & there.keys()):
        value, node, where = here[name], there[name], f"{path}.{name}"
        if isinstance(node, ast.ClassDef):
            found += differences(value, node.body, where) if isinstance(value, type) else [f"{where}: is no class"]
        elif isinstance(node, ast.FunctionDef) and name.startswith("__") and name != "__init__":
            continue  # Python fixes the signatures of these; the stub may say more than pybind11's
        elif isinstance(node, ast.FunctionDef):
            if not callable(value) or built_signature(value) != signature(node):
                found.append(f"{where}: {built_signature(value)} in the module, {signature(node)} in the stub")
        elif isinstance(value, property):
            returned = built_signature(value.fget)[1]
            if returned != types(node.annotation) or value.fset is None:  # a plain attribute in the stub is writable
                found.append(f"{where}: {returned} in the module, {types(node.annotation)} in the stub")
        elif isinstance(value, ModuleType):
            if types(node.annotation) != "ModuleType":
                found.append(f"{where}: a module in the module, {types(node.annotation)} in the stub")
        elif types(node.annotation).split("[")[0] != type(value).__name__:
            found.append(f"{where}: {type(value).__name__} in the module, {types(node.annotation)} in the stub")
    return found


def test_the_stub_is_the_module() -> None:
    assert differences(_C, ast.parse(STUB.read_text()).body) == []


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("def cuda_built() -> bool: ...", "", "_C.cuda_built: only in the module"),
        ("def cuda_built() -> bool: ...", "def cuda_built() -> int: ...", "_C.cuda_built: "),
        ("class ScalePolicy:", "class Other: ...\nclass ScalePolicy:", "_C.Other: only in the stub"),
        ("    min_scale: float\n", "", "_C.ScalePolicy.min_scale: only in the module"),
        ("    min_scale: float\n", "    min_scale: int\n", "_C.ScalePolicy.min_scale: "),
        ("growth_interval: int = 2000", "growth_interval: int = 2001", "_C.ScalePolicy.__init__: "),
        ("found_inf: bool)", "found: bool)", "_C.ScalePolicy.next: "),
        ("SKIP_REASONS: tuple", "SKIP_REASONS: list", "_C.SKIP_REASONS: "),
    ],
)
def test_a_difference_is_found(old: str, new: str, where: str) -> None:
    """Guards the check itself: each kind of difference, made in a copy of the stub."""
    text = STUB.read_text()
    assert old in text
    (difference,) = differences(_C, ast.parse(text.replace(old, new)).body)
    assert difference.startswith(where)
