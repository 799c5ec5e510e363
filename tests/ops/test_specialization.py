"""Numbers that change from step to step are no part of a compiled kernel: no request waits for a compiler.

Triton compiles a kernel again where an integer is 1, or divisible by 16, and was not before, unless it is told not to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvilt.ops.triton

OF_A_STEP = {"rows", "tokens", "count", "anchor_count", "stride_table", "stride_weights", "splits", "room"}
# Here a name means something else: the outputs of a weight, and pointers.
OTHERS = {
    ("products.py", "_gate_up", "rows"),
    ("advance.py", "_advance", "tokens"),
    ("repair.py", "_interpolate", "tokens"),
}


def kernels() -> Iterator[tuple[str, ast.FunctionDef, set[str]]]:
    """File, kernel and what it is not specialized on. A kernel is what is launched, and no part of another one."""
    for path in sorted(Path(kvilt.ops.triton.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        launched = {
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or "jit" not in "".join(map(ast.dump, node.decorator_list)):
                continue
            if node.name in launched or "PDL" in {one.arg for one in node.args.args}:
                yield path.name, node, set(_left_out(node.decorator_list[0]))


def _left_out(decorator: ast.expr) -> list[str]:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    return [name for one in keywords if one.arg == "do_not_specialize" for name in ast.literal_eval(one.value)]


def test_no_kernel_is_compiled_for_the_numbers_of_one_step() -> None:
    found = list(kernels())
    assert len(found) > 20
    wrong = [
        (file, node.name, one.arg)
        for file, node, left_out in found
        for one in node.args.args
        if one.annotation is None and one.arg in OF_A_STEP - left_out and (file, node.name, one.arg) not in OTHERS
    ]
    assert wrong == []
