"""A program for vLLM's interpreter: greedy answers of vLLM alone, one prompt at a time. Imports nothing but vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(job: str, answers: str) -> None:
    """Reads model, prompts and number of tokens from the file ``job``, and writes the ids to the file ``answers``."""
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(job).read_text())
    params = SamplingParams(temperature=0.0, max_tokens=asked["count"], ignore_eos=True, detokenize=False)
    llm = LLM(
        model=asked["model"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
    )
    outputs = [llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0] for ids in asked["prompts"]]
    Path(answers).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
