"""LLM: text in, text out, over one executor. The facade most people start with.

The one room whose `__init__` has names: `from kvilt.llm import ...` is what everybody above writes.
"""

from .async_llm import AsyncLLM as AsyncLLM
from .async_stream import AsyncStream as AsyncStream
from .blend import Documents as Documents
from .build import load as load
from .build import load_async as load_async
from .build import run_config as run_config
from .completion import Completion as Completion
from .completion import FinishReason as FinishReason
from .completion import Piece as Piece
from .completion import Stream as Stream
from .completion import Timing as Timing
from .completion import Usage as Usage
from .facade import LLM as LLM
from .model import Message as Message
from .model import Prompt as Prompt
from .outlet import Delta as Delta
from .outlet import Reading as Reading
from .warm import Warmed as Warmed
