"""Read the defaults that a release ships from its source code, without importing it.

A class is a dataclass, a pydantic model, the constructor of a class, or the signature of a function or method. Two
more classes hold what belongs to no class: "launch" has the flags of accelerate's launcher, and "constants" has the
constants of DeepSpeed whose names end in _DEFAULT.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

Classes = dict[str, dict[str, str]]  # defaults as source text, by class and name
# Calls that only say how a value is stored. The value is their default, their default_factory, or their first argument.
WRAPPERS = ("field", "Field", "pp_int", "int", "float", "dataclasses.field", "pydantic.Field")
EMPTY = {"dict": "{}", "list": "[]", "tuple": "()", "set": "set()", "str": "''", "dict()": "{}", "list()": "[]"}
REMOVED = "(deprecated)"  # the default of a key that only warns if somebody sets it


def defaults(sources: Mapping[str, str]) -> Classes:
    """Return every default of a release by class and key. `sources` are the texts of its files by path.

    A default None that the code replaces by a literal ("if self.x is None: self.x = 1") counts as that literal.
    """
    trees = [ast.parse(text) for text in sources.values()]
    members = dict(member for tree in trees for member in _members_of_enumerations(tree))
    own: Classes = {"launch": {}, "constants": {}}
    bases: dict[str, set[str]] = {}
    for tree in trees:
        names = _assigned_names(tree)
        reader = _Reader(names, members)
        own["constants"] |= {name[:-8].lower(): value for name, value in names.items() if name.endswith("_DEFAULT")}
        own["launch"] |= _flags(tree, reader)
        for node in tree.body:
            for part in _unconditional(node):
                if isinstance(part, ast.ClassDef):
                    name = part.name.lstrip("_")
                    bases.setdefault(name, set()).update(ast.unparse(base).lstrip("_") for base in part.bases)
                    for class_name, keys in _of_class(part, reader):
                        own.setdefault(class_name, {}).update(keys)
                elif isinstance(part, ast.FunctionDef) and part.name[0] != "_":
                    own.setdefault(part.name, {}).update(_of_function(part, reader))

    def with_inherited(name: str) -> dict[str, str]:
        above = [with_inherited(base) for base in sorted(bases.get(name, ())) if base in own and base != name]
        return {key: text for part in above for key, text in part.items()} | own[name]

    return {name: keys for name in own if (keys := with_inherited(name))}


def keys_that_tests_distinguish(sources: Mapping[str, str]) -> set[str]:
    """Return the names for which the code tells None from False or an empty value: `x is None`, `self.x == ""`."""
    found = set()
    for text in sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                for side in (node.left, *node.comparators):
                    found |= {side.attr} if isinstance(side, ast.Attribute) else set()
                    found |= {side.id} if isinstance(side, ast.Name) else set()
    return found


class _Reader:
    """Turns a default into text: names, members of enumerations and arithmetic are replaced by their values."""

    def __init__(self, names: Mapping[str, str], members: Mapping[str, str]) -> None:
        self.names, self.members = names, members

    def text(self, node: ast.expr | None) -> str:
        if node is None:
            return "(required)"
        if isinstance(node, ast.Lambda):
            return self.text(node.body)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WRAPPERS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            first = node.args[0] if node.args else None
            return self.text(given.get("default", given.get("default_factory", first)))
        source = ast.unparse(node)
        source = self.names.get(source, source)
        if source.removesuffix(".value") in self.members:
            return self.members[source.removesuffix(".value")]
        return EMPTY.get(source, _number(node) or source)


def _number(node: ast.expr) -> str | None:
    """Return the value of arithmetic with numbers, such as 1 << 20; None if it is something else."""
    if all(
        isinstance(part, ast.BinOp | ast.UnaryOp | ast.Constant | ast.operator | ast.unaryop) for part in ast.walk(node)
    ):
        try:
            value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})  # only numbers and operators
        except (TypeError, ArithmeticError):
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) >= 1e3:
            value = int(value)
        return repr(value)
    return None


def _unconditional(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement, or those inside it if it is a condition or a try block at the top level."""
    if isinstance(node, ast.If | ast.Try):
        blocks = [node.body, node.orelse, *(handler.body for handler in getattr(node, "handlers", ()))]
        for inner in (inner for block in blocks for inner in block):
            yield from _unconditional(inner)
    else:
        yield node


def _assigned_names(tree: ast.Module) -> dict[str, str]:
    """Return the values that a file assigns to names anywhere. Two different values become "a or b"."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, _Reader(names, {}).text(node.value)
            values = [*names[name].split(" or "), value] if name in names else [value]
            names[name] = " or ".join(dict.fromkeys(values))
    return names


def _members_of_enumerations(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield "Class.MEMBER" and its value for each enumeration with literal values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            for part in node.body:
                if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant):
                    yield f"{node.name}.{ast.unparse(part.targets[0])}", ast.unparse(part.value)


def _flags(tree: ast.Module, reader: _Reader) -> dict[str, str]:
    flags = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument") and node.args:
            given = {keyword.arg: keyword.value for keyword in node.keywords}.get("default")
            flags[ast.unparse(node.args[0]).strip("'")] = reader.text(given or ast.Constant(None))
    return flags


def _of_class(node: ast.ClassDef, reader: _Reader) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the fields and constructor of a class under its name, and its public methods as Class.method."""
    fields = {
        ast.unparse(part.target): reader.text(part.value)
        for part in node.body
        if isinstance(part, ast.AnnAssign) and not re.search("ClassVar|TypeAlias", ast.unparse(part.annotation))
    }
    effective = dict(_replaced_none(node, reader))
    keys = {key: _in_effect(key, text, effective) for key, text in fields.items() if key[0] != "_"}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            if part.name == "__init__":
                keys |= _of_function(part, reader)
            elif part.name[0] != "_" and (signature := _of_function(part, reader)):
                yield f"{node.name.lstrip('_')}.{part.name}", signature
    yield node.name.lstrip("_"), keys


def _of_function(node: ast.FunctionDef, reader: _Reader) -> dict[str, str]:
    """Return the parameters of a function that have a default."""
    positional = [*node.args.posonlyargs, *node.args.args]
    with_default = positional[len(positional) - len(node.args.defaults) :]
    pairs = [
        *zip(with_default, node.args.defaults, strict=True),
        *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
    ]
    effective = dict(_replaced_none(node, reader))
    return {
        argument.arg: _in_effect(argument.arg, reader.text(value), effective)
        for argument, value in pairs
        if value is not None and argument.arg[0] != "_"
    }


def _in_effect(key: str, text: str, effective: Mapping[str, str]) -> str:
    """Return the value that a default has in the end."""
    return effective[key] if key in effective and (text == "None" or effective[key] == REMOVED) else text


def _replaced_none(node: ast.ClassDef | ast.FunctionDef, reader: _Reader) -> Iterator[tuple[str, str]]:
    """Yield the keys whose value None the code always replaces by a literal, with that literal, and deprecated keys."""
    functions = [node] if isinstance(node, ast.FunctionDef) else node.body
    for part in (part for one in functions if isinstance(one, ast.FunctionDef) for part in one.body):
        if isinstance(part, ast.If) and (key := _tested_for(part.test, ast.IsNot) or _tested_for(part.test, ast.NotEq)):
            if "deprecated" in ast.unparse(part).lower() and re.search(r"\bwarn", ast.unparse(part)):
                yield key, REMOVED
        elif isinstance(part, ast.If) and (key := _tested_for(part.test, ast.Is)):
            for inner in part.body:
                if isinstance(inner, ast.Assign) and _key(inner.targets[0]) == key and _is_literal(inner.value):
                    yield key, reader.text(inner.value)
        elif isinstance(part, ast.Assign) and (key := _key(part.targets[0])):
            value = _value_for_none(part.value, key)
            if value is not None and _is_literal(value):
                yield key, reader.text(value)


def _value_for_none(node: ast.expr, key: str) -> ast.expr | None:
    """Return what `x = 1 if x is None else x`, `x = x if x is not None else 1` or `x = x or 1` make of None."""
    if isinstance(node, ast.IfExp) and _tested_for(node.test, ast.Is) == key:
        return node.body
    if isinstance(node, ast.IfExp) and _tested_for(node.test, ast.IsNot) == key:
        return node.orelse
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and _key(node.values[0]) == key:
        return node.values[-1]
    return None


def _key(node: ast.expr) -> str | None:
    """Return x for `self.x` and for `x`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _tested_for(test: ast.expr, operator: type[ast.cmpop]) -> str | None:
    """Return x if a condition is `x is None`, or `x is not None` for the operator IsNot, or `x != 1` for NotEq."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], operator)):
        return None
    compared = test.comparators[0]
    is_right = isinstance(compared, ast.Constant) and compared.value is None
    return _key(test.left) if is_right or operator is ast.NotEq else None


def _is_literal(node: ast.expr) -> bool:
    """Return whether an expression is a constant, a member such as IntervalStrategy.NO, or an empty container."""
    return (
        isinstance(node, ast.Constant)
        or (isinstance(node, ast.Attribute) and not ast.unparse(node).startswith("self."))
        or ast.unparse(node) in ("{}", "[]", "()", "dict()", "list()")
    )
