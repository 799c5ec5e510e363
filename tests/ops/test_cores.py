"""Threads go to physical cores, in equal shares on NUMA nodes, and are no more than a container may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvilt.ops.native.backend import NativeOps
from kvilt.ops.native.cores import Cores, default_threads, find_cores, placement

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not place threads")


def machine(folder: Path, nodes: list[list[list[int]]], quota: str = "max 100000") -> tuple[Path, Path]:
    """The files of a machine: nodes of cores of CPUs."""
    for number, node in enumerate(nodes):
        where = folder / f"sys/devices/system/node/node{number}"
        where.mkdir(parents=True)
        (where / "cpulist").write_text(",".join(str(cpu) for core in node for cpu in core) + "\n")
        for core in node:
            for cpu in core:
                topology = folder / f"sys/devices/system/cpu/cpu{cpu}/topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    group = folder / "sys/fs/cgroup/pods/mine"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota + "\n")
    (folder / "proc").mkdir()
    (folder / "proc/cgroup").write_text("0::/pods/mine\n")
    return folder / "sys", folder / "proc"


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


TWO_THREADS_A_CORE = [[[0, 4], [1, 5], [2, 6], [3, 7]]]
TWO_NODES = [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]


def test_a_thread_for_each_physical_core(tmp_path: Path, eight: None) -> None:
    system, process = machine(tmp_path, TWO_THREADS_A_CORE)
    assert default_threads(8, system, process) == 4
    assert default_threads(3, system, process) == 3


def test_the_quota_of_a_container_is_kept(tmp_path: Path, eight: None) -> None:
    system, process = machine(tmp_path, TWO_THREADS_A_CORE, quota="150000 100000")
    assert default_threads(8, system, process) == 2
    (system / "fs/cgroup/cpu.max").write_text("50000 100000\n")  # the group above has less
    assert default_threads(8, system, process) == 1


def test_only_cores_that_the_process_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, process = machine(tmp_path, TWO_THREADS_A_CORE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 1, 6})
    assert find_cores(system) == Cores((((1, 5), (6,)),))
    assert default_threads(8, system, process) == 2


def test_threads_take_one_hardware_thread_of_each_core(tmp_path: Path, eight: None) -> None:
    cores = find_cores(machine(tmp_path, TWO_THREADS_A_CORE)[0])
    assert placement(3, cores) == [[0, 1, 2, 3]] * 3
    assert placement(5, cores) == []  # more threads than cores: the system shares them out


def test_nodes_get_equal_shares_in_order(tmp_path: Path, eight: None) -> None:
    cores = find_cores(machine(tmp_path, TWO_NODES)[0])
    assert placement(4, cores) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert placement(2, cores) == [[0, 1], [0, 1]]  # one node holds them


def test_a_system_that_says_nothing_places_threads_itself(tmp_path: Path) -> None:
    assert find_cores(tmp_path) is None
    assert placement(4, None) == []
    assert default_threads(6, tmp_path, tmp_path) == 6


@pytest.mark.parametrize("threads", [2, 5, 16])
def test_runs_of_all_sizes_follow_each_other(threads: int) -> None:
    """Small runs leave threads out, which then take part again; with more threads than cores they lose theirs."""
    ops, generator = NativeOps(threads), torch.Generator().manual_seed(0)
    for size in torch.randint(1, 300_000, (400,), generator=generator).tolist():
        a, b = torch.rand(size, generator=generator), torch.rand(size, generator=generator)
        assert torch.equal(ops.add(a, b), a + b)


def test_cpus_that_are_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvilt.ops.native.backend.placement", lambda threads, cores: [[9999, -1]] * threads)
    ops = NativeOps(3)
    assert torch.equal(ops.add(torch.ones(50_000), torch.ones(50_000)), torch.full((50_000,), 2.0))
