"""Where renderings of conversations part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.errors import InvalidRequest
from pagoda.server.backend import Tokenizer


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def stable_tokens(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, tokenizer: Tokenizer
) -> list[int]:
    """The tokens that all conversations beginning with these messages share, whoever speaks next.

    Raises:
        InvalidRequest: the model's template refuses them.
    """
    renderings: list[list[int]] = []
    refusal: InvalidRequest | None = None
    for speakers in ((), ("user",), ("assistant",)):
        whole = [*messages, *({"role": role, "content": "?"} for role in speakers)]
        try:
            text = tokenizer.render_chat(whole, tools, False)
        except InvalidRequest as error:  # many templates want roles to alternate, or a user
            refusal = error
        else:
            renderings.append(tokenizer.encode(text, add_special_tokens=False))
    if not renderings:
        raise refusal or InvalidRequest("the chat template takes no such messages", param="messages")
    first = renderings[0]
    return first[: min(common_length(first, other) for other in renderings)]
