"""A program for a Python with PEFT: writes random LoRA adapters of a model, and the greedy answers that PEFT gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def main(peft: str, job: str, answers: str) -> None:
    """Reads the model, the adapters' folder, names and rank, a prompt and a number of tokens from the file ``job``.

    Writes an object to the file ``answers``: the tokens of each adapter by its name, and those of the base by "". PEFT
    is in the folder ``peft``.
    """
    sys.path.insert(0, peft)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    asked = json.loads(Path(job).read_text())
    first, *others = asked["names"]
    rank = asked["rank"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    model = get_peft_model(base, config, adapter_name=first).eval()
    for name in others:
        model.add_adapter(name, config)
    torch.manual_seed(0)
    for name, weights in model.named_parameters():
        if "lora_" in name:  # PEFT begins with zeros in one of the two matrices
            torch.nn.init.normal_(weights, std=0.25)
    model.save_pretrained(asked["folder"])

    def answer() -> list[int]:
        tokens = list(asked["prompt"])
        with torch.inference_mode():
            for _ in range(asked["count"]):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(asked["prompt"]) :]

    found = {}
    with model.disable_adapter():
        found[""] = answer()
    for name in asked["names"]:
        model.set_adapter(name)
        found[name] = answer()
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
