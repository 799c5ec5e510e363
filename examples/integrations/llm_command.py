"""`llm`, the command line tool: an entry in extra-openai-models.yaml makes kvilt one of its models."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """\
- model_id: kvilt
  model_name: smollm2
  api_base: {url}/v1
  api_key_name: kvilt
"""

with tempfile.TemporaryDirectory() as folder:  # `dirname "$(llm logs path)"` prints the folder of your own settings
    models = MODELS.format(url=os.environ.get("KVILT_URL", "http://127.0.0.1:8000"))
    Path(folder, "extra-openai-models.yaml").write_text(models)
    settings = os.environ | {"LLM_USER_PATH": folder}
    llm = [sys.executable, "-m", "llm"]
    subprocess.run([*llm, "keys", "set", "kvilt", "--value", "any"], env=settings, check=True)
    asked = ["-m", "kvilt", "-o", "max_tokens", "24", "-o", "temperature", "0", "What is the capital of Germany?"]
    subprocess.run([*llm, *asked], env=settings, check=True, stdin=subprocess.DEVNULL)
