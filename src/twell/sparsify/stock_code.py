"""Finds blocks in the source of a layer: projections that its code calls one after the other.

A layer with attention and norms cannot be run on random input without knowing its arguments, so its code is
read instead. What counts is a value that goes from a projection through an activation, and perhaps dropouts,
to another projection, and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from functools import cache
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import nn

_NONFINITE = {"nan_to_num", "nan_to_num_", "isnan", "isinf", "isposinf", "isneginf", "isfinite"}


class Step(NamedTuple):
    """One thing that code does to a value.

    kind: "module" (called as self.NAME), "dropout" (functional), or "other".
    name: of the attribute; of a dropout, the one that holds its probability.
    only_input: whether the value is the call's only argument.
    """

    kind: str
    name: str | None
    only_input: bool = True


class Chain(NamedTuple):
    """Steps that a value takes one after the other, each used by the next alone.

    returned: whether it is the value that forward returns, always.
    """

    steps: tuple[Step, ...]
    returned: bool = False


def chains_of(kind: type[nn.Module]) -> tuple[tuple[Chain, ...], Counter]:
    """The chains in the methods of a class, and how often its code mentions each attribute of self: methods
    that are overridden count, since `super()` may call them, and so do properties."""
    return _chains_of(kind, _code_of(kind))


@cache
def _chains_of(kind: type[nn.Module], code: tuple[CodeType, ...]) -> tuple[tuple[Chain, ...], Counter]:
    """code: of its functions; a patched class is another one."""
    chains, mentions = [], Counter()
    effective = {id(function) for function in _functions(kind, overridden=False)}
    for function in _functions(kind, overridden=True):
        method = _parsed(function)
        if method is None:
            return (), Counter()  # what cannot be read may use anything
        nodes = list(ast.walk(method))
        mentions.update(
            node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)
        )
        mentions.update(_named_otherwise(nodes))
        if id(function) in effective:
            for body in _bodies(method):
                chains += _chains_in(body, method)
    return tuple(chains), mentions


def _named_otherwise(nodes: list[ast.AST]) -> list[str]:
    """Attributes of self that are read by name: getattr(self, "fc1")."""
    return [
        node.args[1].value
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and len(node.args) > 1
        and _is_self(node.args[0])
        and isinstance(node.args[1], ast.Constant)
    ]


def what_code_looks_at(kind: type[nn.Module]) -> frozenset[str]:
    """What conditions in the code of a class look at, besides itself: "shape", "dtype", "values"; and
    "nonfinite" where any of its code looks for NaN or infinity."""
    return _what_code_looks_at(kind, _code_of(kind))


@cache
def _what_code_looks_at(kind: type[nn.Module], code: tuple[CodeType, ...]) -> frozenset[str]:
    found: set[str] = set()
    for function in _functions(kind, overridden=False):
        method = _parsed(function)
        for node in [] if method is None else ast.walk(method):
            if hasattr(node, "test"):
                found |= _looked_at(node.test)
            if (getattr(node, "attr", None) or getattr(node, "id", None)) in _NONFINITE:
                found.add("nonfinite")
    return frozenset(found)


def _looked_at(test: ast.expr) -> set[str]:
    names = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    found = {"dtype"} if "dtype" in names else set()
    if names & {"shape", "size", "dim", "ndim", "numel"}:
        found.add("shape")
    compared = [n for n in ast.walk(test) if isinstance(n, ast.Compare)]
    computed = [
        call
        for compare in compared
        for side in (compare.left, *compare.comparators)
        for call in ast.walk(side)
        if isinstance(call, ast.Call)
    ]
    if any(not _is_about_self(call) for call in computed):
        found.add("values")
    return found


def _is_about_self(call: ast.Call) -> bool:
    """Whether a call reads nothing but the module and its class."""
    return all(n.id in ("self", "getattr", "len", "type") for n in ast.walk(call) if isinstance(n, ast.Name))


@cache
def input_reader(kind: type[nn.Module]) -> str | None:
    """The child that takes the first input of forward, as it is; None if anything else may take it, too."""
    (method, *_) = [method for method in _methods(kind) if method.name == "forward"] or (None,)
    if method is None or len(method.args.args) < 2:
        return None
    name = method.args.args[1].arg
    for statement in method.body:
        count = _count(statement, name)
        if not count:
            continue
        target, expression = _assignment(statement)
        if expression is None or _count(expression, name) != 1:
            return None
        core, steps = _unwrapped(expression)
        if not isinstance(core, ast.Name) or core.id != name or not steps:
            return None
        if target != name and _is_read_later(method, statement, name):
            return None
        return steps[0].name if steps[0].kind == "module" and steps[0].only_input else None
    return None


def _only_return(method: ast.FunctionDef) -> ast.Return | None:
    """The last statement of forward, if it returns nowhere else."""
    returns = [node for node in ast.walk(method) if isinstance(node, ast.Return)]
    ends = method.name == "forward" and returns == method.body[-1:]
    return returns[0] if ends else None


def _methods(kind: type[nn.Module]) -> list[ast.FunctionDef]:
    """The methods of a class and its bases, without constructors and what is overridden."""
    parsed = (_parsed(function) for function in _functions(kind, overridden=False))
    return [method for method in parsed if method is not None]


def _functions(kind: type[nn.Module], overridden: bool) -> list[FunctionType]:
    """The functions of a class and its bases, with properties, without constructors.

    overridden: whether to include what is overridden.
    """
    seen, found = {"__init__"}, []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            function = inspect.unwrap(value) if inspect.isfunction(value) else None
            if function is None or name == "__init__" or (name in seen and not overridden):
                continue
            seen.add(name)
            found.append(function)
    return found


def _code_of(kind: type[nn.Module]) -> tuple[CodeType, ...]:
    return tuple(function.__code__ for function in _functions(kind, overridden=True))


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    return tree.body[0] if tree.body and isinstance(tree.body[0], ast.FunctionDef) else None


def _bodies(method: ast.FunctionDef) -> list[list[ast.stmt]]:
    """Every list of statements that run one after the other."""
    bodies = []
    for node in ast.walk(method):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                bodies.append(statements)
    return bodies


def _chains_in(body: list[ast.stmt], method: ast.FunctionDef) -> list[Chain]:
    chains: list[Chain] = []
    growing: dict[str, tuple[Step, ...]] = {}  # by the variable that holds the value

    def steps_of(core: ast.expr, applied: list[Step]) -> tuple[Step, ...]:
        """With those before, where the value is in a variable that nothing else reads."""
        if not isinstance(core, ast.Name) or core.id not in growing or _count(expression, core.id) != 1:
            return tuple(applied)
        if target != core.id and _is_read_later(method, statement, core.id):
            return tuple(applied)
        return (*growing.pop(core.id), *applied)

    for statement in body:
        target, expression = _assignment(statement)
        steps: tuple[Step, ...] = ()
        if expression is not None:
            core, applied = _unwrapped(expression)
            steps = steps_of(core, applied)
            chains += [Chain(steps_of(*_unwrapped(call))) for call in _calls_inside(core)]
        # Whatever comes between two steps may change values in place: a chain is made of neighbours.
        chains += [Chain(growing.pop(name)) for name in list(growing)]
        if steps and target is not None:
            growing[target] = steps
        elif steps:
            chains.append(Chain(steps, returned=statement is _only_return(method)))
    return [*chains, *map(Chain, growing.values())]


def _calls_inside(expression: ast.expr) -> list[ast.Call]:
    """Outermost calls in sums, products and tuples: evaluating the expression makes each of them once."""
    if isinstance(expression, ast.BinOp):
        sides = [expression.left, expression.right]
    elif isinstance(expression, ast.Tuple):
        sides = expression.elts
    else:
        return []
    return [
        call for side in sides for call in ([side] if isinstance(side, ast.Call) else _calls_inside(side))
    ]


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """(variable, expression) of `variable = expression`; (None, expression) of a return."""
    if isinstance(statement, ast.Return) and statement.value is not None:
        return None, statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, statement.value
    return None, None


def _unwrapped(expression: ast.expr) -> tuple[ast.expr, list[Step]]:
    """The innermost value and what is applied to it, first things first."""
    steps: list[Step] = []
    while isinstance(expression, ast.Call) and expression.args:
        steps.append(_step(expression))
        expression = expression.args[0]
    return expression, steps[::-1]


def _step(call: ast.Call) -> Step:
    function = call.func
    alone = len(call.args) == 1 and not call.keywords
    if isinstance(function, ast.Attribute):
        if _is_self(function.value):
            return Step("module", function.attr, alone)
        if function.attr == "dropout" and _follows_training(call):
            return Step("dropout", _probability(call))
    return Step("other", None, alone)


def _follows_training(call: ast.Call) -> bool:
    """Whether a functional dropout is told `training=self.training`, and works on a copy."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if not set(named) <= {"p", "training"}:
        return False
    values = [named["training"]] if "training" in named else call.args[2:3]
    return bool(values) and isinstance(values[0], ast.Attribute) and ast.unparse(values[0]) == "self.training"


def _probability(call: ast.Call) -> str | None:
    """The attribute of self that a functional dropout takes its probability from."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "p"] or call.args[1:2]
    if values and isinstance(values[0], ast.Attribute) and _is_self(values[0].value):
        return values[0].attr
    return None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _count(node: ast.AST, name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


def _is_read_later(method: ast.FunctionDef, statement: ast.stmt, name: str) -> bool:
    """Whether code below `statement` reads the variable; loops are taken for reading it."""
    for node in ast.walk(method):
        if isinstance(node, ast.For | ast.While) and any(inner is statement for inner in ast.walk(node)):
            return True
        is_closure = isinstance(node, ast.Lambda | ast.FunctionDef) and node is not method
        if is_closure and _count(node, name):
            return True  # whenever it runs
        is_read = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        if is_read and node.lineno > statement.end_lineno:
            return True
    return False
