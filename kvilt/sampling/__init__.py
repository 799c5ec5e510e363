"""From logits to tokens: parameters, transforms, counter-based noise and the sampler."""
