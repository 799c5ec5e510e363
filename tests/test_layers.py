"""The import layers and the house rules of the package, proven on its syntax trees.

The checker works on sources by module name, so that the second half can feed it violations and see each one noticed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvilt"

# From the top down; rooms on one line do not import each other. `__init__` is the package's list of public names.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("bench",),
    ("cluster",),
    ("mcp", "server"),
    ("__init__",),
    ("compat", "sessions"),
    ("llm",),
    ("engine",),
    ("blend", "speculative"),
    ("executor",),
    ("models", "sampling"),
    ("batch", "text", "store"),
    ("kv", "weights"),
    ("ops",),
    ("quant",),
    ("config", "metrics"),
    ("errors",),
)
DEPTH = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}

CORE = frozenset({"torch", "numpy", "safetensors", "tokenizers", "jinja2"})
# What a room (or one module of it) may import beyond the core.
EXTRAS: Mapping[str, frozenset[str]] = {
    "kvilt.cli": frozenset({"typer", "rich", "prompt_toolkit", "click"}),
    "kvilt.cli.serve": frozenset({"uvloop"}),
    "kvilt.cli.doctor": frozenset({"redis"}),
    "kvilt.bench.serve_plot": frozenset({"matplotlib"}),
    "kvilt.bench.blend_plot": frozenset({"matplotlib"}),
    "kvilt.server": frozenset({"starlette", "fastapi", "pydantic", "uvicorn", "httptools", "orjson"}),
    "kvilt.server.http.forward": frozenset({"aiohttp"}),
    "kvilt.server.model_router": frozenset({"aiohttp"}),
    "kvilt.mcp": frozenset({"mcp", "pydantic", "uvicorn"}),
    "kvilt.cli.mcp": frozenset({"mcp"}),  # for its type alone
    "kvilt.server.tracing": frozenset({"opentelemetry"}),
    "kvilt.server.kv_events": frozenset({"zmq", "msgpack"}),
    "kvilt.cluster": frozenset({"ray", "starlette", "fastapi", "pydantic", "uvicorn", "zmq", "aiohttp", "orjson"}),
    "kvilt.store.redis": frozenset({"redis"}),
    "kvilt.store.zstd": frozenset({"zstandard"}),
    "kvilt.sampling.library": frozenset({"llguidance"}),
    "kvilt.server.documents.pdf_program": frozenset({"pypdf"}),
    "kvilt.weights.hf": frozenset({"huggingface_hub", "tqdm"}),
    "kvilt.weights.on_disk": frozenset({"huggingface_hub"}),
    "kvilt.ops.native": frozenset({"_kvilt_native"}),  # our own extension
    "kvilt.ops.triton": frozenset({"triton"}),
}
STANDARD = sys.stdlib_module_names
# These see an executor by its protocol, so that another one can stand in its place.
ABSTRACT = ("engine", "blend", "speculative")
IMPLEMENTATION = ("kvilt.executor.executor", "kvilt.executor.step_executor", "kvilt.executor.load")
COUNTING = "kvilt.engine.scheduling"  # counts tokens, rows and pages, and knows nothing else
UNSAFE = frozenset({"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


@dataclass(frozen=True, slots=True)
class Source:
    """One module: its dotted name, whether it is a package's `__init__`, and its text."""

    name: str
    is_package: bool
    text: str


@dataclass(frozen=True, slots=True)
class Violation:
    module: str
    line: int
    rule: str
    what: str


def read_package() -> dict[str, Source]:
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources[name] = Source(name, is_package, path.read_text(encoding="utf-8"))
    return sources


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def imports(source: Source, known: Mapping[str, Source]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything a module imports, anywhere in it, by statement or by a constant call."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(source, node.module or "", node.level)
            # `from . import errors` names a module, `from .errors import KviltError` something inside one.
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield node.lineno, inner if inner in known or is_room(inner) else origin
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            yield node.lineno, dynamic(source, node)


def absolute(source: Source, name: str, level: int) -> str:
    if level == 0:
        return name
    parts = source.name.split(".")
    base = parts[: len(parts) - level + source.is_package]
    return ".".join([*base, name] if name else base)


def is_room(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 2 and parts[0] == "kvilt" and parts[1] in DEPTH


def called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def dynamic(source: Source, node: ast.Call) -> str:
    """What a call imports; `?` when only running it would tell."""
    first = node.args[0] if node.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return "?"
    name = first.value.lstrip(".")
    return absolute(source, name, len(first.value) - len(name))


def check_imports(source: Source, known: Mapping[str, Source]) -> Iterator[Violation]:
    for line, target in imports(source, known):
        top = target.partition(".")[0]
        for rule, broken in (
            ("dynamic", target == "?" and source.name != "kvilt"),
            ("pickle", top in UNSAFE),
            ("layers", top == "kvilt" and not may_import(source.name, target)),
            ("third party", top not in ("kvilt", "?") and not may_use(source.name, top)),
            ("protocol", room(source.name) in ABSTRACT and target in IMPLEMENTATION),
            ("counting", within(source.name, COUNTING) and (top == "torch" or within(target, "kvilt.kv"))),
        ):
            if broken:
                yield Violation(source.name, line, rule, f"imports {target}")


def may_import(importer: str, target: str) -> bool:
    """Down the layers or within a room; a room that the design does not name imports and is imported by nobody."""
    above, below = room(importer), room(target)
    if above not in DEPTH or below not in DEPTH:
        return False
    return above == below or DEPTH[above] < DEPTH[below]


def may_use(importer: str, package: str) -> bool:
    if package in STANDARD or package in CORE:
        return True
    return any(within(importer, place) and package in names for place, names in EXTRAS.items())


def check_nodes(source: Source) -> Iterator[Violation]:
    tree = ast.parse(source.text)
    if not (ast.get_docstring(tree) or "").strip():
        yield Violation(source.name, 1, "docstring", "has no module docstring")
    for node in ast.walk(tree):
        for rule, broken in (
            ("environment", source.name != "kvilt.config" and reads_environment(node)),
            ("print", not within(source.name, "kvilt.cli") and is_print(node)),
            ("pickle", unpickles(node)),
            ("global", isinstance(node, ast.Global)),
            ("one forward", computes(node) and DEPTH.get(room(source.name), 0) < DEPTH["executor"]),
        ):
            if broken:
                yield Violation(source.name, getattr(node, "lineno", 1), rule, ast.unparse(node).splitlines()[0])


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in ENVIRONMENT for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT


def computes(node: ast.AST) -> bool:
    """An operation of a backend, reached through a pool or a decoder; its name, revision and dtype are none."""
    inner = node.value if isinstance(node, ast.Attribute) and node.attr not in ("name", "numerics", "dtype") else None
    return isinstance(inner, ast.Attribute) and inner.attr == "ops"


def is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "print"


def unpickles(node: ast.AST) -> bool:
    """`torch.load` however it is reached, and numpy's switch for pickled arrays."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("torch", "torch.serialization") and any(alias.name == "load" for alias in node.names)
    if isinstance(node, ast.keyword):
        off = isinstance(node.value, ast.Constant) and node.value.value is False
        return node.arg == "allow_pickle" and not off
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.serialization.load")


def check(sources: Mapping[str, Source]) -> list[Violation]:
    found: list[Violation] = []
    for source in sources.values():
        found += check_imports(source, sources)
        found += check_nodes(source)
        if room(source.name) not in DEPTH:
            found.append(Violation(source.name, 1, "room", "stands in a room that the design does not name"))
    return found


# The package itself.


def test_the_package_keeps_its_layers_and_house_rules() -> None:
    sources = read_package()
    assert {"kvilt", "kvilt.errors", "kvilt.config"} <= sources.keys(), "the walk found the package"
    assert check(sources) == []


def test_errors_imports_nothing_of_kvilt() -> None:
    sources = read_package()
    assert [name for _, name in imports(sources["kvilt.errors"], sources) if within(name, "kvilt")] == []


def test_every_place_named_in_a_rule_is_a_room_of_the_design() -> None:
    for place in (*EXTRAS, COUNTING):
        assert room(place) in DEPTH


# The checker: each rule, broken on purpose.


def fake(name: str, text: str, is_package: bool = False) -> dict[str, Source]:
    others = {other: Source(other, False, '"""Here."""') for other in ("kvilt.errors", "kvilt.llm", "kvilt.batch")}
    return {**others, name: Source(name, is_package, f'"""A module."""\n{text}\n')}


def rules(name: str, text: str, is_package: bool = False) -> set[str]:
    return {violation.rule for violation in check(fake(name, text, is_package)) if violation.module == name}


UPWARD = [
    ("kvilt.errors", "from .config import RunConfig"),
    ("kvilt.errors", "from . import metrics"),
    ("kvilt.errors", "import kvilt.config"),
    ("kvilt.config", "from .metrics import Metrics"),
    ("kvilt.metrics", "from . import config"),
    ("kvilt.quant.tensor", "from ..ops.contract import Ops"),
    ("kvilt.ops.reference", "from kvilt.kv.pool import Pool"),
    ("kvilt.kv.cache", "from ..weights.gguf import read"),
    ("kvilt.weights.hub", "from .. import kv"),
    ("kvilt.batch", "from .text.chat import render"),
    ("kvilt.text.chat", "from ..batch import Row"),
    ("kvilt.text.chat", "from .. import batch"),
    ("kvilt.models.decoder", "from ..sampling.params import SamplingParams"),
    ("kvilt.sampling.sampler", "from ..models import spec"),
    ("kvilt.models.families.llama", "from ...executor.load import load"),
    ("kvilt.blend.chunk", "from ..speculative.drafter import Drafter"),
    ("kvilt.executor.executor", "from ..engine.scheduling.plan import StepPlan"),
    ("kvilt.llm", "from .server.app import app"),
    ("kvilt.bench.serve", "from ..cli.progress import tracked"),
    ("kvilt.server.app", "from ..bench.serve import measure"),
    ("kvilt.llm", "from . import load"),
    ("kvilt.llm", "import kvilt"),
    ("kvilt.engine.engine", "from kvilt import LLM"),
    ("kvilt.engine.engine", "from .. import llm"),
    ("kvilt.kv.pool", "def late():\n    from ..store.disk import Disk"),
    ("kvilt.kv.pool", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..batch import Row"),
    ("kvilt.kv.pool", "try:\n    from ..batch import Row\nexcept ImportError:\n    pass"),
    ("kvilt.kv.pool", "class A:\n    import kvilt.engine.engine as e"),
    ("kvilt.kv.pool", "import importlib\nm = importlib.import_module('kvilt.models.spec')"),
    ("kvilt.kv.pool", "import importlib\nm = importlib.import_module('..models.spec', __package__)"),
    ("kvilt.kv.pool", "m = __import__('kvilt.batch')"),
    ("kvilt.kv.pool", "from ..helpers import thing"),
]


@pytest.mark.parametrize(("name", "text"), UPWARD)
def test_an_import_against_the_layers_is_noticed(name: str, text: str) -> None:
    assert "layers" in rules(name, text)


def test_relative_imports_of_a_package_init_start_at_the_package_itself() -> None:
    assert rules("kvilt.kv", "from .pool import Pool", is_package=True) == set()
    assert "layers" in rules("kvilt.kv", "from ..models.spec import ModelSpec", is_package=True)
    assert "layers" in rules("kvilt.models.families", "from ...llm import LLM", is_package=True)


DOWNWARD = [
    ("kvilt.config", "from .errors import ParamError"),
    ("kvilt.kv.cache", "from .pool import Pool\nfrom ..ops.contract import Ops\nfrom ..errors import KVError"),
    ("kvilt.models.families.llama", "from ..spec import ModelSpec\nfrom ...weights.source import Source"),
    ("kvilt.models.decoder", "from ..batch import Batch\nimport torch, numpy as np"),
    ("kvilt.engine.engine", "from .scheduler import plan\nfrom ..blend import select\nfrom ..executor import executor"),
    ("kvilt.llm", "from . import errors\nfrom .text import chat"),
    (
        "kvilt.cli.run",
        "import typer, rich.console\nfrom prompt_toolkit import prompt\nfrom kvilt import load\nprint(1)",
    ),
    ("kvilt.__main__", "from .cli.main import main"),
    ("kvilt.config", "import os\nhome = os.environ.get('HOME')"),
    ("kvilt.weights.hf", "import huggingface_hub"),
    ("kvilt.executor.placement", "def f(pool):\n    pool.ops.write(1)"),
    ("kvilt.cli.run", "def f(pool):\n    return pool.ops.numerics"),
    ("kvilt.kv.codec", "import numpy as np\na = np.load('x', allow_pickle=False)"),
]


@pytest.mark.parametrize(("name", "text"), DOWNWARD)
def test_what_the_design_allows_is_left_alone(name: str, text: str) -> None:
    assert rules(name, text) == set()


def test_the_package_init_may_import_public_names_lazily() -> None:
    text = "import importlib\nfrom .llm import LLM\ndef __getattr__(name):\n    return importlib.import_module(name)"
    assert rules("kvilt", text, is_package=True) == set()
    assert "layers" in rules("kvilt", "from .cli.main import main", is_package=True)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("kvilt.engine.scheduling.scheduler", "import torch", "counting"),
        ("kvilt.engine.scheduling.plan", "from torch import Tensor", "counting"),
        ("kvilt.engine.scheduling.scheduler", "from ...kv.pool import Pool", "counting"),
        ("kvilt.engine.scheduling.plan", "def f():\n    from ... import kv", "counting"),
        ("kvilt.engine.engine", "from ..executor.executor import ModelExecutor", "protocol"),
        ("kvilt.blend.blender", "def f():\n    from ..executor.load import load_executor", "protocol"),
        ("kvilt.llm", "import typer", "third party"),
        ("kvilt.text.chat", "from rich.console import Console", "third party"),
        ("kvilt.server.app", "import prompt_toolkit", "third party"),
        ("kvilt.cli.run", "import transformers", "third party"),
        ("kvilt.weights.gguf", "import gguf", "third party"),
        ("kvilt.models.adapters", "def f():\n    from peft import PeftModel", "third party"),
        ("kvilt.weights.source", "import huggingface_hub", "third party"),
        ("kvilt.ops.reference", "import scipy.special", "third party"),
        ("kvilt.store.disk", "import importlib\nx = importlib.import_module('transformers')", "third party"),
        ("kvilt.kv.pool", "import importlib\nx = importlib.import_module(name)", "dynamic"),
        ("kvilt.blend.blender", "def f(pool):\n    pool.ops.write(1)", "one forward"),
        ("kvilt.engine.engine", "def f(self):\n    return self._executor.pool.ops.rotate", "one forward"),
        ("kvilt.llm", "import os\nx = os.environ['HOME']", "environment"),
        ("kvilt.llm", "import os\nx = os.getenv('HOME')", "environment"),
        ("kvilt.llm", "from os import environ", "environment"),
        ("kvilt.cli.main", "import os as system\nsystem.environ.get('X')", "environment"),
        ("kvilt.llm", "print('hello')", "print"),
        ("kvilt.llm", "def f(say=print):\n    say(1)", "print"),
        ("kvilt.kv.codec", "import pickle", "pickle"),
        ("kvilt.kv.codec", "from pickle import loads", "pickle"),
        ("kvilt.cli.inspect", "def f():\n    import cloudpickle", "pickle"),
        ("kvilt.weights.source", "import torch\nx = torch.load('w.bin')", "pickle"),
        ("kvilt.weights.source", "from torch import load", "pickle"),
        ("kvilt.weights.source", "import numpy as np\nx = np.load('w', allow_pickle=True)", "pickle"),
        ("kvilt.weights.source", "import numpy as np\nx = np.load('w', allow_pickle=flag)", "pickle"),
        ("kvilt.llm", "x = 1\ndef f():\n    global x\n    x = 2", "global"),
        ("kvilt.utils", "x = 1", "room"),
        ("kvilt.misc.things", "x = 1", "room"),
    ],
)
def test_a_broken_house_rule_is_noticed(name: str, text: str, rule: str) -> None:
    assert rule in rules(name, text)


@pytest.mark.parametrize("text", ["x = 1", "'''  '''", "# a comment is not a docstring", ""])
def test_a_module_without_a_docstring_is_noticed(text: str) -> None:
    sources = {"kvilt.llm": Source("kvilt.llm", False, text)}
    assert [violation.rule for violation in check(sources)] == ["docstring"]


def test_a_violation_says_where_and_what() -> None:
    (violation,) = [v for v in check(fake("kvilt.kv.pool", "from ..batch import Row")) if v.module == "kvilt.kv.pool"]
    assert violation == Violation("kvilt.kv.pool", 2, "layers", "imports kvilt.batch")


def test_the_layers_are_those_of_the_design() -> None:
    """The line of the design, read back: a change of this table is a change of the design."""
    design = (
        "cli > bench > cluster > mcp | server > compat | sessions > llm > engine > blend | speculative > executor "
        "> models | sampling > batch | text | store > kv | weights > ops > quant > config | metrics > errors"
    )
    expected = [tuple(room.strip() for room in place.split("|")) for place in design.split(">")]
    assert [rooms for rooms in LAYERS if not rooms[0].startswith("__")] == expected
