"""A made model as somebody publishes it: a tokenizer with special tokens, a chat template, settings of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
ENDOFTEXT, IM_START, IM_END, PAD = range(4)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The cat has 12 hats, the dog has none; they talk about it all the day long. " * 40


def published(folder: Path, names: dict[str, Any], config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    """Write a small Llama.

    Args:
        names: of tokenizer_config.json.
        config: further fields of config.json.
        generation: generation_config.json; None: there is none.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = LlamaConfig(vocab_size=made.get_vocab_size(), max_position_embeddings=64, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(shape).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    written = json.loads((folder / "config.json").read_text())
    fields = {name: value for name, value in written.items() if not name.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    return folder
