"""A selection policy of your own: which tokens of stored passages the engine computes again."""

import kvilt
from kvilt.blend import BlendExecutor, BlendOutput

PASSAGES = ["The Rhine flows through Basel and Cologne.\n" * 4, "The Danube flows through Vienna and Budapest.\n" * 4]


class RareValues(BlendExecutor):
    """The tenth of all tokens whose values are longest."""

    selection_layers = (1,)

    def blend(self, layer_id, retrieved_k, retrieved_v, valid, origins, q, k, v, positions, starts, token_dim):
        keep = v.flatten(1).norm(dim=1).topk(len(v) // 10).indices.sort().values
        return BlendOutput(q[keep], k, v, positions[keep], keep, None)


with kvilt.load() as llm:
    done = llm.generate("The Danube flows", documents=PASSAGES, blend_executor=RareValues, max_tokens=8)
    print(f"{done.text} ({done.usage.blended_recomputed} tokens of passages computed again, by {done.usage.recipe})")
