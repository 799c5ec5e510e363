"""One adapter per runtime, all asked the same way, so that every runtime is timed the same way.

    engine = ENGINES[name](model_path, threads)
    timing = engine.generate(prompts, new)

Prompts have equal lengths; each gets `new` greedy tokens, nothing stops early and nothing is remembered between calls.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

NATIVE = "KVILT_BENCH_NATIVE"  # a file of kvilt's extension to use instead of the installed one
BACKEND = "KVILT_BENCH_BACKEND"  # which of kvilt's backends
now = time.perf_counter
Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until every row has its first token, seconds until the end, and the tokens."""

    first_s: float
    total_s: float
    tokens: list[list[int]]


class Engine(Protocol):
    """A model in a runtime."""

    def generate(self, prompts: Prompts, new: int) -> Timing: ...


def use_extension(path: str) -> None:
    """Load kvilt's extension from a file: the finder of an editable install comes before any PYTHONPATH."""
    if "_kvilt_native" in sys.modules:
        return  # types of an extension cannot be registered twice
    spec = spec_from_file_location("_kvilt_native", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is no extension module")
    sys.modules["_kvilt_native"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


class Kvilt:
    """This package, through the executor as `kvilt.load` makes it."""

    def __init__(self, model: str, threads: int) -> None:
        if native := os.environ.get(NATIVE):
            use_extension(native)
        import kvilt

        self._executor = kvilt.load(model, threads=threads, backend=os.environ.get(BACKEND, "auto")).executor
        self._greedy = kvilt.SamplingParams(temperature=0.0)

    @property
    def about(self) -> str:
        """Which arithmetic, and from which file."""
        module = sys.modules.get("_kvilt_native")
        return f"{self._executor.pool.ops.numerics}, {getattr(module, '__file__', 'no extension')}"

    def _computed(self) -> float:
        counts = self._executor.metrics.snapshot()["kvilt_computed_tokens_total"]["series"]
        return float(sum(entry["value"] for entry in counts))

    def generate(self, prompts: Prompts, new: int) -> Timing:
        with self._executor.create_kv_cache(len(prompts)) as kv:
            before = self._computed()
            started_s = now()
            first = self._executor.step(list(prompts), kv).argmax(-1).tolist()
            first_s = now() - started_s
            if self._computed() - before < sum(map(len, prompts)):
                raise RuntimeError("part of the prompt was remembered, not computed")
            started_s = now() - first_s  # the question above is not part of the time
            tokens = [[token] for token in first]
            if new > 1:
                rest = self._executor.sample_tokens(new - 1, tokens, kv, params=self._greedy)
                tokens = [[token, *more] for token, more in zip(first, rest, strict=True)]
            return Timing(first_s, now() - started_s, tokens)


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C API: one `llama_decode` for all rows, argmax over its logits.

    Its own high-level API has no batches and adds Python to every token; this is as fast as the library goes.
    """

    CONTEXT, ROW_CONTEXT = 1280, 256
    BATCH = 2048  # tokens of one call at most

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self._lib, self._threads, self._rows, self._tokens = llama_cpp, threads, 0, 0
        self._buffers: list[str] = []  # kinds of memory that hold weights; each has kernels of its own
        self._log = llama_cpp.llama_log_callback(self._note)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._resize(1, self.CONTEXT)

    def _note(self, _level: int, text: bytes, _data: object) -> None:
        kind, found, size = text.decode(errors="replace").partition("model buffer size =")
        if found:
            self._buffers.append(f"{kind.split()[-1]} {size.strip()}")

    @property
    def about(self) -> str:
        """The version, the instructions it is compiled for, and whose kernels multiply the weights."""
        said = self._lib.llama_print_system_info().decode()
        used = [part.split(" = ")[0].split()[-1] for part in said.split("|") if part.strip().endswith("= 1")]
        weights = f"; weights for {', '.join(self._buffers)}"
        return f"llama-cpp-python {self._lib.__version__}: {', '.join(used)}{weights}"

    def _resize(self, rows: int, tokens: int) -> None:
        """A context for so many sequences and tokens, with flash attention."""
        lib = self._lib
        if self._rows:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        params.n_ctx = tokens
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = self._threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._batch = lib.llama_batch_init(self.BATCH, 0, 1)
        self._rows, self._tokens = rows, tokens

    def _decode(self, tokens: Prompts, start: int) -> list[int]:
        """One step for every row; the likeliest token after each."""
        import numpy as np

        batch, count = self._batch, 0
        for row, ids in enumerate(tokens):
            for offset, token in enumerate(ids):
                batch.token[count], batch.pos[count] = token, start + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, row
                batch.logits[count] = offset == len(ids) - 1
                count += 1
        batch.n_tokens = count
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (len(tokens), self._vocab))
        return [int(token) for token in logits.argmax(1)]

    def generate(self, prompts: Prompts, new: int) -> Timing:
        rows, length = len(prompts), len(prompts[0])
        tokens = max(length + new, self.CONTEXT) if rows == 1 else rows * self.ROW_CONTEXT
        if (rows, tokens) != (self._rows, self._tokens):
            self._resize(rows, tokens)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        started_s = now()
        part = self.BATCH // rows
        steps = [[self._decode([ids[at : at + part] for ids in prompts], at) for at in range(0, length, part)][-1]]
        first_s = now() - started_s
        for step in range(new - 1):
            steps.append(self._decode([[token] for token in steps[-1]], len(prompts[0]) + step))
        total_s = now() - started_s
        return Timing(first_s, total_s, [list(row) for row in zip(*steps, strict=True)])


class OnnxRuntime:
    """onnxruntime-genai on a folder made by its model builder."""

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(model)
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._lib, self._model = onnxruntime_genai, onnxruntime_genai.Model(config)

    def generate(self, prompts: Prompts, new: int) -> Timing:
        import numpy as np

        length, ids = len(prompts[0]), np.array(prompts, dtype=np.int32)
        params = self._lib.GeneratorParams(self._model)
        params.set_search_options(
            max_length=length + new, min_length=length + new, batch_size=len(prompts), do_sample=False
        )
        started_s = now()
        generator = self._lib.Generator(self._model, params)
        generator.append_tokens(ids if len(prompts) > 1 else ids[0])
        generator.generate_next_token()
        first_s = now() - started_s
        for _ in range(new - 1):
            generator.generate_next_token()
        total_s = now() - started_s
        return Timing(first_s, total_s, [generator.get_sequence(i)[length:].tolist() for i in range(len(prompts))])


class OpenVino:
    """openvino-genai's continuous batching pipeline, with prefix caching off."""

    def __init__(self, model: str, threads: int) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, 32, 2048
        scheduler.enable_prefix_caching = False
        self._lib, self._requests = openvino_genai, 0
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )

    def generate(self, prompts: Prompts, new: int) -> Timing:
        import numpy as np
        import openvino

        config = self._lib.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        started_s, first_s = now(), 0.0
        handles = []
        for prompt in prompts:
            self._requests += 1
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._requests, ids, config))
        tokens: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for row, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        tokens[row] += output.generated_ids
            if not first_s and all(tokens):
                first_s = now() - started_s
        return Timing(first_s, now() - started_s, tokens)


class CTranslate2:
    """ctranslate2's generator in int8."""

    def __init__(self, model: str, threads: int) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            model, device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
        )
        self._vocabulary = json.loads((Path(model) / "vocabulary.json").read_text())

    def generate(self, prompts: Prompts, new: int) -> Timing:
        stamps: list[float] = []
        words = [[self._vocabulary[i] for i in prompt] for prompt in prompts]

        def stamp(_: object) -> bool:
            stamps.append(now())
            return False

        lengths = {"max_length": new, "min_length": new, "end_token": [0]}
        how = {"sampling_topk": 1, "beam_size": 1, "include_prompt_in_result": False}
        started_s = now()
        results = self._generator.generate_batch(words, **lengths, **how, callback=stamp)
        total_s = now() - started_s
        tokens = [result.sequences_ids[0] for result in results]
        return Timing(stamps[len(prompts) - 1] - started_s, total_s, tokens)


class Transformers:
    """Hugging Face transformers on the dequantized checkpoint."""

    dtype = "float32"

    def __init__(self, model: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch, self._lib = torch, transformers
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, self.dtype))
        self._model = loaded.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 2

    def generate(self, prompts: Prompts, new: int) -> Timing:
        torch, stamps = self._torch, []

        class Clock(self._lib.StoppingCriteria):  # type: ignore[name-defined,misc]
            def __call__(self, ids: Any, *_: Any, **__: Any) -> Any:
                stamps.append(now())
                return torch.zeros(ids.shape[0], dtype=torch.bool)

        ids = torch.tensor(prompts)
        clock = self._lib.StoppingCriteriaList([Clock()])
        with torch.inference_mode():
            started_s = now()
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                stopping_criteria=clock,
            )
            total_s = now() - started_s
        return Timing(stamps[0] - started_s, total_s, out[:, ids.shape[1] :].tolist())


class TransformersBf16(Transformers):
    """The same in bfloat16."""

    dtype = "bfloat16"


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "kvilt": Kvilt,
    "llama.cpp": LlamaCpp,
    "onnxruntime-genai": OnnxRuntime,
    "openvino-genai": OpenVino,
    "ctranslate2": CTranslate2,
    "transformers": Transformers,
    "transformers-bf16": TransformersBf16,
}
