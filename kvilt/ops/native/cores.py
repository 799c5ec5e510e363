"""The cores that this process may use: how many threads they are worth, and where each thread goes.

Reads what Linux says of the machine. Elsewhere, and where a file is missing, the system places threads by itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys")
PROCESS = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Cores:
    """Physical cores by NUMA node; each core is the CPUs of its hardware threads that the process may use."""

    nodes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def count(self) -> int:
        return sum(len(cores) for cores in self.nodes)


def find_cores(system: Path = SYSTEM) -> Cores | None:
    """The cores of this process; None where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    try:
        node_of = _node_of(system)
        cores = {_siblings(system, cpu) for cpu in allowed}
    except (OSError, ValueError):
        return None
    by_node: dict[int, list[tuple[int, ...]]] = {}
    for core in sorted(cores):
        mine = tuple(cpu for cpu in core if cpu in allowed)
        by_node.setdefault(node_of.get(mine[0], 0), []).append(mine)
    return Cores(tuple(tuple(by_node[node]) for node in sorted(by_node)))


def default_threads(at_most: int, system: Path = SYSTEM, process: Path = PROCESS) -> int:
    """A thread for each physical core, at most `at_most`, and no more than the quota of the process pays for."""
    cores = find_cores(system)
    count = at_most if cores is None else min(at_most, cores.count)
    return max(1, math.ceil(min(count, _quota(system, process))))


def placement(threads: int, cores: Cores | None) -> list[list[int]]:
    """The CPUs that each thread may use; none where the system does as well by itself.

    Threads take one hardware thread of each physical core, as long as there are enough cores. On several NUMA nodes
    they fill one node after the other in equal shares, so that a thread reads the weights that it packed from its own
    node. Inside of a node the system moves them as it likes: other programs use the cores too.
    """
    if cores is None or threads > cores.count:
        return []
    node_cpus = [[core[0] for core in node] for node in cores.nodes]
    if len(node_cpus) > 1:
        used = _nodes_for(threads, node_cpus)
        return [used[i * len(used) // threads] for i in range(threads)]
    if all(len(core) == 1 for core in cores.nodes[0]):
        return []
    return [node_cpus[0]] * threads


def rank_cpus(rank: int, ranks: int, cores: Cores | None) -> list[int]:
    """The CPUs of one of several processes that share a model: nodes of its own; none where there is one node.

    Rank 0 has the first nodes, which are those that `placement` fills first.
    """
    if cores is None or len(cores.nodes) < 2:
        return []
    first = rank * len(cores.nodes) // ranks
    own = cores.nodes[first : max(first + 1, (rank + 1) * len(cores.nodes) // ranks)]
    return [cpu for node in own for core in node for cpu in core]


def _nodes_for(threads: int, nodes: Sequence[list[int]]) -> list[list[int]]:
    """The fewest nodes, of the first ones, in which equal shares of the threads have a core each."""
    for count in range(1, len(nodes) + 1):
        if all(len(node) >= math.ceil(threads / count) for node in nodes[:count]):
            return list(nodes[:count])
    return list(nodes)


def _siblings(system: Path, cpu: int) -> tuple[int, ...]:
    return tuple(_cpu_list(system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))


def _node_of(system: Path) -> Mapping[int, int]:
    """The NUMA node of each CPU; none where the system knows no nodes."""
    found = {}
    for node in (system / "devices/system/node").glob("node[0-9]*"):
        for cpu in _cpu_list(node / "cpulist"):
            found[cpu] = int(node.name.removeprefix("node"))
    return found


def _cpu_list(path: Path) -> list[int]:
    """The numbers of a list such as `0-3,8`."""
    found: list[int] = []
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def _quota(system: Path, process: Path) -> float:
    """CPUs that the control group of the process pays for, as containers are given; infinite where it has no limit."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    group = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    root, least = system / "fs/cgroup", math.inf
    for folder in (root / group, *(root / group).parents):
        if not folder.is_relative_to(root):
            break
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            least = least if quota == "max" else min(least, int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return least
