"""The official JSON-Schema-Test-Suite against structured output: what is enforced, what is refused and by which name.

As a script it prints the table of docs/structured_output.md: `python tests/json_schema_suite.py`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grammars import byte_compiler, takes_value

from kvilt.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from kvilt.sampling.constraint import JsonSchema
from kvilt.sampling.formats import FORMATS

# The suite travels inside the source distribution of the package that is our oracle.
PACKAGE, SHA256 = "jsonschema==4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
KEPT = Path("~/.cache/kvilt-tests").expanduser() / f"{PACKAGE.replace('==', '-')}.tar.gz"
NEWEST = "draft2020-12"
EARLIER = {  # and the $schema that their cases leave out
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}


class Absent(Exception):
    """The suite is not here and cannot be fetched now."""


def fetch() -> bytes:
    """The source distribution, from where it was kept or from the package index; its hash is checked each time."""
    if not KEPT.is_file():
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
        done = subprocess.run([*command, "--dest", str(KEPT.parent), PACKAGE], capture_output=True, text=True)
        if done.returncode or not KEPT.is_file():
            raise Absent(done.stderr[-500:])
    data = KEPT.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        KEPT.unlink()
        raise AssertionError(f"{KEPT.name} is not the file that was pinned")
    return data


@dataclass(frozen=True)
class Case:
    """One schema of the suite with its instances."""

    file: str  # additionalProperties, optional/format/date, ...
    description: str
    schema: Any
    tests: tuple[Mapping[str, Any], ...]


def cases(draft: str = NEWEST) -> Iterator[Case]:
    """All cases of a draft, the optional ones last."""
    fetch()
    folder = f"/json/tests/{draft}/"
    with tarfile.open(KEPT) as archive:
        members = [member for member in archive.getmembers() if folder in member.name and member.name.endswith(".json")]
        named = {member.name.split(folder)[1].removesuffix(".json"): member for member in members}
        for name in sorted(named, key=lambda name: (name.count("/"), name)):
            opened = archive.extractfile(named[name])
            assert opened is not None
            for case in json.load(opened):
                schema = case["schema"]
                if draft in EARLIER and isinstance(schema, dict):
                    schema = {"$schema": EARLIER[draft], **schema}
                yield Case(name, case["description"], schema, tuple(case["tests"]))


@dataclass(frozen=True)
class Verdict:
    """What became of a case: refused under a name, or instances judged right and wrong."""

    case: Case
    refused: str = ""
    right: int = 0
    by_policy: tuple[str, ...] = ()  # valid instances that kvilt never writes, and says so
    wrong: tuple[str, ...] = ()


def judge(case: Case) -> Verdict:
    """Compile a case's schema and offer it all instances, in every spelling."""
    try:
        grammar = byte_compiler().compile(JsonSchema(json.dumps(case.schema)))
    except GrammarUnsupported as error:
        return Verdict(case, refused=error.keyword)
    except GrammarTooLarge:
        return Verdict(case, refused="size of numbers")
    except GrammarError as error:
        valid = [test["description"] for test in case.tests if test["valid"]]
        return Verdict(case, refused="schemas that nothing satisfies", wrong=tuple(f"{v}: {error}" for v in valid))
    wrong, policy, right = [], [], 0
    for test in case.tests:
        if takes_value(grammar, test["data"]) == test["valid"]:
            right += 1
        elif test["valid"] and unwritten(case, test):
            policy.append(test["description"])
        elif not test["valid"] and not_asserted(case):
            right += 1
        else:
            wrong.append(f"{'refuses' if test['valid'] else 'takes'} {test['description']}")
    return Verdict(case, right=right, by_policy=tuple(policy), wrong=tuple(wrong))


def unwritten(case: Case, test: Mapping[str, Any]) -> bool:
    """Whether docs/structured_output.md says that such a valid instance is never written."""
    data = test["data"]
    if isinstance(data, str) and any((char < " " and char not in "\b\t\n\f\r") or char == "\x7f" for char in data):
        return True
    return case.file == "format" and test["description"].endswith("is only an annotation by default")


def not_asserted(case: Case) -> bool:
    """Whether docs/structured_output.md says that what this file forbids is an annotation."""
    kind, _, name = case.file.rpartition("/")
    other_format = kind == "optional/format" and name not in FORMATS
    return other_format or case.file in ("optional/content", "optional/zeroTerminatedFloats")


def summary(draft: str, verdicts: list[Verdict]) -> str:
    """A draft in one line of a table: schemas, those that are enforced, and those that are refused by name."""
    refused = sum(1 for verdict in verdicts if verdict.refused)
    return f"| {draft} | {len(verdicts)} | {len(verdicts) - refused} | {refused} |"


def table(verdicts: list[Verdict]) -> str:
    """The cases of each file in one line: enforced, and refused by which names."""
    lines = ["| keyword | schemas | enforced | refused, by name |", "|---|---|---|---|"]
    for file in dict.fromkeys(verdict.case.file for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.case.file == file]
        refused = [verdict.refused for verdict in own if verdict.refused]
        names = ", ".join(f"{name} ({refused.count(name)})" for name in sorted(set(refused)))
        lines.append(f"| {file} | {len(own)} | {len(own) - len(refused)} | {names} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([judge(case) for case in cases()]))  # noqa: T201
    for draft in (NEWEST, *EARLIER):
        print(summary(draft, [judge(case) for case in cases(draft)]))  # noqa: T201
