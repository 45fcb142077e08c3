"""Ask several questions about one long text: its KV is computed once, for the first question.

python examples/shared_prompt.py
"""

import time

from pagoda import Engine, SamplingParams

RULES = "You are the keeper of a lighthouse. " + "Write down every ship that passes, its flag and its course. " * 60

engine = Engine("smollm2")
for question in ("Who are you?", "What do you write down?", "How many ships passed?"):
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    prompt = engine.tokenizer.encode(engine.tokenizer.render_chat(messages), add_special_tokens=False)
    started = time.perf_counter()
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=24, temperature=0))
    usage = answer.usage
    print(f"{question}\n  {answer.text.strip()!r}")
    print(
        f"  {usage.num_prompt_tokens} prompt tokens, {usage.num_hit_tokens} from the cache, "
        f"{time.perf_counter() - started:.2f} s"
    )
