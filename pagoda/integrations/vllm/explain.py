"""Why a prompt was not all there, in a word, a sentence and numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pagoda.integrations.vllm.messages import Answer
from pagoda.kv.observe import MissReason

_SENTENCES = {
    MissReason.NONE: "all whole blocks were there",
    MissReason.RESTORE_FAILED: "a tier had the next block and could not give it",
    MissReason.RESTORE_SLOWER: "a tier was out, or computing the next block was faster than loading it",
    MissReason.EVICTED: "the next block was written here once, and no tier has it any more, or not yet",
    MissReason.NEVER_SEEN: "nobody computed the next block before, under this cache_salt, adapter and model",
}


@dataclass(frozen=True, slots=True)
class Told:
    """Where a prompt's whole blocks came from, and why the first that was computed was not there."""

    num_whole: int
    num_local: int
    sources: tuple[str, ...]
    reason: MissReason

    @property
    def num_missed(self) -> int:
        """Blocks that were computed."""
        return self.num_whole - self.num_local - len(self.sources)

    def params(self, block_size: int) -> dict[str, Any]:
        """In tokens, for the client."""
        told: dict[str, Any] = {
            "num_local_tokens": self.num_local * block_size,
            "num_restored_tokens": len(self.sources) * block_size,
            "restored_from": {tier: count * block_size for tier, count in Counter(self.sources).items()},
            "miss": str(self.reason),
        }
        if self.num_missed:
            told["missed_at"] = (self.num_local + len(self.sources)) * block_size
        return told

    def sentence(self, block_size: int) -> str:
        """For the log."""
        tiers = ", ".join(f"{count * block_size} from {tier}" for tier, count in Counter(self.sources).items())
        return (
            f"{self.num_local * block_size} tokens from vLLM's own cache, {tiers or 'none from tiers'}, "
            f"{self.num_missed * block_size} in whole blocks computed: {_SENTENCES[self.reason]}"
        )


def explain(
    num_whole: int, num_local: int, sources: tuple[str, ...], outcome: Answer | None, num_there: int, was_written: bool
) -> Told:
    """Tell a prompt's story; the numbers are blocks.

    Args:
        outcome: how asking the tiers ended.
        num_there: how many of the prompt's first blocks there were, with what vLLM had.
        was_written: whether the first one that was computed had been written once.
    """
    num_local = min(num_local, num_whole)
    sources = sources[: num_whole - num_local]
    if num_local + len(sources) == num_whole:
        reason = MissReason.NONE
    elif outcome is not None and outcome.num_failed:
        reason = MissReason.RESTORE_FAILED
    elif outcome is not None and (outcome.num_slower or outcome.skipped or num_there > num_local + len(sources)):
        reason = MissReason.RESTORE_SLOWER
    else:
        reason = MissReason.EVICTED if was_written else MissReason.NEVER_SEEN
    return Told(num_whole, num_local, sources, reason)
