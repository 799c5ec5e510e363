"""LLM: text in, text out, over one executor. The facade most people start with.

The one room whose `__init__` has names: `from kvilt.llm import ...` is what everybody above writes.
"""

from .build import load as load
from .build import run_config as run_config
from .completion import Completion as Completion
from .completion import FinishReason as FinishReason
from .completion import Stream as Stream
from .completion import Timing as Timing
from .completion import Usage as Usage
from .facade import LLM as LLM
from .model import Message as Message
from .model import Prompt as Prompt
