"""The mutants of a source file: one small change of its syntax tree each.

Not mutated, since no behaviour depends on it: docstrings, annotations, type aliases, imports, asserts, decorators,
protocols, log lines, texts of errors, `strict=` of zip (an assert in other words).
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT_CALLS = {"TypeVar", "NewType", "ParamSpec", "getLogger", "warn", "cast"}  # nothing in their arguments is tested
LOG_LEVELS = {"debug", "info", "warning", "error", "exception"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change in one file: of the node at `index` in `ast.walk`, the alternative number `choice`."""

    file: str
    line: int
    around: tuple[int, int]  # first and last line of the function or class it is in
    scope: str  # their name, "" for the module
    operator: str
    old: str
    new: str
    nth: int  # of changes that read the same in this scope
    index: int
    choice: int

    @property
    def key(self) -> str:
        """Stays the same when lines move, so that a sample of keys does too."""
        return "|".join((self.file, self.scope, self.operator, self.old, self.new, str(self.nth)))


def mutants(source: str, file: str) -> list[Mutant]:
    """Every mutant of a source, in the order of its tree."""
    tree = ast.parse(source)
    places = {id(node): index for index, node in enumerate(ast.walk(tree))}
    errors, seen, made = _error_names(tree), Counter[tuple[str, ...]](), []
    for node, scope, around in _sites(tree, "", (1, len(source.splitlines())), errors):
        for choice, (operator, new) in enumerate(_changes(node)):
            texts = (scope, operator, ast.unparse(node), ast.unparse(new))
            made.append(Mutant(file, node.lineno, around, *texts, seen[texts], places[id(node)], choice))
            seen[texts] += 1
    return made


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The tree with the mutant's change."""
    tree = ast.parse(source)
    node = list(ast.walk(tree))[mutant.index]
    _, new = list(_changes(node))[mutant.choice]
    _Replace(node, ast.copy_location(new, node)).visit(tree)
    return ast.fix_missing_locations(tree)


def diff(source: str, mutant: Mutant) -> str:
    """The change as a diff of normalized sources."""
    old, new = ast.unparse(ast.parse(source)), ast.unparse(mutated(source, mutant))
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), mutant.file, mutant.file, n=1, lineterm="")
    return "\n".join(lines)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _error_names(tree: ast.Module) -> set[str]:
    """Classes of errors in this file: what they are called with is text for people."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = {alias.name for node in imports if (node.module or "").endswith("errors") for alias in node.names}
    return named | {"ValueError", "TypeError", "RuntimeError", "KeyError", "NotImplementedError", "AttributeError"}


Site = tuple[ast.expr | ast.stmt, str, tuple[int, int]]


def _sites(node: ast.AST, scope: str, around: tuple[int, int], errors: set[str]) -> Iterator[Site]:
    """Every node that may change, with the function it is in and the lines of that."""
    if _silent(node, errors):
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        scope, around = f"{scope}.{node.name}".lstrip("."), (node.lineno, node.end_lineno or node.lineno)
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node, scope, around
    for child in _children(node):
        yield from _sites(child, scope, around, errors)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (default for default in [*node.args.defaults, *node.args.kw_defaults] if default)
            yield from node.body
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [node.value] if node.value else []
        case ast.Raise():  # the statement itself can go, its text stays
            return
        case ast.match_case():
            yield from [*([node.guard] if node.guard else []), *node.body]
        case _:
            yield from ast.iter_child_nodes(node)


def _silent(node: ast.AST, errors: set[str]) -> bool:
    """Whether no behaviour hangs on a node and all below it."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.expr_context():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring, or `...`
            return True
        case ast.Expr(value=ast.Call() as call):
            return _silent(call, errors)
        case ast.ClassDef():
            return any("Protocol" in ast.unparse(base) for base in node.bases)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return all(_silent(statement, errors) for statement in node.body)
        case ast.If(test=test):
            return ast.unparse(test) == "TYPE_CHECKING"
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name in ("__all__", "__slots__") or (name[0].isupper() and _alias(value))
        case ast.keyword(arg="strict"):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in errors | SILENT_CALLS
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
            return name in SILENT_CALLS or (name in LOG_LEVELS and "log" in owner.lower())
    return False


def _alias(value: ast.expr) -> bool:
    """`A | B` or `Callable[[int], None]`: a type under another name."""
    match value:
        case ast.BinOp(op=ast.BitOr()) | ast.Subscript():
            return not any(isinstance(node, ast.Call) for node in ast.walk(value))
    return False


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The mutations of one node: the operator's name and the node that takes its place."""
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                    yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _union(node):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right)
        case ast.AugAssign(op=op):
            yield "statement", ast.Pass()
            if type(op) in ARITHMETIC:
                yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(op)](), node.value)
        case ast.BoolOp(op=op):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "unary", node.operand
        case ast.Constant(value=value):
            yield from (("constant", ast.Constant(other)) for other in _constants(value))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield "return", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()
        case ast.If() | ast.IfExp():
            for truth in (True, False):
                parts = {name: getattr(node, name) for name in node._fields}
                yield "condition", type(node)(**parts | {"test": ast.Constant(truth)})
        case ast.While():
            yield "condition", ast.While(ast.Constant(False), node.body, node.orelse)
        case ast.Break():
            yield "loop", ast.Continue()
        case ast.Continue():
            yield "loop", ast.Break()
        case ast.Call():
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield "min/max", ast.Call(ast.Name(CALLS[node.func.id], ast.Load()), node.args, node.keywords)
    for at, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "strict"):
            yield "keyword", ast.Call(node.func, node.args, [*node.keywords[:at], *node.keywords[at + 1 :]])


def _constants(value: object) -> list[bool | int | float | str | bytes]:
    match value:
        case bool():
            return [not value]
        case int():
            return [0, 2] if value == 1 else [value + 1]
        case float():
            return [value + 1.0]
        case str() | bytes():
            return [value[:0] if value else ("mutated" if isinstance(value, str) else b"mutated")]
    return []


def _union(node: ast.BinOp) -> bool:
    """`isinstance(x, A | B)`: a union of types, where another operator is only an error."""
    sides = [ast.unparse(side).split(".")[-1] for side in (node.left, node.right)]
    return isinstance(node.op, ast.BitOr) and any(side[0].isupper() and not side.isupper() for side in sides)


def unchanged(source: str, mutant: Mutant) -> bool:
    """Whether the compiler makes the same of both: such a mutant is no change."""
    codes = [
        compile(tree, mutant.file, "exec", dont_inherit=True) for tree in (ast.parse(source), mutated(source, mutant))
    ]
    return codes[0] == codes[1]
