"""What commands import, and how: most of the time before a first token."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from commands import kvilt
from tiny import write_tiny_of_bytes

from kvilt.cli.imports import known_frames, late_methods


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_help_does_not_import_torch() -> None:
    done = kvilt("run", "--help")
    assert done.returncode == 0
    assert "--kv-memory" in done.stdout
    modules = imported(
        "import sys; sys.argv = ['kvilt', '--help']\n"
        "from kvilt.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass"
    )
    assert not modules & {"torch", "numpy", "tokenizers", "jinja2"}


@pytest.mark.parametrize("asked", [["ps"], ["list"], ["config"]])
def test_commands_that_compute_nothing_do_not_import_torch(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVILT_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    modules = imported(
        f"import sys; sys.argv = ['kvilt', *{asked!r}]\n"
        "from kvilt.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code"
    )
    assert "torch" not in modules


def test_run_imports_only_what_it_uses(tmp_path: Path) -> None:
    """Neither its help nor an answer imports what other commands are made of."""
    model = str(write_tiny_of_bytes(tmp_path))
    for asked in (["run", "--help"], ["run", "--raw", "Hi", "--model", model, "--max-tokens", "2", "--threads", "1"]):
        modules = imported(
            f"import sys; sys.argv = ['kvilt', *{asked!r}]\n"
            "from kvilt.cli.main import main\n"
            "try: main()\nexcept SystemExit as end: assert not end.code"
        )
        rooms = {name.split(".")[1] for name in modules if name.startswith("kvilt.")}
        assert not rooms & {"bench", "cluster"}
        # A server of this user may answer in place of this process; looking for one needs no server.
        assert {name for name in modules if name.startswith("kvilt.server.")} <= {"kvilt.server.running"}
        assert "kvilt.cli.attach" not in modules, "and where there is none, nothing that asks it"
        commands = {name.removeprefix("kvilt.cli.") for name in modules if name.startswith("kvilt.cli.")}
        commands -= {name for name in commands if name.endswith("_app")}  # options of commands alone
        assert commands <= {
            "keys",
            "settings",
            "main",
            "app",
            "options",
            "option_groups",
            "plain_args",
            "starts",
            "errors",
            "imports",
            "run",
            "answer_writer",
            "progress",
            "sampling",
            "store",
            "texts",
        }
        assert ("run" in commands) == ("--help" not in asked), "an answer was asked for"
        assert ("app" in commands) == ("--help" in asked), "plain words are read without typer"
        heads = {name.partition(".")[0] for name in modules}
        assert not heads & {"fastapi", "starlette", "uvicorn", "orjson", "prompt_toolkit", "matplotlib", "redis"}
        assert "--help" in asked or not heads & {"rich", "typer", "pydantic"}, "nothing to show or to refuse"
        assert "kvilt.sampling.grammar" not in modules, "the compiler of grammars, without one"
        assert not modules & {"torch._refs", "torch._decomp", "torch._dynamo"}, "kernels for tensors without data"


def test_imports_are_left_out_of_collections() -> None:
    imported(
        "import gc\nfrom kvilt.cli.imports import uncollected\n"
        "gc.set_threshold(1)\ndone = []\ngc.callbacks.append(lambda phase, info: done.append(phase))\n"
        "with uncollected():\n    seen = len(done)\n    import decimal, kvilt.config\n    assert len(done) == seen\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 1000"
    )


def made_classes() -> tuple[type[Any], type[Any]]:
    """A frozen class with slots that refers to itself, and one that inherits from another and can be ordered."""

    @dataclass(frozen=True, slots=True)
    class Link:
        name: str
        to: Any = field(default=None, compare=False)
        parts: list[Any] = field(default_factory=list, hash=False)

    @dataclass
    class Known:
        size: int

    @dataclass(order=True, unsafe_hash=True)
    class Named(Known):
        name: str

        def __repr__(self) -> str:
            return f"<{self.name}>"

    return Link, Named


def uses(link: type[Any], named: type[Any]) -> list[Any]:
    """What methods of dataclasses give."""
    first, other = link("a", 1), link("b")
    first.parts.append(first)  # repr must not go on forever
    found: list[Any] = [repr(first), repr(link("c", named(1, "x"))), hash(first) == hash(link("a", 2)), first == other]
    found += [link("a", 1) == link("a", 2), first == "a", {link("a"): 1, link("b"): 2}[link("b")]]
    for change in (lambda: setattr(first, "name", "z"), lambda: delattr(first, "name"), lambda: {first: first.no}):
        with pytest.raises(AttributeError) as refused:
            change()
        found.append((refused.type, str(refused.value)))
    found += [named(1, "x") == named(1, "x"), named(1, "x") < named(2, "a"), hash(named(1, "x")) == hash((1, "x"))]
    changed = named(1, "x")
    changed.size = 3
    return [*found, repr(changed), replace(changed, name="y"), [inspect.signature(each) for each in (link, named)]]


def test_late_methods_do_what_they_do_otherwise() -> None:
    write = vars(dataclasses).get("_create_fn")
    with late_methods():
        late = made_classes()
    assert vars(dataclasses).get("_create_fn") is write
    before = vars(late[0])["__eq__"]
    assert str(uses(*late)) == str(uses(*made_classes())) == str(uses(*late))
    if write is not None:  # this release of Python writes one method at a time
        assert before is not vars(late[0])["__eq__"], "the method itself, from its first use on"
        assert (
            vars(late[0])["__eq__"].__qualname__
            == before.__qualname__
            == vars(made_classes()[0])["__eq__"].__qualname__
        )


def test_the_module_of_a_frame_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [inspect.getmodule(asked) for asked in (sys._getframe(), Path, dataclasses)]
    search = inspect.getmodule
    with known_frames():
        assert [inspect.getmodule(asked) for asked in (sys._getframe(), Path, dataclasses)] == usual
        unknown = eval("sys._getframe()", {"sys": sys, "__name__": "no.module"})
        assert inspect.getmodule(unknown) == search(unknown)
        monkeypatch.setattr(inspect, "getabsfile", None)  # by which all modules are compared
        assert inspect.getframeinfo(sys._getframe()).function == "test_the_module_of_a_frame_is_found_by_its_name"
    assert inspect.getmodule is search and usual[0] is sys.modules[__name__]


def test_a_run_does_not_compare_the_files_of_all_modules(tmp_path: Path) -> None:
    """As `inspect` does when torch asks it for the caller of a function."""
    words = ["run", "--raw", "Hi", "--model", str(write_tiny_of_bytes(tmp_path)), "--max-tokens", "2", "--threads", "1"]
    imported(
        f"import inspect, sys; sys.argv = ['kvilt', *{words!r}]\nfrom kvilt.cli.main import main\n"
        "compare, seen = inspect.getabsfile, []\n"
        "inspect.getabsfile = lambda *asked: seen.append(asked) or compare(*asked)\n"
        "main()\nassert 'torch' in sys.modules and len(seen) < 100"
    )


@pytest.mark.skipif(not hasattr(dataclasses, "_create_fn"), reason="this release of Python writes methods at once")
def test_run_compiles_no_methods_that_it_does_not_use(tmp_path: Path) -> None:
    words = ["run", "--raw", "Hi", "--model", str(write_tiny_of_bytes(tmp_path)), "--max-tokens", "2", "--threads", "1"]
    imported(
        f"import sys; sys.argv = ['kvilt', *{words!r}]\nfrom kvilt.cli.main import main\nmain()\n"
        "from kvilt.models.spec import ModelSpec\n"
        "assert ModelSpec.__delattr__.__code__.co_filename != '<string>' == ModelSpec.__init__.__code__.co_filename"
    )


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(lambda x: x.sin()[:, 1:] + 1, backend='aot_eager')(torch.ones(3, 4))",
        "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode(): torch.ones(3, 4)[torch.tensor([0, 1])]",
        "torch._meta_registrations.meta_index_Tensor",
    ],
)
def test_meta_kernels_are_there_when_they_are_needed(use: str) -> None:
    kernels = "'torch._refs' in sys.modules"
    imported(
        "import sys\nfrom kvilt.cli.imports import defer_meta_kernels\n"
        f"defer_meta_kernels()\nimport torch\nassert not {kernels}\n{use}\nassert {kernels}\n"
        "assert torch._meta_registrations is sys.modules['torch._meta_registrations']\n"
        "assert hasattr(torch._meta_registrations, 'activate_meta')"
    )


def test_importing_kvilt_costs_little_beyond_torch() -> None:
    assert "torch" not in imported("import kvilt")
    extra = imported("from kvilt import load, Executor, KVCache") - imported("import torch, numpy")
    heavy = {name.split(".")[0] for name in extra}
    assert not heavy & {"transformers", "typer", "rich", "prompt_toolkit", "gguf", "jinja2", "pydantic", "fastapi"}
