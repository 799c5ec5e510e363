"""The weights of a GGUF in the formats of the other runtimes, under ~/.cache/kvilt-bench.

    python bench/peers/convert.py MODEL.gguf [hf] [onnx-int4] [ct2-int8] [openvino-int4]

All start from one Hugging Face checkpoint with the dequantized weights, so that every runtime has the same model. Needs
transformers and gguf; onnxruntime-genai, onnx_ir and onnx; ctranslate2. OpenVINO's exporter (optimum-intel, nncf and
openvino) may want an older transformers: then KVILT_EXPORT_PYTHON is the Python of an environment of its own. What
exists is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.models import converted

KINDS = ("hf", "onnx-int4", "ct2-int8", "openvino-int4")


def to_hf(gguf: Path, target: Path) -> None:
    """float32 beside bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # a model that says it came from a GGUF refuses to be saved
    model = type(read)(type(read.config).from_dict(config))
    model.load_state_dict(read.state_dict())
    for folder, dtype in ((target, torch.float32), (converted(gguf, "hf-bf16"), torch.bfloat16)):
        model.to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def to_onnx(source: Path, target: Path) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
    with tempfile.TemporaryDirectory() as scratch:
        options = ["-p", "int4", "-e", "cpu", "-c", scratch, "--extra_options"]
        subprocess.run([*builder, *options, "int4_accuracy_level=4", "int4_block_size=32"], check=True)


def to_ctranslate2(source: Path, target: Path) -> None:
    import ctranslate2

    ctranslate2.converters.TransformersConverter(str(source)).convert(str(target), quantization="int8")


def to_openvino(source: Path, target: Path) -> None:
    python = os.environ.get("KVILT_EXPORT_PYTHON", sys.executable)  # its exporter may want an older transformers
    exporter = [Path(python).parent / "optimum-cli", "export", "openvino", "--model", source]
    # Groups of 64, because SmolLM2's 576 inputs are no multiple of the usual 128.
    options = ["--task", "text-generation-with-past", "--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"]
    subprocess.run([*exporter, *options, target], check=True)


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit(__doc__)
    gguf, kinds = Path(sys.argv[1]).resolve(), sys.argv[2:] or list(KINDS)
    makers = {"onnx-int4": to_onnx, "ct2-int8": to_ctranslate2, "openvino-int4": to_openvino}
    hf = converted(gguf, "hf")
    if not hf.exists():
        to_hf(gguf, hf)
    for kind in kinds:
        if kind in makers and not (target := converted(gguf, kind)).exists():
            part = target.with_name(target.name + ".part")  # so that half a conversion is never taken for one
            shutil.rmtree(part, ignore_errors=True)
            makers[kind](hf, part)
            part.rename(target)
        print(f"{kind}: {converted(gguf, kind)}")


if __name__ == "__main__":
    main()
