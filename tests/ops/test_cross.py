"""The kernels for ARM, without Python: every instruction set against the generic one, under an emulator.

`csrc/test/compare.cpp` links the kernels alone. ARM's are cross-compiled, and run by qemu on processors with dotprod
and i8mm, with dotprod alone, and with neither.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "csrc"
COMMON = ["isa_generic.cpp", "kernel_table.cpp", "cpu_features.cpp", "pack.cpp", "test/compare.cpp"]
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wno-psabi"]
ARM = {"isa_neon.cpp": "-march=armv8.2-a+dotprod", "isa_i8mm.cpp": "-march=armv8.2-a+dotprod+i8mm"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    compiler, objects = "aarch64-linux-gnu-g++", []
    for name in [*COMMON, *ARM]:
        made = folder / f"{Path(name).stem}.o"
        flags = [*FLAGS, "-DKVILT_ARM=1", *([ARM[name]] if name in ARM else [])]
        subprocess.run([compiler, *flags, "-c", str(SOURCE / name), "-o", str(made)], check=True, timeout=900)
        objects.append(str(made))
    subprocess.run([compiler, "-static", *objects, "-o", str(folder / "compare")], check=True, timeout=300)
    return folder / "compare"


@pytest.mark.slow
@pytest.mark.needs("aarch64-linux-gnu-g++")
@pytest.mark.needs("qemu-aarch64")
@pytest.mark.parametrize(
    ("cpu", "isas"),
    [
        ("max", ["i8mm (neon)", "neon (neon)", "generic (generic)"]),
        ("neoverse-n1", ["neon (neon)", "generic (generic)"]),
        ("cortex-a72", ["generic (generic)"]),
    ],
)
def test_kernels_for_arm_agree_with_the_generic_ones(program: Path, cpu: str, isas: list[str]) -> None:
    ran = subprocess.run(["qemu-aarch64", "-cpu", cpu, str(program)], capture_output=True, text=True, timeout=900)
    assert ran.stdout.splitlines() == [f"{isa}: compared" for isa in isas], ran.stdout + ran.stderr
    assert ran.returncode == 0
