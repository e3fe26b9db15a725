"""Decide claims by formulas with the numbers of a source and of the sources that it cites.

Formulas may use + - * / **, min and max.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping

from study.claims.rules import Observed

_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max}
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UnaryOp, ast.USub, ast.Call, ast.Name,
    ast.Load, ast.Constant,
)  # fmt: skip


def observe(formula: str, numbers: Mapping[str, float]) -> Observed:
    """Return the value of a formula such as "min(a, 2 * b)". `numbers` has the value of each name.

    Raises ValueError if the formula uses anything that is not allowed, or if its value is not finite.
    """
    value = _evaluated(formula, _checked(formula, numbers), numbers)
    filled = ast.unparse(_Filled(numbers).visit(_parsed(formula)))
    steps = formula if filled == formula else f"{formula} = {filled}"
    return Observed(value, (f"{steps} = {value:.6g}",))


def _parsed(formula: str) -> ast.Expression:
    try:
        return ast.parse(formula.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        raise ValueError(f"formula {formula!r}: this is not a formula. Write numbers, names and + - * / **.") from None


def _checked(formula: str, numbers: Mapping[str, float]) -> ast.Expression:
    """Return the parsed formula with all numbers as floats.

    Raises ValueError for an unknown name and for anything that is not allowed.
    """
    tree = _parsed(formula)
    functions = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.keywords}
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Call) and not isinstance(node.func, ast.Name)):
            remedy = "Write numbers, names, + - * / **, min and max"
            raise ValueError(f"formula {formula!r}: {ast.unparse(node)!r} is not allowed. {remedy}.")
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, (int, float)) or isinstance(node.value, bool):
                raise ValueError(f"formula {formula!r}: {node.value!r} is not a number. Write a number.")
            node.value = float(node.value)  # because a power of integers could be extremely large
        if isinstance(node, ast.Name) and node.id not in (_FUNCTIONS if node in functions else numbers):
            raise ValueError(f"formula {formula!r}: {node.id} is not among the source's numbers. Add it there.")
    return tree


def _evaluated(formula: str, tree: ast.Expression, numbers: Mapping[str, float]) -> float:
    try:
        value = eval(compile(tree, "formula", "eval"), {"__builtins__": {}}, {**_FUNCTIONS, **numbers})
        if isinstance(value, complex) or not math.isfinite(value):
            raise OverflowError
    except (ArithmeticError, TypeError) as error:  # divided by zero, beyond what a number holds, a root below 0
        raise ValueError(f"formula {formula!r}: the value is not finite ({error}). Correct the formula.") from None
    return float(value)


class _Filled(ast.NodeTransformer):
    """A transformer of syntax trees that replaces names by their numbers."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._numbers.get(node.id)
        if value is None:
            return node
        return ast.Constant(int(value) if value == int(value) and abs(value) < 1e15 else value)
