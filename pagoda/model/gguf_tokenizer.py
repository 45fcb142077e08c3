"""The tokenizer inside a GGUF file, written as Hugging Face's `tokenizer.json` and `tokenizer_config.json`.

Two kinds exist. `gpt2` is byte-level BPE with explicit merges, split beforehand by a pattern that `tokenizer.ggml.pre`
names. `llama` is SentencePiece BPE: no merges, but scores, from which the order of merging follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pagoda.errors import UnsupportedModel, WeightsError

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_SPLITTERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), _BYTE_LEVEL]),
    **dict.fromkeys(
        _LLAMA3_NAMES,
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), _BYTE_LEVEL]),
    ),
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """File name -> JSON text of both files.

    Raises:
        UnsupportedModel: another tokenizer kind or an unknown pre-tokenizer: guessing one would silently split text
            wrongly.
        WeightsError: the vocabulary is missing or does not fit its merges.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise WeightsError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF tokenizer {kind!r} is not supported; supported are gpt2 and llama")
    try:
        tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
        _add_special_tokens(tokenizer, metadata, tokens)
        names = {name: _token(metadata, tokens, name) for name in ("bos", "eos", "unknown", "padding")}
        _add_bos_and_eos(tokenizer, metadata, kind, names)
        encoded = tokenizer.to_str()
    except UnsupportedModel:
        raise
    except Exception as error:  # The Rust library raises bare Exception for a vocabulary that does not fit its merges.
        raise WeightsError(f"the tokenizer in the GGUF file is malformed: {error}") from error
    config = {
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "unk_token": names["unknown"],
        "pad_token": names["padding"],
        "chat_template": metadata.get("tokenizer.chat_template"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": encoded,
        "tokenizer_config.json": json.dumps(
            {key: value for key, value in config.items() if value is not None}, indent=2
        ),
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITTERS:
        raise UnsupportedModel(f"GGUF pre-tokenizer {name!r} is not supported; supported are {', '.join(_SPLITTERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=name in _LLAMA3_NAMES))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITTERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    merges: list[tuple[float, int, str, str]] = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, left, right))
    merges.sort(key=lambda merge: merge[:2])
    unknown = _token(metadata, tokens, "unknown")
    ordered = [(left, right) for _, _, left, right in merges]
    tokenizer = Tokenizer(BPE(vocabulary, ordered, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == _USER_DEFINED])


def _add_bos_and_eos(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], kind: str, names: Mapping[str, str | None]
) -> None:
    bos_by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    template, used = ["$A"], []
    if metadata.get("tokenizer.ggml.add_bos_token", bos_by_default) and names["bos"]:
        template.insert(0, names["bos"])
        used.append(names["bos"])
    if metadata.get("tokenizer.ggml.add_eos_token", False) and names["eos"]:
        template.append(names["eos"])
        used.append(names["eos"])
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(name, tokenizer.token_to_id(name)) for name in dict.fromkeys(used)]
        )


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None
