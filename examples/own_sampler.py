"""The executor without the facade: your own sampler, and a cache you cut back by hand."""

import kvilt

with kvilt.load() as llm:
    executor, tokenizer = llm.executor, llm.tokenizer
    ids = tokenizer.encode("The best thing about Paris is")
    with executor.create_kv_cache() as kv:
        executor.prefill(ids[:-1], kv)

        logits = executor.step([ids[-1]], kv)[0]  # [vocab]
        for token in logits.topk(3).indices.tolist():  # follow each of the three likeliest words a little
            with kv.fork() as branch:
                path = [token]
                for _ in range(7):
                    path.append(int(executor.step([path[-1]], branch)[0].argmax()))
                print(tokenizer.decode(path))

        kv.truncate(len(ids) - 2)  # forget "Paris is", say "Rome is"
        (rest,) = executor.sample_tokens(8, tokenizer.encode(" Rome is", add_special=False), kv)
        print("Rome:", tokenizer.decode(rest))
