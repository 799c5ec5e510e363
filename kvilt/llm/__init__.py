"""LLM: text in, text out, over one executor. The facade most people start with.

The one package whose `__init__` has names: packages above write `from kvilt.llm import ...`.
"""

from .async_llm import AsyncLLM as AsyncLLM
from .async_stream import AsyncStream as AsyncStream
from .blend import Documents as Documents
from .build import load as load
from .build import load_async as load_async
from .build import run_config as run_config
from .completion import Completion as Completion
from .completion import FinishReason as FinishReason
from .completion import ParsedToolCall as ParsedToolCall
from .completion import Stream as Stream
from .completion import TextPiece as TextPiece
from .completion import Timing as Timing
from .completion import Usage as Usage
from .conversation import Conversation as Conversation
from .embedding import Embedding as Embedding
from .embedding import RankedText as RankedText
from .facade import LLM as LLM
from .model import Message as Message
from .model import Prompt as Prompt
from .token_stream import Delta as Delta
from .token_stream import ReadingProgress as ReadingProgress
from .warmup import StoredDocument as StoredDocument
