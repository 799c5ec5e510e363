"""Law 5 to the bit: in deterministic mode a row has its logits and KV in any batch, in any chunks, after any move."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gpu_models import VOCAB, Models
from small import Ask, Ear, finish, start
from test_engine import asks
from test_executor import distance, prompts
from test_packed import weight_of
from torch import Tensor

from kvilt.batch import Batch, Ids, Last, Nothing, Row, Score
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig, RunConfig
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.errors import KVError
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.kv.cache import KVCache
from kvilt.ops.contract import Ops
from kvilt.ops.lowrank import AdapterSlots, LowRank
from kvilt.ops.select import select
from kvilt.quant.groups import GROUPED_FORMATS
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Budget, Store

ROWS = [1, 2, 7, 64, 200]
# What the default mode may differ by, of the norm of all logits: see docs/gpu.md.
DEFAULT_TOLERANCE = 3e-2


def load(folder: Path, **fields: object) -> ModelExecutor:
    config = RunConfig(device="cuda", deterministic=True, **{"kv_memory": 1 << 27, **fields})  # type: ignore[arg-type]
    return load_executor(folder, config)


@pytest.fixture(scope="module", params=["auto", "int8", "float8_e4m3fn", "k8v4"])
def executor(models: Models, request: pytest.FixtureRequest) -> Iterator[ModelExecutor]:
    made = load(models.folder, kv_dtype=request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select("triton", device=torch.device("cuda"), deterministic=True)


def step(executor: ModelExecutor, parts: Sequence[tuple[KVCache, Sequence[Sequence[int]]]]) -> Tensor:
    """One step of the rows of several caches; the logits after each row's last token."""
    rows = []
    for kv, tokens in parts:
        kv.reserve([len(own) for own in tokens])
        for i, own in enumerate(tokens):
            rows.append(Row(Ids(list(own)), range(kv.lengths[i], kv.lengths[i] + len(own)), kv, i, want=Last(1)))
    values = executor.run(Batch.of(rows)).values.clone()
    for kv, tokens in parts:
        kv.commit([list(own) for own in tokens])
    return values


def conversation(executor: ModelExecutor, prompt: list[int], chunks: Sequence[int], neighbours: int = 0) -> Tensor:
    """The logits of a prompt in chunks and of six tokens after it, beside rows of other lengths; then its KV."""
    own, ends = [], [sum(chunks[: i + 1]) for i in range(len(chunks))]
    parts = [prompt[end - size : end] for size, end in zip(chunks, ends, strict=True)]
    others = prompts(20, *(1 + 37 * i % 150 for i in range(neighbours)))
    with executor.create_kv_cache() as kv, executor.create_kv_cache(max(1, neighbours)) as rest:
        for i, part in enumerate(parts):
            beside = [(rest, others if i == 0 else [[7 + i]] * neighbours)] if neighbours else []
            own.append(step(executor, [(kv, [part]), *beside])[:1])
        for token in range(6):
            beside = [(rest, [[token]] * neighbours)] if neighbours else []
            own.append(step(executor, [(kv, [[token]]), *beside])[:1])
        return torch.cat([*own[len(parts) - 1 :], *kv_numbers(kv)])


def kv_numbers(kv: KVCache) -> list[Tensor]:
    """A hash of the serialized KV as numbers that fit beside logits; none where a window gives pages back."""
    if len(kv.pool.layout.groups) > 1 or "Window" in repr(kv.pool.layout):
        return []
    digest = hashlib.sha256(kv.serialize()).digest()
    return [torch.tensor([list(digest) * (VOCAB // 32)], dtype=torch.float32, device=kv.pool.device)]


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_has_its_bits_in_any_batch(executor: ModelExecutor, rows: int) -> None:
    prompt = prompts(21, 330)[0]
    assert torch.equal(conversation(executor, prompt, [330], rows - 1), conversation(executor, prompt, [330]))


@pytest.mark.parametrize("chunks", [[1, 1299], [64] * 20 + [20], [5, 1000, 95, 200], [1298, 1, 1]], ids=str)
def test_a_prompt_has_its_bits_in_any_chunks(executor: ModelExecutor, chunks: list[int]) -> None:
    prompt = prompts(22, 1300)[0]
    assert torch.equal(conversation(executor, prompt, chunks), conversation(executor, prompt, [1300]))
    assert torch.equal(conversation(executor, prompt, chunks, 9), conversation(executor, prompt, [1300]))


def test_the_default_mode_stays_within_its_tolerance(models: Models) -> None:
    """It does differ, so the tests above can fail; by how much is documented."""
    prompt, differing = prompts(22, 1300)[0], 0
    alone = conversation(models.usual, prompt, [1300])[:7]
    for chunks, neighbours in (([1300], 6), ([1300], 63), ([64] * 20 + [20], 0), ([5, 1000, 95, 200], 9)):
        found = conversation(models.usual, prompt, chunks, neighbours)[:7]
        differing += int((found != alone).sum())
        assert distance(found, alone) < DEFAULT_TOLERANCE
    sys.stdout.write(f"logits of the default mode that differ: {differing} of {4 * alone.numel()}\n")


def test_logits_are_those_of_the_reference(models: Models, executor: ModelExecutor) -> None:
    """With KV of 8 bits both round it, and a number between two of them may become either.

    Numbers of `float8_e4m3fn` are up to an eighth apart: these logits are 15 % away from those with KV of 16 bits.
    """
    prompt, kept = prompts(23, 400)[0], executor.layout.groups[0].shape.dtype
    exact = kept is executor.pool.ops.kv_dtype
    config = RunConfig(device="cpu", backend="reference", kv_memory=1 << 27, kv_dtype="auto" if exact else kept.name)
    reference = load_executor(models.folder, config)
    found, truth = (conversation(one, prompt, [400], 5)[:7] for one in (executor, reference))
    reference.close()
    apart = distance(found, truth)
    sys.stdout.write(f"distance to the reference with {kept.name}: {apart:.4f}\n")
    assert apart < (3e-2 if exact else {"int8": 6e-2, "float8_e4m3fn": 12e-2, "k8v4": 25e-2}[kept.name])


def test_forks_and_saved_caches_have_the_same_bits(executor: ModelExecutor) -> None:
    prompt = prompts(24, 500)[0]
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as loaded, executor.create_kv_cache(30) as rest:
        step(executor, [(kv, [prompt])])
        loaded.load(kv.serialize())
        with kv.fork() as forked:
            truth = step(executor, [(kv, [[5]])])
            step(executor, [(rest, prompts(25, *range(1, 31)))])
            found = step(executor, [(rest, [[1]] * 30), (forked, [[5]]), (loaded, [[5]])])[-2:]
        assert torch.equal(found, truth.expand(2, -1))
        kv.truncate(470)
        again = step(executor, [(kv, [[*prompt[470:], 5]])])
        assert torch.equal(again, truth)


def test_scores_have_the_same_bits_in_any_batch(executor: ModelExecutor) -> None:
    prompt, found = prompts(26, 300)[0], []
    for neighbours in (0, 20):
        with executor.create_kv_cache() as kv, executor.create_kv_cache(20) as rest:
            kv.reserve(300)
            rest.reserve(40)
            rows = [Row(Ids(prompt), range(300), kv, 0, want=Score([*prompt[1:], 1], top=5))]
            rows += [Row(Ids([3] * 40), range(40), rest, i, want=Nothing()) for i in range(neighbours)]
            scores = executor.run(Batch.of(rows)).scores[0]
            found.append(torch.cat([scores.logprobs[:, None], scores.top_logprobs], 1))
    assert torch.equal(*found)


def test_logprobs_have_the_same_bits_in_any_batch(ops: Ops) -> None:
    assert ops.sampling is not None
    logits = torch.randn(200, 50_000, device="cuda") * 4
    tokens = torch.arange(200, device="cuda")
    whole = ops.sampling.logprobs(logits, None, tokens, 8)
    for rows in ROWS:
        part = ops.sampling.logprobs(logits[:rows], None, tokens[:rows], 8)
        assert torch.equal(part.logprobs, whole.logprobs[:rows])
        assert torch.equal(part.top_logprobs, whole.top_logprobs[:rows])


# A process, and a day of requests.

RESTARTED = """
import hashlib, sys
from pathlib import Path
from test_deterministic import conversation, load
from test_executor import prompts
executor = load(Path(sys.argv[1]))
made = conversation(executor, prompts(27, 700)[0], [100, 600], 12)
print(hashlib.sha256(made.cpu().numpy().tobytes()).hexdigest())
"""


def test_another_process_computes_the_same_bits(models: Models) -> None:
    here = load(models.folder)
    made = conversation(here, prompts(27, 700)[0], [700])
    here.close()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", RESTARTED, str(models.folder)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == hashlib.sha256(made.cpu().numpy().tobytes()).hexdigest()


def answers(executor: ModelExecutor, many: list[Ask], **fields: object) -> list[list[list[int]]]:
    executor.prefixes.clear()
    engine = Engine(executor, EngineConfig(**fields))  # type: ignore[arg-type]
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    assert all(ear.reasons == ["length"] for ear in ears), [ear.error for ear in ears]
    return [ear.tokens for ear in ears]


def test_a_day_of_requests_has_one_outcome(models: Models) -> None:
    """Alone or together, with or without overlap, in large steps or small ones, and with too few pages for all."""
    many = asks(40, 5)
    executor = load(models.folder)
    alone = [answers(executor, [ask], overlap=False)[0] for ask in many]
    assert answers(executor, many) == alone
    assert answers(executor, many, step_tokens=130, max_rows=20) == alone
    assert answers(executor, many[::-1], overlap=False) == alone[::-1]
    executor.close()
    page_bytes = executor.layout.page_bytes
    narrow = load(models.folder, kv_memory=60 * page_bytes, max_context=512)
    assert answers(narrow, many) == alone
    narrow.close()


def test_blended_prompts_have_one_outcome(models: Models) -> None:
    """The tokens of a prompt of stored documents, alone and among other requests."""
    executor, found = load(models.folder), []
    segments = prompts(28, 10, 200, 150, 12)
    prompt = BlendPrompt.of(segments, [False, True, True, False])
    for others in (0, 25):
        executor.prefixes.clear()
        with Store(Budget(1 << 28)) as store:
            chunks = ChunkCache(executor, store)
            engine, ear = Engine(executor, chunks=lambda chunks=chunks: chunks), Ear()
            request = Request(
                prompt.ids, SamplingParams(max_tokens=20, temperature=0.0), documents=prompt.documents,
                recipe=Recipe(0.3, min_gain=0.0),
            )  # fmt: skip
            engine.add(engine.prepare(request, ear))
            for ask in asks(others, 6):
                start(engine, ask)
            finish(engine)
            assert ear.reasons == ["length"], ear.error
            found.append(ear.tokens)
    assert found[0] == found[1]
    executor.close()


def test_experts_have_their_bits_in_any_batch(tmp_path: Path) -> None:
    families = pytest.importorskip("families")  # makes its models with transformers
    torch.manual_seed(0)
    families.FAMILIES["qwen3-moe"]().save_pretrained(tmp_path)
    executor = load(tmp_path)
    prompt = [token % executor.spec.vocab_size for token in prompts(29, 60)[0]]
    with (
        executor.create_kv_cache() as alone,
        executor.create_kv_cache() as crowded,
        executor.create_kv_cache(40) as rest,
    ):
        truth = [step(executor, [(alone, [part])]) for part in (prompt, [3], [4])]
        for own, part in zip(truth, (prompt, [3], [4]), strict=True):
            assert torch.equal(step(executor, [(crowded, [part]), (rest, [[5, 6]] * 40)])[:1], own)
    executor.close()


def test_kv_of_another_arithmetic_is_refused(models: Models) -> None:
    executor = load(models.folder)
    with executor.create_kv_cache() as kv, models.usual.create_kv_cache() as usual:
        step(executor, [(kv, [[1, 2, 3]])])
        with pytest.raises(KVError, match="numerics"):
            usual.load(kv.serialize())
        usual.load(kv.serialize(), accept_numerics=True)
        assert usual.lengths == (3,)
    executor.close()


# Operations with shapes that the small model has not.


@pytest.mark.parametrize(("outputs", "columns"), [(1000, 4096), (4096, 1040), (192, 14336), (8, 72)])
def test_products_have_their_bits_in_any_batch(ops: Ops, outputs: int, columns: int) -> None:
    x, weight = torch.randn(200, columns, device="cuda").bfloat16(), torch.randn(outputs, columns, device="cuda")
    x *= torch.exp2(torch.randint(-8, 8, x.shape, device="cuda"))
    residual, whole = torch.randn(200, outputs, device="cuda").bfloat16(), None
    for rows in (200, *range(1, 20), 33, 64, 65, 128, 129):
        made = ops.linear(x[:rows], weight.bfloat16(), residual=residual[:rows].clone())
        whole = made if whole is None else whole
        assert torch.equal(made, whole[:rows]), rows
    assert whole is not None
    truth = x.double() @ weight.bfloat16().double().T + residual
    assert float((whole - truth).norm() / truth.norm()) < 3e-3


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_packed_products_have_their_bits_in_any_batch(ops: Ops, name: str) -> None:
    weight, x = ops.prepare(weight_of(name, 130, 2048)), torch.randn(200, 2048, device="cuda").bfloat16()
    whole = ops.linear(x, weight)
    for rows in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows]), rows


@pytest.mark.parametrize("rank", [4, 40])
def test_adapters_have_their_bits_in_any_batch(ops: Ops, rank: int) -> None:
    table = ops.new_table(384, 256, 2)
    for slot in range(2):
        product = LowRank(torch.randn(rank, 256), torch.randn(384, rank), 0.5)
        table.put(slot, ops.prepare_low_rank(product))
    x, slots = torch.randn(200, 256, device="cuda").bfloat16(), torch.arange(200, device="cuda") % 3 - 1

    def adapted(span: slice) -> Tensor:
        out = torch.ones(len(slots[span]), 384, device="cuda").bfloat16()
        ops.adapt(x[span], [table], [out], AdapterSlots(slots[span], torch.ones(len(out), device="cuda")))
        return out

    whole = adapted(slice(0, 200))
    for first, rows in ((1, 1), (5, 7), (3, 64), (10, 70), (100, 100)):
        assert torch.equal(adapted(slice(first, first + rows)), whole[first : first + rows])
