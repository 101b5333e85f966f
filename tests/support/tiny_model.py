"""A tiny OLMoE on disk with a tokenizer of its own, for real servers: every id is the word ``w<id>``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.live.tiny import TINY_OLMOE

#: Arguments that make ``vllm serve`` start it quickly on a CPU.
VLLM_ARGUMENTS = (
    *("--load-format", "simmoe-dummy"),
    *("--worker-cls", "simmoe.live.measure.worker.MeasuringWorker"),
    *("--dtype", "float32"),
    *("--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", str(1 << 28)),
    *("--served-model-name", "tiny"),
)

LONG_CONTEXT = ("--max-model-len", "32768")
"""After those above: for answers of ``ENDLESS`` tokens."""

ENDLESS = 30_000
"""Output tokens of a stream that no test reads to its end: minutes of steps."""

_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_tiny_model(folder: Path) -> Path:
    """Write the model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {**TINY_OLMOE, "num_hidden_layers": 6, "max_position_embeddings": 1 << 15}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(TINY_OLMOE["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "pad_token": "w1", "unk_token": "w1",
        "model_max_length": config["max_position_embeddings"], "chat_template": _TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder
