"""Loading of an exported model as users of transformers do, in a process of its own.

``peer.exporting`` runs this file with a request as JSON on standard input, and reads the answer from the last line of
standard output. The file imports nothing of p2ptrain, whose own settings of transformers could hide a fault.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TypedDict


class Request(TypedDict):
    """What to load, and what to compute with it."""

    folder: str  # with the files of ``save_pretrained``
    texts: list[str]
    rows: list[list[int]]  # token ids; at least two a row
    messages: list[dict[str, str]]  # a dialogue for the chat template; empty: there is none


class Answer(TypedDict):
    """What the loaded tokenizer and model compute."""

    ids: list[list[int]]  # of each text
    trusting_ids: list[list[int]]  # the same, loaded with trust_remote_code=True
    prompt_ids: list[int]  # of the dialogue and the beginning of an answer
    loss: float  # mean cross entropy of all predicted tokens of the rows, in nats


def answer(request: Request) -> Answer:
    """Load model and tokenizer as docs/MODELS.md does; return ids and loss. Raises what transformers raises."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids, trusting_ids = (
        [tokenizer(text)["input_ids"] for text in request["texts"]]
        for tokenizer in (
            AutoTokenizer.from_pretrained(request["folder"]),
            AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=True),
        )
    )
    prompt_ids: list[int] = []
    if messages := request["messages"]:
        tokenizer = AutoTokenizer.from_pretrained(request["folder"])
        ids_of: Any = tokenizer.apply_chat_template
        prompt_ids = ids_of(messages, add_generation_prompt=True, return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(request["folder"])
    total, count = 0.0, 0
    with torch.no_grad():
        for row in request["rows"]:
            inputs = torch.tensor([row])
            logits = model(input_ids=inputs[:, :-1]).logits[0]  # [T, V]
            total += float(torch.nn.functional.cross_entropy(logits.float(), inputs[0, 1:], reduction="sum"))
            count += len(row) - 1
    return {"ids": ids, "trusting_ids": trusting_ids, "prompt_ids": prompt_ids, "loss": total / count}


if __name__ == "__main__":
    computed = answer(json.load(sys.stdin))
    sys.stdout.write("\n" + json.dumps(computed))
