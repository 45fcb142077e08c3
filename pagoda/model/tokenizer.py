"""Tokenizer: text <-> token ids, and text that grows one token at a time.

A token is a run of bytes, and text is those bytes joined and read as UTF-8. That one idea gives whole decoding,
streaming and the bytes in log-probability reports, and makes them agree, for the two kinds of vocabulary that the
supported models use:

    byte-level     "Ġhé" -> each character stands for one byte
    SentencePiece  "▁he" -> UTF-8 with ▁ for a space; <0xE4> for a lone byte
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagoda.errors import InvalidRequest, ModelError, UnsupportedModel
from pagoda.model.chat import ChatTemplate
from pagoda.model.spec import token_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer, with its chat template and end tokens. Constant and safe to share between threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, chat_template: ChatTemplate | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content.encode() for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        layout = json.loads(backend.to_str())
        self._byte_level, self._strips_space = _kind(layout["decoder"])
        self._byte_fallback = bool(layout["model"].get("byte_fallback", False))
        self._bytes_of: dict[int, bytes] = {}  # of the tokens that were asked for; threads may fill it twice, alike

    @classmethod
    def from_folder(cls, folder: Path, eos_ids: Iterable[int] = ()) -> Tokenizer:
        """Read a Hugging Face folder; `tokenizer.json` is required, the config files and chat template are not.

        `eos_ids` are the model config's; those of the other files are added.

        Raises:
            ModelError: a file is missing or malformed.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing; save the model with a fast tokenizer (save_pretrained writes one)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The Rust library raises bare Exception.
            raise ModelError(f"{path} is truncated or corrupt: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        ids = [*eos_ids, *token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))]
        if "eos_token" in special_tokens:
            eos = backend.token_to_id(special_tokens["eos_token"])
            ids += [] if eos is None else [eos]
        source = _template_source(folder, config)
        template = ChatTemplate(source, special_tokens) if source is not None else None
        return cls(backend, chat_template=template, eos_ids=ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model's logits may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work at all."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Text from `render_chat` already has its special tokens: pass `add_special_tokens=False`.

        Raises:
            InvalidRequest: the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode: {error}") from error
        # `encode` holds the interpreter's lock all the while, so that no step can begin: 5 ms for 2,600 tokens, a
        # quarter of a second for 100,000. This lets go of it, and computes no offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(stream.push, ids)) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id that is no token (padding of the model's vocabulary)."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token alone as text, for reports; use `token_bytes` to join tokens."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is markup (an end token, a role marker) and left out of plain text."""
        return token_id in self._special

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses these messages.
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; use the completions endpoint", param="messages")
        return self._chat_template.render(messages, tools, add_generation_prompt)

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first token's leading space is an artefact of encoding and not part of the text."""
        return self._strips_space


class TextStream:
    """Turns tokens into text as they come, holding back bytes until they form whole characters.

    The pieces joined are exactly `Tokenizer.decode` of all ids. With `continues_text`, the ids continue a text (a
    completion's prompt) and a SentencePiece model's leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_next = tokenizer.strips_leading_space and not continues_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty within a multi-byte character."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if self._strip_next and piece:
            piece = piece.removeprefix(b" ")
            self._strip_next = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """U+FFFD for bytes that no further token can complete, else nothing."""
        return self._utf8.decode(b"", final=True)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty if there is none.

    Raises:
        ModelError: the file is not a JSON object.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is unreadable or not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} is not a JSON object")
    return loaded


def _kind(decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    """(byte-level?, strips the first space?) of a `tokenizer.json` decoder."""
    steps = (decoder or {}).get("decoders", [decoder] if decoder else [])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return False, strips
    raise UnsupportedModel(f"tokenizer decoder {sorted(kinds)} is neither byte-level nor SentencePiece")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        # Several named templates: "default" serves every conversation, tools included where it can.
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + offset): byte for offset, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
