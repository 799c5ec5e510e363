"""Passages that kvilt has stored, blended into `model.generate` of Hugging Face transformers by a Cache of its own."""

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, DynamicCache

import kvilt
from kvilt.blend import Recipe, SelectiveBlend, key_rotations

PARTS = ["Rivers.\n", "The Rhine flows through Basel.\n" * 3, "The Danube flows through Vienna.\n" * 3, "The Danube"]


class BlendCache(DynamicCache):
    def update(self, keys, values, layer, *args, **kwargs):
        if not self.get_seq_length(layer):  # the prompt; later tokens are appended as always
            out = blend.blend_result(layer, task.result(layer), keys, keys, values, self.at, span, token_dim=2)
            self.at, keys, values = out.positions, out.k, out.v
        return super().update(keys, values, layer, *args, **kwargs)

    def cut(self, _, args, kw):  # before each layer: once tokens are selected, the others go no further
        (cos, sin), at = kw["position_embeddings"], self.at if kw["position_ids"].shape[1] == tokens else slice(None)
        kw |= {"position_embeddings": (cos[:, at], sin[:, at]), "attention_mask": kw["attention_mask"][:, :, at]}
        return (args[0][:, at] if args[0].shape[1] == tokens else args[0],), kw


folder = snapshot_download("HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
with kvilt.load(folder, backend="reference", kv_dtype="float32") as llm:
    llm.warm(PARTS[1:-1])
    segments = [torch.tensor(llm.tokenizer.encode(part, add_special=part is PARTS[0])) for part in PARTS]
    *starts, tokens = torch.tensor([len(one) for one in segments]).cumsum(0).tolist()
    task = llm.retriever().new_request([torch.cat(segments)], [starts])
    blend, cache = SelectiveBlend(key_rotations(llm.executor.spec), 0.2), BlendCache(config=model.config)
    cache.at, span = torch.arange(tokens), torch.tensor([0, tokens])
    hooks = [layer.register_forward_pre_hook(cache.cut, with_kwargs=True) for layer in model.model.layers]
    theirs = model.generate(torch.cat(segments)[None], past_key_values=cache, max_new_tokens=8, do_sample=False)
    print("transformers:", llm.tokenizer.decode(theirs[0, tokens:].tolist()))
    recipe = Recipe(0.2, "deviation", repair=0.0, min_gain=0.0)
    print("kvilt:", llm.blend(PARTS, recipe=recipe, max_tokens=8, temperature=0.0).text)
