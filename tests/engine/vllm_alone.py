"""A program for vLLM's interpreter: the greedy answers of vLLM alone, one prompt at a time. Imports vLLM only."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any


def main(job: str, answers: str) -> None:
    """Reads models, prompts and the count of tokens from the file ``job``, and writes the ids to ``answers``."""
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(job).read_text())
    params = SamplingParams(temperature=0.0, max_tokens=asked["count"], ignore_eos=True, detokenize=False)
    found: list[Any] = []
    for model in asked["models"]:
        llm = LLM(
            model=model,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 26,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        del llm
        gc.collect()
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
