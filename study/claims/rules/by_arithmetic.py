"""What does a formula over the numbers of a source, and of what it cites, give? + - * / **, min, max and round only."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from study.claims.rules import Observed

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "round": round}
_LONGEST = 1000  # characters
_LARGEST_POWER = 64


def observe(formula: str, numbers: Mapping[str, float]) -> Observed:
    """Evaluate a formula. Raises ValueError for what it may not hold, and where it has no finite value."""
    tree = _parsed(formula)
    value = _value(tree, numbers, formula)
    filled = ast.unparse(_Filled(numbers).visit(tree))
    shown = formula if filled == formula else f"{formula} = {filled}"
    return Observed(value, (f"{shown} = {value:.6g}",))


def _parsed(formula: str) -> ast.expr:
    if len(formula) > _LONGEST:
        raise ValueError(f"formula: {len(formula)} characters, at most {_LONGEST} are read; shorten it")
    try:
        return ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise ValueError(f"formula {formula!r}: is no formula; write numbers, names and + - * / **") from None


def _value(node: ast.expr, numbers: Mapping[str, float], formula: str) -> float:
    def of(part: ast.expr) -> float:
        match part:
            case ast.Constant(value=bool() | str() | bytes() | None):
                raise ValueError(f"formula {formula!r}: {part.value!r} is no number")
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name):
                if name not in numbers:
                    raise ValueError(f"formula {formula!r}: {name} is not among the source's numbers; add it there")
                return float(numbers[name])
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -of(inner)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                left_value, right_value = of(left), of(right)
                if isinstance(sign, ast.Pow) and abs(right_value) > _LARGEST_POWER:
                    raise ValueError(f"formula {formula!r}: the power {right_value:g} is beyond {_LARGEST_POWER}")
                result = _OPERATORS[type(sign)](left_value, right_value)
                if isinstance(result, complex):
                    raise ValueError(f"formula {formula!r}: a root of the negative number {left_value:g}")
                return result
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as given, keywords=[]) if name in _FUNCTIONS:
                return float(_applied(name, [of(argument) for argument in given], formula))
        raise ValueError(
            f"formula {formula!r}: {ast.unparse(part)!r} is not allowed; write numbers, names, + - * / **, min, max "
            "and round"
        )

    try:
        value = of(node)
    except ZeroDivisionError:
        raise ValueError(f"formula {formula!r}: divides by zero; correct the numbers") from None
    except OverflowError:
        raise ValueError(f"formula {formula!r}: is beyond what a number holds") from None
    if not math.isfinite(value):
        raise ValueError(f"formula {formula!r}: has no finite value")
    return value


def _applied(name: str, given: list[float], formula: str) -> float:
    if name == "round" and len(given) == 2:
        return round(given[0], int(given[1]))
    if (name == "round") != (len(given) == 1):
        raise ValueError(f"formula {formula!r}: {name} of {len(given)} numbers")
    return _FUNCTIONS[name](*given)


class _Filled(ast.NodeTransformer):
    """Put the numbers in the place of their names."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_plain(self._numbers[node.id])) if node.id in self._numbers else node


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) and abs(value) < 1e15 else value
