"""`pagoda generate`: answers to prompts, offline, in one batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pagoda.cli import options
from pagoda.engine.outputs import Completion, Usage
from pagoda.engine.params import SamplingParams

_MOST_AT_ONCE = 64


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue, computed together.")],
    model: Annotated[
        str, typer.Option(help="smollm2, a Hugging Face folder or hub id, or a GGUF file.")
    ] = options.DEFAULT_MODEL,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with token counts.")] = False,
    kv_memory: options.KvMemory = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = "auto",
    kv_format: options.KvFormat = "auto",
    weights: options.WeightsFormat = "full",
) -> None:
    """Continue each PROMPT."""
    params = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    engine = options.load_engine(
        model,
        kv_memory=kv_memory,
        max_model_len=max_model_len,
        max_num_seqs=min(len(prompts) * n, _MOST_AT_ONCE),  # no memory for more than there are
        dtype=dtype,
        kv_format=kv_format,
        weights_format=weights,
    )
    for prompt, result in zip(prompts, engine.generate(prompts, params, progress=True), strict=True):
        if as_json:
            print(json.dumps(_record(prompt, result.completions, result.usage), ensure_ascii=False))
        else:
            for completion in result.completions:
                print(prompt + completion.text)


def _record(prompt: str, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_hit_tokens": usage.num_hit_tokens,
        "num_output_tokens": usage.num_output_tokens,
    }
