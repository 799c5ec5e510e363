"""CacheBlend: reuse the KV of a text anywhere in a prompt, and compute again what depends most on what is before it.

Returns rows and never calls `run`. The names here are the public interfaces, on plain tensors.
"""

from .interfaces import BlendExecutor as BlendExecutor
from .interfaces import BlendOutput as BlendOutput
from .interfaces import BlendRetriever as BlendRetriever
from .interfaces import BlendRetrieverResult as BlendRetrieverResult
from .interfaces import BlendRetrieverTask as BlendRetrieverTask
from .key_rotation import KeyRotation as KeyRotation
from .key_rotation import key_rotations as key_rotations
from .recipe import Recipe as Recipe
from .retriever import StoreRetriever as StoreRetriever
from .selective import SelectiveBlend as SelectiveBlend
