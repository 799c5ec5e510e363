"""The files of deploy/ name metrics, labels, options and files that exist; deploy/check.sh asks the tools as well."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import kvilt

HERE = Path(__file__).parent.parent
DEPLOY = HERE / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvilt.json"
ALWAYS = {"le", "instance", "job"}  # labels that histograms and Prometheus add


def declared() -> dict[str, tuple[str, set[str]]]:
    """Every metric of the package by name: its kind and its labels."""
    found = {}
    for path in (HERE / "kvilt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id="Counter" | "Gauge" | "Histogram" as kind),
                    args=[ast.Constant(value=str(name)), ast.Constant(), *rest],
                ) if name.startswith("kvilt_"):
                    given = [*rest, *(one.value for one in node.keywords if one.arg == "labels")]
                    labels = given[0] if given and isinstance(given[0], ast.Tuple) else ast.Tuple(elts=[])
                    found[name] = (kind, set(ast.literal_eval(labels)))
    return found


METRICS = declared()


def queries() -> Iterator[tuple[str, str, str]]:
    """Title, expression and legend of every query of the dashboard, and of every alert."""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


def metric_of(name: str) -> str:
    """The declaration behind a name in a query: histograms have three series."""
    whole = re.sub(r"_(bucket|sum|count)$", "", name)
    return whole if METRICS.get(whole, ("", set()))[0] == "Histogram" else name


@pytest.mark.parametrize("title, query, legend", list(queries()))
def test_queries_name_metrics_and_labels_that_exist(title: str, query: str, legend: str) -> None:
    names = {metric_of(name) for name in re.findall(r"kvilt_\w+", query)}
    assert names <= METRICS.keys()
    labels = ALWAYS.union(*(METRICS[name][1] for name in names))
    grouped = {one.strip() for group in re.findall(r"by \(([^)]*)\)", query) for one in group.split(",")}
    filtered = set(re.findall(r"[{,](\w+)=", query))
    shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    assert grouped | filtered | shown <= labels
    if "histogram_quantile" in query:
        assert all(METRICS[name][0] == "Histogram" for name in names)


def test_the_dashboard_shows_every_part_of_the_server() -> None:
    told = " ".join(query for _, query, _ in queries())
    for part in ("num_requests", "time_to_first_token", "prefix_cache", "kv_bytes", "store_", "blend_", "spec_decode_"):
        assert f"kvilt_{part}" in told
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]]
    assert len(ids) == len(set(ids))


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<=[\s\"'=])--[a-z][a-z-]+", text))


def test_options_of_the_server_exist() -> None:
    helped = options(kvilt("serve", "--help", COLUMNS="200").stdout)
    used = set()
    for name in ("Dockerfile", "Dockerfile.cuda"):
        used |= options(re.findall(r"^CMD .*$", (DEPLOY / name).read_text(encoding="utf-8"), re.MULTILINE)[-1])
    used |= options(
        re.findall(r"^ExecStart=.*$", (DEPLOY / "kvilt.service").read_text(encoding="utf-8"), re.MULTILINE)[0]
    )
    used |= {word.partition("=")[0] for word in compose()["services"]["kvilt"]["command"] if word.startswith("--")}
    assert len(used) > 10
    assert used <= helped


def test_files_that_the_composition_mounts_are_there() -> None:
    services = compose()["services"]
    mounted = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])]
    own = [path for path in mounted if path.startswith("./")]
    assert len(own) == 5
    assert [path for path in own if not (DEPLOY / path).exists()] == []
    assert (HERE / services["kvilt"]["build"]["dockerfile"]).exists()
    volumes = {path for path in mounted if not path.startswith("./")}
    assert volumes == compose()["volumes"].keys()


def test_variables_of_the_composition_stand_in_the_example() -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    example = (DEPLOY / "env.example").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{(\w+)", text)) == set(re.findall(r"^(\w+)=", example, re.MULTILINE))


def test_workflows_run_programs_that_are_there() -> None:
    for path in (HERE / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        told = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
        assert [name for name in re.findall(r"\bbench/\w+\.py|\.ci/\w+", told) if not (HERE / name).exists()] == []


def test_wheels_are_built_for_the_pythons_that_the_package_names() -> None:
    told = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    classified = re.findall(r"Python :: 3\.(\d+)", " ".join(told["project"]["classifiers"]))
    assert told["tool"]["cibuildwheel"]["build"] == [f"cp3{minor}-*" for minor in classified]
