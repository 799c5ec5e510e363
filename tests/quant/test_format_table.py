"""The table of formats in docs/models.md is that of the formats and kernels there are."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import format_table
import interpreted  # noqa: F401 (kernels for GPUs, without one)

from kvilt.ops.select import CPU
from kvilt.ops.triton.backend import TritonOps
from kvilt.quant.formats import FORMATS
from kvilt.quant.unpack import UNPACKED_FORMATS


def test_the_page_shows_the_table_of_today() -> None:
    page = format_table.PAGE.read_text(encoding="utf-8")
    assert page == format_table.with_table(page), "run python -m tests.quant.format_table"


def test_the_column_of_gpus_is_what_their_backend_says() -> None:
    ops = TritonOps(CPU)
    assert all(ops.kernel(FORMATS[name]) == format_table.gpu_kernel(FORMATS[name]) for name in UNPACKED_FORMATS)


def test_every_format_has_a_row_and_no_native_kernel_is_far_off() -> None:
    found = list(format_table.rows())
    assert {row[1] for row in found} == {*UNPACKED_FORMATS, *format_table.READ_AS}
    off = {row[1]: float(row[4].removeprefix("off by ").removesuffix("%")) for row in found if row[4].startswith("off")}
    assert set(off) == {"F8_E4M3", "IQ3_S", "IQ2_XS"} and max(off.values()) < 1.0
