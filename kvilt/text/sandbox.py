"""Untrusted Jinja templates, run in this process under a budget: every loop, call and operator is accounted for.

Refuses to know chats: it takes a source and variables and gives text or a TemplateError.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CodeType, MethodType
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, meta, nodes, pass_context
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import KviltError, TemplateError
from .budget import TemplateBudget, TemplateLimits
from .sandbox_filters import allowed_filters, allowed_globals, allowed_tests
from .sandbox_math import OPERATORS, check_number, compare
from .sandbox_values import Bounded, check_name, concat, kept, methods_of, spliced, text_of
from .user_text import marked

_LOOP = "index index0 revindex revindex0 first last length depth depth0 previtem nextitem cycle changed"
# Template syntax that chat templates use; includes, imports, blocks and inheritance have nothing to reach here.
_SYNTAX = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.For,
    nodes.If,
    nodes.Macro,
    nodes.CallBlock,
    nodes.Assign,
    nodes.AssignBlock,
    nodes.ExprStmt,
    nodes.Scope,
    nodes.With,
    nodes.Break,
    nodes.Continue,
    nodes.Name,
    nodes.NSRef,
    nodes.Literal,
    nodes.Pair,
    nodes.Keyword,
    nodes.CondExpr,
    nodes.Filter,
    nodes.FilterBlock,
    nodes.Test,
    nodes.Call,
    nodes.Getitem,
    nodes.Getattr,
    nodes.Slice,
    nodes.Concat,
    nodes.Compare,
    nodes.Operand,
    nodes.BinExpr,
    nodes.UnaryExpr,
)


class CompiledTemplate:
    """A template ready to render; rendering keeps no state, so threads may share it."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        """Parse, check and compile `source`; TemplateError says what is wrong with it."""
        if len(source) > limits.source_chars:
            raise TemplateError(
                f"the chat template has {len(source)} characters and kvilt takes at most {limits.source_chars}"
            )
        self._limits = limits
        self._environment = TemplateEnvironment()
        self.variables: frozenset[str] = frozenset()  # names the template reads from outside
        self._code = self._compile(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text for these variables."""
        environment = self._environment.within(TemplateBudget(self._limits))
        try:
            template = Template.from_code(environment, self._code, environment.make_globals(None))
            parts = template.root_render_func(template.new_context(dict(variables)))
            return environment.collect(parts)
        except KviltError:
            raise
        except RecursionError:
            raise TemplateError("the chat template calls itself too deeply") from None
        except Exception as error:  # whatever a template does wrong is the template's fault
            raise TemplateError(f"the chat template failed: {_sentence(error)}") from error

    def _compile(self, source: str) -> CodeType:
        try:
            tree = self._environment.parse(source)
            _check_syntax(tree, self._limits)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            _Metered().visit(tree)
            tree.set_environment(self._environment)
            return self._environment.compile(tree)
        except KviltError:
            raise
        except TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid: {_sentence(error)} (line {error.lineno})") from error
        except RecursionError:
            raise TemplateError("the chat template is nested too deeply") from None
        except Exception as error:
            raise TemplateError(f"the chat template is not valid: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    text = (error.message if isinstance(error, JinjaError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]


def _check_syntax(tree: nodes.Template, limits: TemplateLimits) -> None:
    stack: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > limits.depth:
            raise TemplateError("the chat template is nested too deeply")
        if not isinstance(node, _SYNTAX):
            raise TemplateError(f"the chat template uses {type(node).__name__.lower()}, which is not allowed")
        if isinstance(node, nodes.Name) and node.name in ("varargs", "kwargs"):
            raise TemplateError(f"the chat template uses {node.name}, which is not allowed")
        if isinstance(node, nodes.Const):
            check_number(node.value)
        stack.extend((child, depth + 1) for child in node.iter_child_nodes())


class _Metered(NodeTransformer):
    """Puts the budget into the syntax tree: a tick in every loop and macro, a measure around what can grow."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's naming
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_ask("tick", node, nodes.Const(1)), node.test, lineno=node.lineno)
        node.body.insert(0, _tick(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _ask("joined", node, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Comparisons are calls too: `in` may search a long text."""
        self.generic_visit(node)
        pairs = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _ask("compared", node, node.expr, *pairs)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _ask("measured", node, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if _constant(node) else _ask("measured", node, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx != "load" or _constant(node) else _ask("measured", node, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _ask("measured", node, node)


def _ask(name: str, near: nodes.Node, *args: nodes.Node) -> nodes.Call:
    """A call of one of the environment's own methods, which no template can name."""
    target = nodes.EnvironmentAttribute(name, lineno=near.lineno)
    return nodes.Call(target, list(args), [], None, None, lineno=near.lineno)


def _tick(node: nodes.For | nodes.Macro) -> nodes.ExprStmt:
    """Pay for one run of the body: as many steps as it has outputs, so that buffers stay bounded too."""
    steps = 1 + sum(1 for inner in node.body for _ in inner.find_all(nodes.Output))
    return nodes.ExprStmt(_ask("tick", node, nodes.Const(steps)), lineno=node.lineno)


def _constant(node: nodes.List | nodes.Tuple) -> bool:
    return all(isinstance(item, nodes.Const) for item in node.items)


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is only a block."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Method:
    """A method of a value, bound to it and to the budget."""

    __slots__ = ("_function", "_value")

    def __init__(self, function: Bounded, value: Any) -> None:
        self._function = function
        self._value = value

    def run(self, budget: TemplateBudget, args: Any, kwargs: Any) -> Any:
        return marked(self._function(budget, self._value, *args, **kwargs), self._value, args, kwargs)


@pass_context  # an argument only known at run time also keeps jinja2 from evaluating outputs while it compiles
def _finalize(context: Any, value: Any) -> str:
    budget = context.environment.budget
    budget.tick()
    return text_of(budget, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, narrowed from what is forbidden to what is allowed."""

    intercepted_binops = frozenset(OPERATORS)
    budget: TemplateBudget

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[_Generation, loopcontrols],
            cache_size=0,
        )
        self.filters = allowed_filters()
        self.tests = allowed_tests()
        self.globals = allowed_globals()

    def within(self, budget: TemplateBudget) -> TemplateEnvironment:
        """This environment for one rendering, with that rendering's budget."""
        own = copy.copy(self)
        own.budget = budget
        own.concat = own.collect  # type: ignore[method-assign]
        return own

    def collect(self, parts: Any) -> str:
        """Join what a macro, a set block or the template itself wrote."""
        texts: list[str] = []
        chars = 0
        for part in parts:
            chars += len(part)
            if chars > self.budget.limits.text_chars:
                self.budget.make(chars)
            texts.append(part)
        self.budget.make(chars)
        return spliced(self.budget, texts)

    def tick(self, steps: int) -> bool:
        """Called by the template at each turn of a loop and each run of a macro."""
        self.budget.tick(steps)
        return True

    def joined(self, *parts: Any) -> str:
        """The `~` operator."""
        return concat(self.budget, parts)

    def compared(self, left: Any, *others: Any) -> bool:
        """A comparison, or a chain of them: a value, and an operator and a value for each."""
        holds = True
        for name, right in zip(others[::2], others[1::2], strict=True):
            holds = holds and bool(compare(self.budget, name, left, right))
            left = right
        return holds

    def measured(self, value: Any) -> Any:
        """A value the template has just made."""
        return kept(self.budget, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        """Every arithmetic operator."""
        self.budget.tick()
        return marked(OPERATORS[operator](self.budget, left, right), left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call."""
        if type(obj) is MethodType and obj.__self__ is self:  # the calls that _Metered wrote
            return obj(*args)
        self.budget.tick()
        if isinstance(obj, _Method):
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return obj.run(self.budget, args, kwargs)
        if not self._callable(obj):
            raise TemplateError(f"the chat template calls a {type(obj).__name__}, which is not allowed")
        result = context.call(obj, *args, **kwargs)
        return result if isinstance(obj, Macro) else marked(result, args, kwargs)  # a macro's spans are exact

    def _callable(self, obj: Any) -> bool:
        if isinstance(obj, (Macro, LoopContext, Undefined)):
            return True
        if isinstance(obj, MethodType):
            return isinstance(obj.__self__, LoopContext)
        return any(obj is function for function in self.globals.values())

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute`: a known method, else an item, else undefined."""
        self.budget.tick()
        check_name(attribute)
        if isinstance(obj, Undefined):
            return getattr(obj, attribute)  # raises, naming what is undefined
        method = methods_of(obj).get(attribute)
        if method is not None:
            return _Method(method, obj)
        if isinstance(obj, Namespace):
            return self._from_namespace(obj, attribute)
        if isinstance(obj, LoopContext) and attribute in _LOOP.split():
            return getattr(obj, attribute)
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if hasattr(type(obj), attribute):
            raise TemplateError(f"the chat template uses {attribute[:40]!r}, which is not allowed")
        return self.undefined(obj=obj, name=attribute)

    def _from_namespace(self, obj: Namespace, attribute: str) -> Any:
        try:
            return getattr(obj, attribute)
        except AttributeError:
            return self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`: an item, else what `obj.argument` gives."""
        self.budget.tick()
        if isinstance(obj, (str, list, tuple, dict, Undefined)):
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        if isinstance(argument, str):
            return self.getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)
