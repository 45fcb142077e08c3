"""Small tokenizers of both kinds, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

CORPUS = [
    "The harbour master counts the boats at dawn, and again when the tide turns.",
    "def turn(tide): return [boat for boat in harbour if boat.counts(tide)]",
    "Gezählt wird auch nachts: für Fischer, Fähren und Gäste. 港の船を数える。 船 🚤 ⛵ 🚤",
] * 4
SPECIAL = ["<|end|>", "<|user|>", "<|bot|>"]
TEMPLATE = (
    "{%- if messages[0].role == 'bot' %}{{ raise_exception('a bot cannot speak first') }}{% endif -%}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("«段»", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<unk>", "<s>", *SPECIAL], limit_alphabet=40, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    model = json.loads(tokenizer.to_str())
    first = len(model["model"]["vocab"])
    model["model"]["vocab"] |= {token: first + index for index, token in enumerate(byte_tokens)}
    tokenizer = Tokenizer.from_str(json.dumps(model))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**defaults, **config}))
    return folder
