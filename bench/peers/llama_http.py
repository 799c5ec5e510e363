"""llama.cpp's server on a free port, run by the interpreter that has xllamacpp; lives until its stdin closes.

python llama_http.py MODEL THREADS SLOTS CONTEXT_OF_A_SLOT
"""

from __future__ import annotations

import sys


def main() -> None:
    import xllamacpp

    model, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = slots
    params.n_ctx = slots * context  # it is divided among the slots
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_threads_http = max(params.n_threads_http, slots + 2)  # a stream occupies one
    params.cont_batching = True
    params.cache_ram_mib = 0  # prompts do not come back, so copying them away would only cost
    params.verbosity = -1
    # Flash attention (auto), batches of 2048 in pieces of 512, float16 KV and a warm-up are its defaults.
    server = xllamacpp.Server(params)
    print("LISTENS", server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
