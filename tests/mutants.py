"""Wrong versions of a backward: one expression dropped, shifted, scaled, negated or cut, one statement left out."""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tolerances import MUTANT_SCALE

Backward = Callable[..., Any]
Edit = Callable[[Any], "ast.AST | None"]


class Mutant(NamedTuple):
    """A mutant of no action so far has not met a number that it could change."""

    label: str
    backward: Backward
    acted: list[bool]  # grows with the calls: whether the change met numbers and altered them


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "drop": torch.zeros_like,
    "shift": lambda x: x.roll(1, next(d for d, n in enumerate(x.shape) if n > 1)) if x.numel() > 1 else x,
    "scale": lambda x: x * MUTANT_SCALE,
    "negate": torch.neg,
}

LONGEST = 90  # of a statement in a label

# Where a name is read for its form alone, a change of its numbers is no mutant.
_FORM = {"shape", "dtype", "device", "numel", "new_zeros", "new_full"}
_FORM_OF_ARGUMENT = {"len", "zeros_like", "full_like"}


def mutants(backward: Backward) -> Iterator[Mutant]:
    """All of them, in the backward and in the helpers of its own module that it calls."""
    backward = inspect.unwrap(backward)
    module = sys.modules[backward.__module__]
    tree = ast.parse(inspect.getsource(module))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reached = _reached(backward.__name__, functions)
    for function in reached:
        for label, changed_function in _edited(function):
            acted: list[bool] = []
            scope = {**vars(module), "_mutate": _mutate(acted)}
            if not label.startswith(tuple(CHANGES)):
                acted.append(True)
            for body in reached:
                _define(changed_function if body is function else body, scope)
            yield Mutant(f"{function.name}, {label}", scope[backward.__name__], acted)


def of_results(backward: Backward, places: Iterable[int]) -> Iterator[Mutant]:
    """The backward with one of the gradients that it returns changed."""

    def wrong(index: int, change: str, acted: list[bool]) -> Backward:
        def backward_with_a_change(*args: Any) -> Any:
            grads = backward(*args)
            parts = [grads] if isinstance(grads, Tensor) else list(grads)
            parts[index] = _mutate(acted)(change, parts[index])
            if isinstance(grads, Tensor):
                return parts[0]
            return type(grads)(*parts) if hasattr(grads, "_fields") else tuple(parts)

        return backward_with_a_change

    for index in places:
        for change in CHANGES:
            acted: list[bool] = []
            yield Mutant(f"{change} gradient {index}", wrong(index, change, acted), acted)


def _mutate(acted: list[bool]) -> Callable[[str, Any], Any]:
    def mutate(change: str, value: Any) -> Any:
        if isinstance(value, list) and change in ("drop", "shift"):  # the steps of a loop
            other = value[1:] + ([] if change == "drop" else value[:1])
            acted.append(len(value) > 1)
            return other
        if type(value) is tuple and value and all(isinstance(v, Tensor) for v in value):  # a state
            return tuple(mutate(change, v) for v in value)
        if isinstance(value, float) and change != "shift":
            return mutate(change, torch.tensor(value, dtype=torch.float64)).item()
        if not isinstance(value, Tensor) or not (value.is_floating_point() or change == "shift"):
            return value
        other = CHANGES[change](value)
        acted.append(not torch.equal(other, value))
        return other

    return mutate


def _reached(name: str, functions: dict[str, ast.FunctionDef]) -> list[ast.FunctionDef]:
    """A function and those it calls, but for the arithmetic of whole numbers, which has its own test."""
    found = [name]
    for each in found:
        called = {n.id for n in ast.walk(functions[each]) if isinstance(n, ast.Name) and n.id in functions}
        found += sorted(called - {*found, "_philox"})
    return [functions[each] for each in found]


def _define(function: ast.FunctionDef, scope: dict[str, Any]) -> None:
    module = ast.fix_missing_locations(ast.Module([function], type_ignores=[]))
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "<mutant>", "exec", flags=flags, dont_inherit=True), scope)


def _edited(function: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The function with one edit, until the next is asked for, and a label that says which."""
    seen: Counter[str] = Counter()
    for node, parent, statement in list(_nodes(function)):
        part, where = (ast.unparse(n).split("\n")[0] for n in (node, statement))
        for what, edit in _edits(node, parent):
            label = f"{what} {part} in {where if len(where) <= LONGEST else where[:LONGEST] + ' ...'}"
            seen[label] += 1
            new = edit(node)
            _replace(parent, node, new)
            yield label if seen[label] == 1 else f"{label} ({seen[label]})", function
            _replace(parent, new, node)


def _nodes(function: ast.FunctionDef) -> Iterator[tuple[Any, ast.AST, ast.AST]]:
    """All nodes of the body, each with its parent and its statement, without the docstring."""
    stack: list[tuple[ast.AST, ast.AST, ast.AST]] = [(s, function, s) for s in reversed(function.body)]
    while stack:
        node, parent, statement = stack.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        statement = node if isinstance(node, ast.stmt) else statement
        yield node, parent, statement
        stack += [(child, node, statement) for child in ast.iter_child_nodes(node)]


def _edits(node: Any, parent: Any) -> Iterator[tuple[str, Edit]]:
    loads = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    if isinstance(node, ast.Name | ast.Attribute | ast.BinOp | ast.UnaryOp | ast.Call | ast.Subscript) and loads:
        called = isinstance(parent, ast.Call) and parent.func is node
        form = isinstance(parent, ast.Attribute) and parent.attr in _FORM
        form |= isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.Is | ast.IsNot)
        form |= isinstance(parent, ast.Call) and ast.unparse(parent.func).split(".")[-1] in _FORM_OF_ARGUMENT
        for change in () if called or form else CHANGES:
            yield change, lambda n, c=change: _call_of_mutate(c, n)
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
        yield "only the left of", lambda n: n.left
        yield "only the right of", lambda n: n.right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "the other sign in", lambda n: ast.BinOp(n.left, other, n.right)
    if isinstance(node, ast.Compare):
        opposite = {
            ast.Eq: ast.NotEq,
            ast.Gt: ast.GtE,
            ast.GtE: ast.Lt,
            ast.IsNot: ast.Is,
            ast.Is: ast.IsNot,
            ast.Lt: ast.Gt,
        }
        yield "another comparison in", lambda n: ast.Compare(n.left, [opposite[type(n.ops[0])]()], n.comparators)
    if isinstance(node, ast.If) or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)):
        yield "leave out", lambda n: ast.Pass()


def _call_of_mutate(change: str, node: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("_mutate", ast.Load()), [ast.Constant(change), node], [])


def _replace(parent: ast.AST, child: ast.AST, new: ast.AST | None) -> None:
    for field, value in ast.iter_fields(parent):
        if value is child:
            setattr(parent, field, new)
        elif isinstance(value, list) and any(v is child for v in value):
            setattr(parent, field, [new if v is child else v for v in value])
