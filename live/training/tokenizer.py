"""A byte-level BPE of 4,096 pieces trained on the corpus, and text to token ids.

``python -m simmoe.live.training.tokenizer CORPUS TOKENS`` trains it on ``CORPUS/train.txt``, unless ``TOKENS`` holds a
Hugging Face tokeniser already, saves it there and writes ``TOKENS/{train,validation,test}.npy``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.live.training.architecture import CONTEXT_TOKENS, END_OF_TEXT, VOCAB_SIZE
from simmoe.live.training.corpus import DOCUMENT_MARK, SPLITS


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one split, in file order."""
    for document in path.read_text(encoding="utf-8").split(f"{DOCUMENT_MARK}\n"):
        if document:
            yield document


def train_tokenizer(corpus: Path, out: Path, *, vocab_size: int = VOCAB_SIZE, every: int = 4) -> None:
    """Train on every ``every``-th training document (merges settle long before the corpus ends); save to ``out``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = (text for n, text in enumerate(read_documents(corpus / "train.txt")) if n % every == 0)
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
    ).save_pretrained(out)  # fmt: skip


def encode_split(tokenizer: Any, path: Path) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """[num_tokens] uint16: each document after one end-of-text token."""
    texts = list(read_documents(path))
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return np.concatenate([np.array([end, *one.ids], dtype=np.uint16) for one in encoded])


def encode_corpus(corpus: Path, out: Path) -> None:
    """Write every split's tokens to ``out``, by the tokeniser there or by a new one."""
    from transformers import AutoTokenizer

    if not (out / "tokenizer.json").exists():
        train_tokenizer(corpus, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for split in SPLITS:
        np.save(out / f"{split}.npy", encode_split(tokenizer, corpus / f"{split}.txt"))


if __name__ == "__main__":
    encode_corpus(Path(sys.argv[1]), Path(sys.argv[2]))
