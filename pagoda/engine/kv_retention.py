"""KVRetention: how long a request's prompt and answer are worth keeping, as TensorRT-LLM's KvCacheRetentionConfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagoda.errors import InvalidRequest
from pagoda.kv.directives import Directive as Directive

MAX_RANGES = 64


@dataclass(frozen=True, slots=True)
class KVRetention:
    """Priorities for ranges of the prompt, and one for what is generated.

    Attributes:
        ranges: in order; `stop` None is the prompt's end. Tokens in none have the default priority, 35.
        decode_priority: of the output; None is the default.
        decode_duration_s: how long the output has it; None is for good.

    Raises:
        InvalidRequest: ranges overlap or are too many, or a duration has no priority.
    """

    ranges: tuple[Directive, ...] = ()
    decode_priority: int | None = None
    decode_duration_s: float | None = None

    def __post_init__(self) -> None:
        def refuse(message: str) -> None:
            raise InvalidRequest(message, param="kv_retention")

        object.__setattr__(self, "ranges", tuple(self.ranges))
        if not all(isinstance(each, Directive) for each in self.ranges):
            refuse(f"ranges are Directives, got {self.ranges!r}")
        if len(self.ranges) > MAX_RANGES:
            refuse(f"there may be {MAX_RANGES} ranges, got {len(self.ranges)}")
        for before, after in zip(self.ranges, self.ranges[1:], strict=False):
            if before.stop is None or before.stop > after.start:
                refuse(f"ranges must follow one another: one ends at {before.stop}, the next starts at {after.start}")
        if self.decode_priority is None and self.decode_duration_s is not None:
            refuse("a decode duration needs a decode priority")
        self.directives(1)  # whatever the prompt, its values must be in range

    def directives(self, num_prompt_tokens: int) -> Sequence[Directive]:
        """What it says of the whole sequence: prompt and output."""
        within = [each for each in self.ranges if each.start < num_prompt_tokens]
        ends = [min(num_prompt_tokens, num_prompt_tokens if each.stop is None else each.stop) for each in within]
        found = [replace(each, stop=end) for each, end in zip(within, ends, strict=True)]
        if self.decode_priority is not None:
            found.append(Directive(num_prompt_tokens, None, self.decode_priority, self.decode_duration_s))
        return found
