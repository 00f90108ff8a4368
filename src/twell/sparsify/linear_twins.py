"""Subclasses of `nn.Linear` that compute the same product, spelled out, as Falcon's does.

Most subclasses do something else: they quantise, adapt or gather. A twin has a forward of its own and nothing
else, made of its weight, its bias, `@` and `+`, and it passes a test with numbers that no rounding touches.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType

import torch
from torch import nn

from ..projections import LINEAR_TWINS

_BOOKKEEPING = {"__module__", "__qualname__", "__doc__", "__annotations__", "__static_attributes__"}
_STATEMENTS = (ast.Assign, ast.Return, ast.If)
_EXPRESSIONS = (ast.BinOp, ast.MatMult, ast.Add, ast.Compare, ast.Is, ast.IsNot, ast.Load, ast.Store)


def admit_linear_twins(model: nn.Module) -> None:
    """Let the twins in `model` count as projections."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__bases__ == (nn.Linear,) and LINEAR_TWINS.get(kind) is not kind.forward and _is_twin(kind):
            LINEAR_TWINS[kind] = kind.forward


def _is_twin(kind: type[nn.Linear]) -> bool:
    own = {
        name: value for name, value in vars(kind).items() if name not in _BOOKKEEPING | {"__firstlineno__"}
    }
    if list(own) != ["forward"] or not isinstance(own["forward"], FunctionType):
        return False
    return _is_plain_code(own["forward"]) and all(_passes(kind, bias) for bias in (True, False))


def _is_plain_code(forward: FunctionType) -> bool:
    """Whether code uses its input, weight and bias, and only `@`, `+`, transposes and `is None`."""
    try:
        (method,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(method, ast.FunctionDef):
        return False
    arguments = [argument.arg for argument in method.args.args]
    if (
        len(arguments) != 2
        or hasattr(forward, "__wrapped__")
        or method.decorator_list
        or method.args.defaults
    ):
        return False
    nodes = [node for statement in method.body for node in ast.walk(statement)]
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return all(
        isinstance(node, (*_STATEMENTS, *_EXPRESSIONS))
        or (isinstance(node, ast.Constant) and node.value is None)
        or (isinstance(node, ast.Name) and node.id in {*arguments, *stored})
        or (isinstance(node, ast.Attribute) and node.attr in ("weight", "bias", "T", "mT"))
        for node in nodes
    )


def _passes(kind: type[nn.Linear], bias: bool) -> bool:
    """On small whole numbers, of which every product and sum is exact."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        module = kind(5, 3, bias=bias, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-9, 10, parameter.shape, generator=generator))
        x = torch.randint(-9, 10, (2, 4, 5), generator=generator).float()
        try:
            result = module(x)
        except Exception:  # any code may run here, and fail in any way
            return False
        return torch.equal(result, nn.functional.linear(x, module.weight, module.bias))
