"""`model.generate` of transformers as a contender: a left-padded batch that runs until its longest sequence is
complete.
"""

from __future__ import annotations

from typing import Any

import torch

from kvscope_engine.bench.workloads import BenchWorkload

PAD_ID = 0


class TransformersGenerate:
    """Runs a transformers model with its own attention (SDPA) and greedy sampling."""

    name = "transformers"

    def __init__(self, module: Any) -> None:
        self._module = module

    def run(self, workload: BenchWorkload) -> None:
        """Run one padded batch. Every sequence generates as many tokens as the longest output in the workload."""
        width = max(len(prompt) for prompt in workload.prompts)
        ids = torch.full((workload.num_requests, width), PAD_ID)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(workload.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        count = max(workload.output_tokens)
        with torch.inference_mode():
            self._module.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=PAD_ID,
            )


def plain_default_model(dtype: torch.dtype) -> Any:
    """Load the GGUF file of kvscope's default model into an unmodified transformers model with SDPA."""
    from transformers import AutoModelForCausalLM

    from kvscope_engine.model.loader.download.default_model import default_gguf
    from kvscope_engine.model.loader.download.quiet import quiet_gguf

    gguf = default_gguf(lambda progress: None)
    with quiet_gguf(lambda progress: None, gguf.name):
        module = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=dtype)
    module.requires_grad_(False)
    return module
