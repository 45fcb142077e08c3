"""The fields of /v1/messages, their types and bounds. Unknown ones are ignored; `_UNSUPPORTED` has those refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pagoda.engine.params import SamplingParams, TierUse
from pagoda.errors import InvalidRequest
from pagoda.server.faults import check_spelling, typed
from pagoda.server.openai.schema import MAX_SALT_CHARS, OWN_FIELDS, Int32, KVPolicyField, StopString, TierOptions
from pagoda.server.passages import BlendOptions

# A known field that would change the answer if it were ignored -> the `type`s of it that ask for nothing special.
_UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "thinking": ("disabled",),
    "tool_choice": ("auto", "none"),
    "mcp_servers": (),
    "container": (),
    "output_config": (),
    "output_format": (),
    "context_management": (),
}
P = TypeVar("P", bound="PromptFields")


class PromptFields(BaseModel):
    """What becomes the prompt: all of /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True)

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    # Beyond Anthropic's.
    cached_content: str | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    blend: BlendOptions | None = None


class MessagesRequest(PromptFields):
    """/v1/messages. SamplingParams checks the ranges it shares with the other endpoints."""

    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: list[StopString] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    # Beyond Anthropic's.
    priority: Int32 = 0
    tiers: TierOptions | None = None
    kv_policy: KVPolicyField | None = None

    def sampling_params(self) -> SamplingParams:
        """The engine's form of these fields.

        Raises:
            InvalidRequest: one is out of range.
        """
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
            tier_use=TierUse() if self.tiers is None else self.tiers.spec,
            kv_policy=self.kv_policy,
        )


def validate(kind: type[P], fields: Mapping[str, Any]) -> P:
    """The typed request in a JSON object.

    Raises:
        InvalidRequest: a field is missing, wrong, or asks for what this server cannot do.
    """
    for name, harmless in _UNSUPPORTED.items():
        value = fields.get(name)
        if value and not (isinstance(value, dict) and value.get("type") in harmless):
            raise InvalidRequest(f"{name}: not supported by this server", param=name)
    check_spelling(fields, kind.model_fields, (name for name in OWN_FIELDS if name in kind.model_fields))
    return typed(kind, fields)
