"""How far a backend's probabilities are from float32 on the same weights, and what another arithmetic costs in speed.

    python bench/precision.py MODEL.gguf ... [--backends native] [--llama] [--before PATHS] [--tokens 640]
    python bench/precision.py MODEL.gguf ... --speed 15 --before PATHS

The first prints a table: mean and 99th percentile of the KL divergence from the `reference` backend over every position
of one text, and how often the likeliest token is the same. The second times a prompt of 512 tokens and 64 steps of
decoding, in turn with the build at PATHS (a PYTHONPATH: a checkout and the folder of its _kvilt_native), and prints
medians and the median ratio to that build over the rounds.

`--llama` needs llama-cpp-python. Each backend runs in a process of its own, which writes its logits to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS, STEPS = 512, 64
BLOCK = 64  # positions compared at a time


def own_text() -> str:
    """Prose of this repository: the beginning of every page, without its tables."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    kept = ([line for line in page.read_text().splitlines() if not line.startswith("|")] for page in pages)
    return "\n\n".join("\n".join(lines)[:6000] for lines in kept)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a backend of one build of kvilt, or llama.cpp."""

    label: str
    backend: str
    paths: str | None = None  # PYTHONPATH of another build

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        paths = os.environ | {"PYTHONPATH": self.paths} if self.paths else dict(os.environ)
        return [sys.executable, str(Path(__file__).resolve()), *arguments], paths


# ---- in the child ----


def write_logits(backend: str, model: str, ids_path: str, out_path: str, threads: int) -> None:
    """Logits of every position [tokens, vocab]."""
    ids = json.loads(Path(ids_path).read_text())
    of = llama_logits if backend == "llama.cpp" else kvilt_logits
    np.save(out_path, of(backend, model, ids, threads))


def kvilt_logits(backend: str, model: str, ids: list[int], threads: int) -> np.ndarray:
    import kvilt
    from kvilt.batch import Batch, Ids, Last, Row

    with kvilt.load(model, backend=backend, threads=threads, kv_memory="512M") as llm:
        executor = llm.executor
        print(executor.pool.ops.numerics, flush=True)
        with executor.create_kv_cache() as kv:
            kv.reserve(len(ids))
            row = Row(Ids(ids), range(len(ids)), kv, want=Last(len(ids)))
            return executor.run(Batch.of([row])).values.numpy()


def llama_logits(_backend: str, model: str, ids: list[int], _threads: int) -> np.ndarray:
    import llama_cpp as lib

    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    loaded = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch = 2048, BLOCK
    context = lib.llama_init_from_model(loaded, params)
    batch, parts = lib.llama_batch_init(BLOCK, 0, 1), []
    for start in range(0, len(ids), BLOCK):
        part = ids[start : start + BLOCK]
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = 1
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        parts.append(np.ctypeslib.as_array(lib.llama_get_logits(context), (len(part), vocab)).copy())
    print("llama.cpp", flush=True)
    return np.concatenate(parts)


def time_rounds(backend: str, model: str, ids_path: str, threads: int, cpu_time: bool) -> None:
    """For each line of input, one prompt and some steps: their seconds as JSON."""
    import kvilt

    prompt = json.loads(Path(ids_path).read_text())[:PROMPT_TOKENS]
    greedy = kvilt.SamplingParams(temperature=0.0)
    now = time.process_time if cpu_time else time.perf_counter
    with kvilt.load(model, backend=backend, threads=threads, kv_memory="512M") as llm:
        print(llm.executor.pool.ops.numerics, flush=True)
        for _ in sys.stdin:
            with llm.executor.create_kv_cache() as kv:
                began_s = now()
                first = int(llm.executor.step([prompt], kv).argmax())
                read_s = now()
                llm.executor.sample_tokens(STEPS, [[first]], kv, params=greedy)
                print(json.dumps([read_s - began_s, now() - read_s]), flush=True)


# ---- in the parent ----


def logits_of(subject: Subject, model: str, ids: Path, out: Path, threads: int) -> np.ndarray:
    command, environment = subject.command("--child", subject.backend, model, str(ids), str(out), str(threads))
    began_s = time.perf_counter()
    print(f"  {subject.label} ...", end="", file=sys.stderr, flush=True)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(f" {done.stdout.strip()}, {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)
    return np.load(out, mmap_mode="r")


def divergence(truth: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Mean KL(truth | other), its 99th percentile, and the share of positions with the same likeliest token."""
    parts, same = [], 0
    for start in range(0, len(truth), BLOCK):
        p, q = (
            torch.from_numpy(np.array(one[start : start + BLOCK])).double().log_softmax(-1) for one in (truth, other)
        )
        parts.append((p.exp() * (p - q)).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    all_of_them = torch.cat(parts)
    return float(all_of_them.mean()), float(all_of_them.quantile(0.99)), same / len(truth)


def token_ids(model: str, text: str, count: int) -> list[int]:
    import kvilt

    with kvilt.load(model, kv_memory="64M") as llm:
        return llm.tokenizer.encode(text)[:count]


def precision(model: str, subjects: list[Subject], ids: Path, folder: Path, threads: int) -> None:
    truth = logits_of(Subject("reference", "reference"), model, ids, folder / "truth.npy", threads)
    for subject in subjects:
        mean, high, same = divergence(truth, logits_of(subject, model, ids, folder / "other.npy", threads))
        name = Path(model).stem
        print(f"| {name} | {subject.label} | {mean:.3g} | {high:.3g} | {100 * same:.1f} % |", flush=True)


def speeds(model: str, subjects: list[Subject], ids: Path, options: argparse.Namespace) -> None:
    """Rounds of all subjects in turn, backwards every other time; ratios compare each with the one before it."""
    children, found, rounds = [], [[] for _ in subjects], options.speed
    clock = ("--cpu-time",) if options.cpu_time else ()
    for subject in subjects:
        command, environment = subject.command(
            "--timed", subject.backend, model, str(ids), str(options.threads), *clock
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        children.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
    try:
        numerics = [child.stdout.readline().strip() for child in children]
        for turn in range(rounds + 1):  # the first warms up
            for child, own in list(zip(children, found, strict=True))[:: 1 if turn % 2 else -1]:
                child.stdin.write("go\n")
                child.stdin.flush()
                own.append(json.loads(child.stdout.readline()))
            print(f"\r  round {turn} of {rounds}", end="", file=sys.stderr, flush=True)
    finally:
        for child in children:
            child.stdin.close()
            child.wait()
    print(file=sys.stderr)
    for number, (subject, name) in enumerate(zip(subjects, numerics, strict=True)):
        base = found[number - 1 if options.before and number % 2 else number][1:]
        cells = (cell(found[number][1:], base, which, count) for which, count in enumerate((PROMPT_TOKENS, STEPS)))
        print(f"| {Path(model).stem} | {subject.label} ({name}) | {' | '.join(cells)} |", flush=True)


def cell(own: list[list[float]], base: list[list[float]], which: int, count: int) -> str:
    """Tokens a second, and the median over rounds of how many times as fast as the other."""
    median = statistics.median(one[which] for one in own)
    ratio = statistics.median(other[which] / one[which] for one, other in zip(own, base, strict=True))
    return f"{count / median:.1f} ({ratio:.3f}x)"


def read_subjects(options: argparse.Namespace) -> Iterator[Subject]:
    for backend in options.backends:
        if options.before:
            yield Subject(f"before, {backend}", backend, options.before)
        yield Subject(f"kvilt, {backend}", backend)
    if options.llama and not options.speed:
        yield Subject("llama.cpp", "llama.cpp")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        backend, model, ids, out, threads = sys.argv[2:]
        return write_logits(backend, model, ids, out, int(threads))
    if sys.argv[1:2] == ["--timed"]:
        backend, model, ids, threads, *clock = sys.argv[2:]
        return time_rounds(backend, model, ids, int(threads), bool(clock))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--backends", nargs="*", default=["native"], help="such as native/avx2")
    parser.add_argument("--before", metavar="PATHS", help="PYTHONPATH of another build to compare with")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--text", type=Path, help="default: prose of this repository")
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--speed", type=int, metavar="ROUNDS", help="time instead of comparing")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds: a busy machine, --threads 1")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else own_text()
    subjects = list(read_subjects(options))
    print("| model | arithmetic | " + ("prefill | decode |" if options.speed else "KL | 99 % | same token |"))
    print("|---|---|---|---|" + ("" if options.speed else "---|"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in map(str, options.models):
            ids = Path(folder) / "ids.json"
            ids.write_text(json.dumps(token_ids(model, text, options.tokens)))
            if options.speed:
                speeds(model, subjects, ids, options)
            else:
                precision(model, subjects, ids, Path(folder), options.threads)
    return None


if __name__ == "__main__":
    main()
