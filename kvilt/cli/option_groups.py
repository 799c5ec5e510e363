"""Options that several commands share, with the names they have in `kvilt.load` and `SamplingParams`: tables alone.

Knows nothing of typer, whose import takes longer than a short answer of a running server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a group: its type for typer, default, help, and flags if they differ from the name."""

    type: Any
    default: Any
    help: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options under one heading of the help."""

    panel: str
    options: Mapping[str, Option]

    def without(self, *names: str) -> OptionGroup:
        """The group without some of its options."""
        return OptionGroup(self.panel, {name: option for name, option in self.options.items() if name not in names})

    def is_default(self, values: Mapping[str, Any]) -> bool:
        """Whether no option of the group was given another value."""
        return all((values[name] or None) == (option.default or None) for name, option in self.options.items())


SAMPLING = OptionGroup(
    "Sampling",
    MappingProxyType(
        {
            "max_tokens": Option(int, 512, "Maximum number of tokens to generate."),
            "min_tokens": Option(int, 0, "Minimum number of tokens to generate."),
            # Where these are not given, the model's own settings hold, else kvilt's: see cli/sampling.py.
            "temperature": Option(float | None, None, "0 is greedy; default: the model's own, else kvilt's."),
            "top_k": Option(int | None, None, "Keep the k most likely tokens; 0 is off."),
            "top_p": Option(float | None, None, "Keep the most likely tokens up to this total probability; 1 is off."),
            "min_p": Option(float | None, None, "Keep tokens at least this likely relative to the best; 0 is off."),
            "typical_p": Option(
                float | None, None, "Keep the most typical tokens up to this total probability; 1 is off."
            ),
            "repetition_penalty": Option(float | None, None, "Above 1 discourages repeats; 1 is off."),
            "presence_penalty": Option(float, 0.0, "Penalizes tokens that have occurred."),
            "frequency_penalty": Option(float, 0.0, "Penalizes tokens by how often they have occurred."),
            "logprobs": Option(int | None, None, "With --json: log-probabilities, also of the n most likely tokens."),
            "n": Option(int, 1, "Samples for one prompt.", ("-n", "--n")),
            "seed": Option(int | None, None, "Makes sampling repeatable; default: random."),
            "stop": Option(list[str], (), "Stop at this text; may be repeated."),
            "repetition_detection": Option(bool, True, "End an answer that repeats itself."),
        }
    ),
)

GRAMMAR = OptionGroup(
    "Structured output",
    MappingProxyType(
        {
            "json_schema": Option(str | None, None, "A file with a JSON schema that the answer follows."),
            "close_objects": Option(
                bool, False, "Objects of the schema have only the properties that it names.", ("--close-objects",)
            ),
            "json_object": Option(bool, False, "Answer with a JSON object.", ("--json-object",)),
            "regex": Option(str | None, None, "A pattern that the whole answer matches."),
            "choice": Option(list[str], (), "Answer with this text; repeat it to give a choice."),
            "lark": Option(str | None, None, "A file with a Lark grammar that the answer follows."),
            "gbnf": Option(str | None, None, "A file with a grammar in llama.cpp's GBNF that the answer follows."),
        }
    ),
)

RUNTIME = OptionGroup(
    "Runtime",
    MappingProxyType(
        {
            "device": Option(str, "auto", "Where to run: auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."),
            "threads": Option(int | None, None, "CPU threads; default: one for each physical core."),
            "numa": Option(
                bool,
                True,
                "Keep CPU threads on physical cores, in equal shares on NUMA nodes.",
                ("--numa/--no-numa",),
            ),
            "tensor_parallel": Option(
                int, 1, "Processes that share the model, each with a part of it; threads are those of each."
            ),
            "kv_memory": Option(str | None, None, "Memory for KV, like 2G; default: a quarter of the free memory."),
            "lora_memory": Option(str | None, None, "Memory for loaded adapters; default 1G."),
            "gpu_memory": Option(float, 0.9, "Share of a GPU's memory that weights, KV and activations may take."),
            "state_every": Option(
                int | None, None, "Tokens between two checkpoints of recurrent state; default: as memory allows."
            ),
            "deterministic": Option(
                bool,
                False,
                "On a GPU: the same bits whatever else runs in a step. The CPU's always are.",
                ("--deterministic",),
            ),
            "max_context": Option(int | None, None, "Longest sequence in tokens."),
            "kv_dtype": Option(
                str,
                "auto",
                "float32, float16, bfloat16, int8, k8v4 (values of 4 bits), float8_e4m3fn (on a GPU); "
                "auto: what the backend prefers.",
            ),
            "backend": Option(str, "auto", "auto or reference."),
        }
    ),
)

STORE = OptionGroup(
    "Store of documents",
    MappingProxyType(
        {
            "store": Option(str | None, None, "A folder that keeps the KV of documents after the process ends."),
            "store_memory": Option(
                str | None, None, "Memory for the store, like 2G; default: an eighth of the free memory."
            ),
            "store_disk": Option(str | None, None, "Maximum size of the folder; default 20G."),
            "store_redis": Option(
                str | None,
                None,
                "A shared Redis or Valkey, redis://host:port/0; with a password KVILT_STORE_REDIS.",
            ),
            "store_redis_memory": Option(str | None, None, "Maximum size in Redis; default 8G."),
            "store_codec": Option(str, "raw", "raw, zstd (exact), int8 or k8v4 (smaller, rounded)."),
            "store_secret_file": Option(str | None, None, "A file with a secret that authenticates stored records."),
            "context_prefix": Option(
                str | None,
                None,
                "The system text that your chats start with: documents are computed after it.",
                ("--context-prefix", "--behind"),
            ),
        }
    ),
)

DRAFTS = OptionGroup(
    "Speculation",
    MappingProxyType(
        {
            "draft": Option(str | None, None, "Draft ahead: ngram, or a smaller model with the same tokenizer."),
            "draft_tokens": Option(
                int | None, None, "Maximum number of draft tokens; default 16 for ngram, 8 for a model."
            ),
        }
    ),
)

SERVER = OptionGroup(
    "Server",
    MappingProxyType(
        {
            "host": Option(str, "127.0.0.1", "Address to listen on; 0.0.0.0 is all interfaces."),
            "port": Option(int, 8000, "Port to listen on; 0 takes any free port."),
            "served_model_name": Option(list[str], (), "The model's name in requests; may be repeated."),
            "alias": Option(
                list[str],
                (),
                "Another name that requests may use, as NAME or NAME=ADAPTER; * may end it (claude-*). Repeatable.",
            ),
            "api_key": Option(
                list[str], (), "A key that clients must send; every user sees it in the list of processes."
            ),
            "api_key_file": Option(str | None, None, "A file with keys, one on a line. Also KVILT_API_KEY."),
            "admin_key": Option(str | None, None, "The admin key; every user sees it in the list of processes."),
            "admin_key_file": Option(str | None, None, "A file with the admin key. Also KVILT_ADMIN_KEY."),
            "metrics_port": Option(
                int | None, None, "Serve /metrics on this port without a key; 0 takes any free port."
            ),
            "metrics_host": Option(str, "127.0.0.1", "Address of the metrics port."),
            "allowed_host": Option(list[str], (), "A host name of this server; may be repeated."),
            "cors_origin": Option(list[str], (), "An origin of web pages that may send requests; may be repeated."),
            "kv_dir": Option(
                str | None, None, "The folder of saved KV handles; default: inside the folder of --store."
            ),
            "files_dir": Option(
                str | None, None, "The folder of files and batches; default: a temporary one that ends with the server."
            ),
            "lora": Option(list[str], (), "An adapter to load, as NAME=PATH; may be repeated."),
            "lora_dir": Option(str | None, None, "The folder that adapters may be loaded from at run time."),
            "kv_events": Option(
                str | None, None, "Publish KV events for routers at this ZMQ address, like tcp://127.0.0.1:5557."
            ),
            "kv_events_replay": Option(
                str | None, None, "Address at which KV events are asked for again; default: the port after --kv-events."
            ),
            "kv_events_topic": Option(str, "kv-events", "The ZMQ topic of KV events."),
            "warm_up": Option(bool, True, "Compile and load a GPU's kernels before the first request."),
            "grace_s": Option(float, 30.0, "Seconds for requests in progress when the server shuts down."),
            "max_body_bytes": Option(int, 8 << 20, "Maximum size of a request body."),
            "max_file_bytes": Option(int, 128 << 20, "Maximum size of an uploaded file."),
            "max_session_bytes": Option(int, 1 << 28, "Maximum size of a session's file that is imported."),
            "stable_prompts": Option(
                bool, False, "Move lines of a session's system prompt that change behind those that do not."
            ),
            "max_connections": Option(int, 2048, "Maximum number of open connections."),
            "keep_alive_s": Option(float, 15.0, "Seconds without an event in a stream before a comment is sent."),
            "gate_every": Option(int, 50, "Compare every n-th blended prompt with a whole prefill; 0: never."),
            "gate_max_kl": Option(
                float, 0.1, "Raise a recipe's ratio if the mean KL of the first token is above this."
            ),
            "gate_act": Option(bool, True, "Raise ratios, or only compare."),
            "gate_path": Option(str | None, None, "The file that keeps the results of comparisons."),
            "log_level": Option(str, "info", "debug, info, warning or error."),
            "log_format": Option(str, "text", "text or json: one line, or one JSON object, for each record."),
        }
    ),
)

ENGINE = OptionGroup(
    "Engine",
    MappingProxyType(
        {
            "step_tokens": Option(int | None, None, "Maximum number of tokens in one step."),
            "shared_step_tokens": Option(int | None, None, "The same while one key decodes beside others."),
            "max_rows": Option(int | None, None, "Maximum number of samples in one step."),
            "max_waiting": Option(int | None, None, "Maximum number of waiting requests."),
            "max_handles": Option(int | None, None, "Maximum number of KV handles of one key."),
            "handle_ttl_s": Option(float | None, None, "Lifetime of a KV handle in seconds."),
            "step_timeout_s": Option(float | None, None, "Seconds after which a step counts as hung."),
            "discover": Option(bool, False, "Find stored documents in prompts, and blend them."),
        }
    ),
)

LOAD = OptionGroup(
    "Load",
    MappingProxyType(
        {
            "workload": Option(str, "random", "random, shared-prefix or multi-turn."),
            "requests": Option(int, 100, "Number of requests; a turn is a request."),
            "prompt_tokens": Option(int, 128, "Approximate length of a prompt or a turn."),
            "max_tokens": Option(int, 64, "Maximum tokens of an answer."),
            "clients": Option(int | None, None, "Concurrent clients, each with one request at a time; default 1."),
            "rate": Option(float | None, None, "Instead of clients: requests per second (Poisson arrivals)."),
            "turns": Option(int, 4, "Turns of a conversation, in multi-turn."),
            "groups": Option(int, 4, "Number of prefixes, in shared-prefix: each is three quarters of a prompt."),
            "seed": Option(int, 0, "Makes prompts and arrivals repeatable."),
        }
    ),
)
