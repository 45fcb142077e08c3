"""Stream two answers side by side from one engine.

python examples/streaming.py
"""

import asyncio

from pagoda import AsyncEngine, Engine, SamplingParams


async def tell(engine: AsyncEngine, text: str) -> None:
    prompt = engine.tokenizer.encode(text)
    answer = ""
    async for output in engine.stream(prompt, SamplingParams(max_tokens=32, temperature=0.7, seed=1)):
        answer += "".join(delta.text for delta in output.deltas)
        print(f"{text!r}: {answer[-40:]!r}")


async def main() -> None:
    engine = AsyncEngine(Engine("smollm2"))
    await engine.start()
    await asyncio.gather(tell(engine, "The sea is"), tell(engine, "A lighthouse has"))
    await engine.stop()


asyncio.run(main())
