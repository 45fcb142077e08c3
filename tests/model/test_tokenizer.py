"""Encoding, whole and streamed decoding, and chat templates, for both kinds of vocabulary."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.models import WordPiece

from pagoda.errors import InvalidRequest, ModelError, UnsupportedModel
from pagoda.model.tokenizer import TextStream, Tokenizer
from tests.model import tokenizers_made_here as made

BYTE_LEVEL, SENTENCEPIECE = made.byte_level(), made.sentencepiece()
KINDS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}
TEXTS = [
    "The tide turns at dawn.",
    "  two spaces, then\n\ttabs and a\r\nnewline ",
    "漢字と仮名、🚤👩‍👩‍👧‍👦 naïve Ωmega \u200d end",
    "<|user|>hi<|end|><think>so</think>",
    "\ufffd kept",
    "",
]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param], Tokenizer(KINDS[request.param])


def stream_all(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(kind, text):
    backend, tokenizer = kind
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    if backend is BYTE_LEVEL or "<|" not in text:  # this SentencePiece dialect puts a space after special tokens
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert "".join(stream_all(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=30))
@settings(max_examples=200, deadline=None)
def test_byte_level_decodes_any_ids_as_the_reference_does(ids):
    tokenizer = Tokenizer(BYTE_LEVEL)
    known = [i for i in ids if i < BYTE_LEVEL.get_vocab_size()]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == BYTE_LEVEL.decode(known, skip_special_tokens=skip)


@given(st.text(st.characters(exclude_characters="▁<", exclude_categories=["Cs"])), st.booleans())
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_text(text, use_sentencepiece):
    tokenizer = Tokenizer(SENTENCEPIECE if use_sentencepiece else BYTE_LEVEL)
    pieces = stream_all(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert pieces[-1] == "", "whole text leaves nothing to flush"
    assert text.count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)


@pytest.mark.parametrize("text", ["🚤", "港", "é", "👩‍👩‍👧‍👦"])
def test_no_half_characters(kind, text):
    _, tokenizer = kind
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(ids)):
        stream = TextStream(tokenizer)
        emitted = "".join(map(stream.push, ids[:cut]))
        assert text.startswith(emitted)
        assert "\ufffd" not in emitted


def test_bytes_cut_short_are_flushed_as_replacement():
    tokenizer = Tokenizer(BYTE_LEVEL)
    ids = tokenizer.encode("🚤")
    raw = [BYTE_LEVEL.token_to_id(c) for c in "ðŁ"]  # the first two bytes of most emoji
    assert stream_all(tokenizer, raw) == ["", "", "\ufffd"]
    assert stream_all(tokenizer, [*raw, *tokenizer.encode("a")]) == ["", "", "\ufffda", ""]
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🚤".encode()


def test_sentencepiece_byte_tokens():
    tokenizer = Tokenizer(SENTENCEPIECE)
    ids = [SENTENCEPIECE.token_to_id(f"<0x{byte:02X}>") for byte in "船".encode()]
    assert stream_all(tokenizer, ids) == ["", "", "船", ""]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([b]) for b in "船".encode()]


def test_a_stream_that_continues_text_keeps_its_leading_space():
    tokenizer = Tokenizer(SENTENCEPIECE)
    ids = tokenizer.encode("tide turns", add_special_tokens=False)
    assert "".join(stream_all(tokenizer, ids)) == "tide turns"
    assert "".join(stream_all(tokenizer, ids, continues_text=True)) == " tide turns"


def test_special_tokens():
    tokenizer = Tokenizer(SENTENCEPIECE)
    with_bos = tokenizer.encode("dawn")
    assert with_bos[0] == SENTENCEPIECE.token_to_id("<s>")
    assert tokenizer.is_special(with_bos[0])
    assert tokenizer.decode(with_bos) == "dawn"
    assert tokenizer.token_text(with_bos[0]) == "<s>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 100) == b""


def test_lone_surrogates_are_refused(kind):
    with pytest.raises(InvalidRequest, match="Unicode"):
        kind[1].encode("\ud83d")


def test_folder(tmp_path):
    folder = made.save(BYTE_LEVEL, tmp_path, bos_token={"content": "<|user|>", "lstrip": False})
    bot, user = BYTE_LEVEL.token_to_id("<|bot|>"), BYTE_LEVEL.token_to_id("<|user|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [bot, user]}))
    tokenizer = Tokenizer.from_folder(folder, eos_ids=[user])
    assert tokenizer.eos_ids == (user, bot, BYTE_LEVEL.token_to_id("<|end|>"))
    assert tokenizer.has_chat_template


def test_truncation_and_padding_saved_with_a_tokenizer_are_switched_off(tmp_path):
    backend = made.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(made.save(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode(made.CORPUS[0])) == made.CORPUS[0]


def test_chat(tmp_path):
    tokenizer = Tokenizer.from_folder(made.save(BYTE_LEVEL, tmp_path))
    messages = [{"role": "user", "content": " <b>wie & warum?</b> "}]
    assert tokenizer.render_chat(messages) == "<|user|><b>wie & warum?</b><|end|><|bot|>"
    assert tokenizer.render_chat(messages, add_generation_prompt=False).endswith("<|end|>")
    assert '[{"name": "zähle <x>"}]' in tokenizer.render_chat(messages, tools=[{"name": "zähle <x>"}])
    ids = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert ids[-1] == BYTE_LEVEL.token_to_id("<|bot|>")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "bot", "content": "x"}], "a bot cannot speak first"),
        ([], "no element 0"),
        ([{"role": "user", "content": 3}], "no attribute 'strip'"),
    ],
)
def test_a_refusal_of_the_template_is_the_callers_fault(tmp_path, messages, reason):
    template = made.TEMPLATE.replace("| trim", ".strip()")
    tokenizer = Tokenizer.from_folder(made.save(BYTE_LEVEL, tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match=f"refuses these messages: .*{reason}") as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param == "messages"


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    for attack in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
        "{% include '/etc/passwd' %}",
    ):
        tokenizer = Tokenizer.from_folder(made.save(BYTE_LEVEL, tmp_path, chat_template=attack))
        with pytest.raises(InvalidRequest):
            tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_template_sources(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain{{ bos_token }}"}]
    folder = made.save(BYTE_LEVEL, tmp_path, chat_template=named, bos_token="<|user|>")
    assert Tokenizer.from_folder(folder).render_chat([]) == "plain<|user|>"
    (folder / "chat_template.jinja").write_text("from its own file")
    assert Tokenizer.from_folder(folder).render_chat([]) == "from its own file"


def test_no_template(tmp_path):
    tokenizer = Tokenizer.from_folder(made.save(BYTE_LEVEL, tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_bad_files(tmp_path):
    with pytest.raises(ModelError, match="is missing"):
        Tokenizer.from_folder(tmp_path)
    folder = made.save(BYTE_LEVEL, tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        Tokenizer.from_folder(folder)
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        Tokenizer.from_folder(folder)


def test_another_kind_of_tokenizer_is_refused():
    backend = tokenizers.Tokenizer(WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)
