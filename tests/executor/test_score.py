"""Scoring: right, and within a stated bound of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from kvilt import Executor
from kvilt.batch import Batch, Ids, Last, Row, Score
from kvilt.models.decoder import SCORE_BLOCK_BYTES

IDS = [int(i) for i in torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1))]


def test_scores_are_the_log_probabilities_of_the_targets(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(40)
        logits = tiny.run(Batch.of([Row(Ids(IDS), range(40), kv, want=Last(40))])).values
        scored = tiny.run(Batch.of([Row(Ids(IDS), range(40), kv, want=Score([*IDS[1:], 0], top=4))])).scores[0]
        assert kv.lengths == (0,)  # scoring never mutates a cache
    logprobs = logits.log_softmax(-1)
    torch.testing.assert_close(scored.logprobs, logprobs.gather(1, torch.tensor([*IDS[1:], 0])[:, None])[:, 0])
    torch.testing.assert_close(scored.top_logprobs, logprobs.topk(4).values)


MEASURE = """
import resource, sys
import torch
from pathlib import Path
from kvilt.batch import Batch, Ids, Row, Score
from kvilt.config import RunConfig
from kvilt.executor.load import load_executor

torch.set_num_threads(1)
executor = load_executor(Path(sys.argv[1]), RunConfig(kv_memory=1 << 25))
tokens, vocab = int(sys.argv[2]), executor.spec.vocab_size
ids = [i % vocab for i in range(tokens)]
with executor.create_kv_cache() as kv:
    kv.reserve(tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    executor.run(Batch.of([Row(Ids(ids), range(tokens), kv, want=Score(ids, top=1))]))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_scoring_4096_tokens_stays_within_its_bound(tmp_path: Path) -> None:
    """Bound: a few blocks of SCORE_BLOCK_BYTES and the activations; [4096, vocab] floats would be 819 MB here."""
    from tiny import write_tiny

    folder = write_tiny(tmp_path, vocab_size=50_000, max_position_embeddings=4096)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), "4096"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 * SCORE_BLOCK_BYTES + (64 << 20)
