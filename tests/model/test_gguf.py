"""GGUF files: converted weights and tokenizers equal their originals; broken files are named as such."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from pagoda.errors import ModelError, UnsupportedModel, WeightsError
from pagoda.model import gguf as converter
from pagoda.model.loader import load_model
from pagoda.model.spec import ModelSpec
from tests.model import tokenizers_made_here as made
from tests.model.gguf_made_here import write
from tests.model.models import GEMMA3_ROPE, LLAMA3_ROPE, as_saved, build, reference_logits
from tests.model.paged import PagedRun

pytestmark = pytest.mark.usefixtures("cache")
TOKENIZER = made.byte_level()
VOCAB = TOKENIZER.get_vocab_size() + 3
TEXT = "The harbour master counts 1234 boats: 港の船 🚤"
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def small(variant: str, **changes):
    return build(variant, **{**SIZES, "num_key_value_heads": 2, **changes})


@pytest.fixture(scope="module")
def llama():
    return small("llama")


def logits(loaded, ids):
    return PagedRun(loaded.decoder).chunked(ids, [9, 1])


@pytest.mark.parametrize("variant", ["llama", "llama-biased-tied", "qwen2", "qwen3"])
def test_float_gguf_equals_the_model_it_was_made_from(variant, tmp_path):
    model = small(variant)
    loaded = load_model(str(write(tmp_path / "m.gguf", model, TOKENIZER)), dtype="float32")
    assert loaded.spec.tie_embeddings == model.config.tie_word_embeddings
    ids = loaded.tokenizer.encode(TEXT)
    assert (logits(loaded, ids) - reference_logits(model, ids)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("variant", "metadata"),
    [
        ("gemma2", {"sliding_window": 11, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
        ("gemma3", {"sliding_window": 8}),
        (
            "gemma3-scaled",
            {
                "sliding_window": 8,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 2.0,
                "rope.freq_base_swa": 100.0,
            },
        ),
    ],
)
def test_gemma_gguf_equals_the_model_it_was_made_from(variant, metadata, tmp_path):
    name, _, scaled = variant.partition("-")
    changes = {"rope_parameters": GEMMA3_ROPE} if scaled else {}
    model = small(name, query_pre_attn_scalar=SIZES["head_dim"], **changes)
    names = {"sliding_window": "attention.sliding_window"}
    keyed = {f"{name}.{names.get(key, key)}": value for key, value in metadata.items()}
    folder = converter.convert_gguf(write(tmp_path / "m.gguf", model, TOKENIZER, metadata=keyed), torch.float32)
    loaded = load_model(str(folder))
    assert loaded.spec.windows == ModelSpec.from_hf_config(model.config.to_dict() | {"architectures": None}).windows
    ids = loaded.tokenizer.encode(TEXT)
    assert (logits(loaded, ids) - reference_logits(model, ids)).abs().max() < 1e-3
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert (reference_logits(again, ids) - reference_logits(model, ids)).abs().max() < 1e-3


def test_the_largest_gemmas_scale_queries_by_the_width_of_the_model():
    def config(kind, layers, heads):
        sizes = {"block_count": layers, "embedding_length": 5376, "feed_forward_length": 8, "context_length": 64}
        attention = {"attention.head_count": heads, "attention.key_length": 128, "attention.value_length": 128}
        metadata = {"attention.layer_norm_rms_epsilon": 1e-6, **sizes, **attention}
        keyed = {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in metadata.items()}
        embedding = SimpleNamespace(shape=(5376, 1000))
        return converter.hf_config(keyed, {"token_embd.weight": embedding})

    assert config("gemma3", 62, 32)["query_pre_attn_scalar"] == 168
    assert config("gemma3", 48, 16)["query_pre_attn_scalar"] == 128
    assert config("gemma2", 46, 32)["query_pre_attn_scalar"] == 168
    assert config("gemma2", 46, 32)["sliding_window"] == 4096


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0], ids=lambda kind: kind.name)
def test_quantized_gguf_equals_its_dequantized_weights(kind, llama, tmp_path):
    loaded = load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER, kind=kind)), dtype="float32")
    rounded = small("llama")
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                values = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(values))
    ids = loaded.tokenizer.encode(TEXT)
    assert (logits(loaded, ids) - reference_logits(rounded, ids)).abs().max() < 1e-3
    assert (logits(loaded, ids) - reference_logits(llama, ids)).abs().max() > 1e-4, "quantization does round"


def test_stretched_context(tmp_path):
    """Llama 3.1's rope, stored as one divisor per frequency."""
    model = small("llama-rope-llama3")
    plain = small("llama", rope_parameters={"rope_type": "default", "rope_theta": LLAMA3_ROPE["rope_theta"]})
    inverse = [m.model.rotary_emb.inv_freq for m in (plain, model)]
    factors = (inverse[0] / inverse[1]).tolist()
    loaded = load_model(str(write(tmp_path / "m.gguf", model, TOKENIZER, rope_factors=factors)), dtype="float32")
    ids = list(range(100))
    assert (logits(loaded, ids) - reference_logits(model, ids)).abs().max() < 1e-3
    assert loaded.spec.ropes[0].kind == "factors"


@pytest.mark.parametrize(
    ("kind", "factor", "extra"),
    [("linear", 2.5, {}), ("yarn", 4.0, {"llama.rope.scaling.original_context_length": 32})],
)
def test_rope_scaling_metadata(kind, factor, extra, llama, tmp_path):
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": factor, **extra}
    spec = load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER, metadata=metadata))).spec
    assert (spec.ropes[0].kind, spec.ropes[0].factor) == (kind, factor)


def test_a_sliding_window_in_the_metadata(llama, tmp_path):
    metadata = {"llama.attention.sliding_window": 9}
    loaded = load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER, metadata=metadata)), dtype="float32")
    assert loaded.spec.windows == (9, 9, 9)
    mistral = small("mistral-window", sliding_window=9)
    mistral.load_state_dict(llama.state_dict())
    ids = list(range(40))
    assert (logits(loaded, ids) - reference_logits(mistral, ids)).abs().max() < 1e-3


def test_byte_level_tokenizer(llama, tmp_path):
    tokenizer = load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER))).tokenizer
    for text in [*made.CORPUS, TEXT, "<|user|>x<think> «段»"]:
        assert tokenizer.encode(text) == TOKENIZER.encode(text).ids
    assert tokenizer.eos_ids == (TOKENIZER.token_to_id("<|end|>"),)
    assert tokenizer.is_special(TOKENIZER.token_to_id("<|bot|>"))
    assert not tokenizer.is_special(TOKENIZER.token_to_id("<think>"))
    assert tokenizer.render_chat([{"content": "x"}]) == "<|user|>x<|end|>"


def test_sentencepiece_tokenizer(tmp_path):
    backend = made.sentencepiece()
    model = small("llama", vocab_size=backend.get_vocab_size())
    tokenizer = load_model(str(write(tmp_path / "m.gguf", model, backend))).tokenizer
    for text in [*made.CORPUS, "turn the tide", "🚤 x"]:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "ĠBOATS", "'", "LL", "Ċ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠBOATS", "'", "LL", "Ċ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "ĠBOATS", "'LL", "Ċ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠBOATS", "'LL", "Ċ"]),
    ],
)
def test_text_is_split_as_the_named_pre_tokenizer_does(pre, pieces, llama, tmp_path):
    folder = converter.convert_gguf(write(tmp_path / "m.gguf", llama, TOKENIZER, pre=pre), torch.float32)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("It's 12345 BOATS'LL\n")]
    assert found == pieces


def test_the_second_start_reads_only_the_cache(llama, tmp_path, cache, monkeypatch):
    path = write(tmp_path / "m.gguf", llama, TOKENIZER)
    first = load_model(str(path))
    (folder,) = (cache / "models").iterdir()
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }
    monkeypatch.setattr(converter.gguf, "GGUFReader", lambda *_: pytest.fail("read again"))
    moved = tmp_path / "renamed.gguf"
    path.rename(moved)
    second = load_model(str(moved))
    assert second.weights_identity == first.weights_identity
    assert torch.equal(as_saved(second.decoder.weights.lm_head), as_saved(first.decoder.weights.lm_head))


def test_identity_follows_the_content(llama, tmp_path):
    a = load_model(str(write(tmp_path / "a.gguf", llama, TOKENIZER)))
    b = load_model(str(write(tmp_path / "b.gguf", build("llama", seed=1, **SIZES, num_key_value_heads=2), TOKENIZER)))
    assert a.weights_identity != b.weights_identity
    in_bfloat16 = load_model(str(tmp_path / "a.gguf"), dtype="bfloat16")
    assert in_bfloat16.decoder.dtype == torch.bfloat16
    assert in_bfloat16.weights_identity == a.weights_identity, "the dtype enters the fingerprint on its own"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.99])
def test_truncated_files(share, llama, tmp_path, cache):
    path = write(tmp_path / "m.gguf", llama, TOKENIZER)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(WeightsError, match="truncated or not a GGUF"):
        load_model(str(path))
    assert not (cache / "models").exists()


def test_a_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(WeightsError, match="not a GGUF file"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"split.count": 2}, "split over several files"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_unsupported_variants(metadata, message, llama, tmp_path):
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER, metadata=metadata)))


def test_unsupported_pre_tokenizers_are_not_guessed(llama, tmp_path):
    with pytest.raises(UnsupportedModel, match="'tekken' is not supported; supported are gpt-2"):
        load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER, pre="tekken")))


def test_metadata_checks():
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported; supported are llama, qwen2, qwen3"):
        converter.hf_config({"general.architecture": "mamba"}, {})
    with pytest.raises(WeightsError, match=r"lacks llama\.attention\.head_count"):
        converter.hf_config({"general.architecture": "llama"}, {})
    sizes = {"llama.attention.head_count": 4, "llama.embedding_length": 64, "llama.rope.dimension_count": 8}
    with pytest.raises(UnsupportedModel, match="rotated in part"):
        converter.hf_config({"general.architecture": "llama", **sizes}, {})
    del sizes["llama.rope.dimension_count"]
    with pytest.raises(WeightsError, match="no token_embd"):
        converter.hf_config({"general.architecture": "llama", **sizes}, {})


def test_a_tensor_without_a_place(llama, tmp_path):
    path = write(tmp_path / "m.gguf", llama, TOKENIZER)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.2.ffn_up.weight", b"blk.2.ffn_xx.weight"))
    with pytest.raises(UnsupportedModel, match=r"blk\.2\.ffn_xx\.weight"):
        load_model(str(path))


def test_an_unwritable_cache_is_named(llama, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("PAGODA_CACHE", str(blocked))
    with pytest.raises(WeightsError, match="PAGODA_CACHE"):
        load_model(str(write(tmp_path / "m.gguf", llama, TOKENIZER)))


def test_the_converted_folder_is_a_hugging_face_model(llama, tmp_path):
    folder = converter.convert_gguf(write(tmp_path / "m.gguf", llama, TOKENIZER), torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(again.lm_head.weight, llama.lm_head.weight)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"


def test_a_converted_folder_says_what_its_weights_are(llama, tmp_path):
    folder = converter.convert_gguf(write(tmp_path / "m.gguf", llama, TOKENIZER), torch.bfloat16)
    assert load_model(str(folder)).decoder.dtype == torch.bfloat16


def test_damaged_files_never_fail_in_an_unnamed_way(llama, tmp_path, cache):
    """Whatever bytes of the header change, the file loads or is refused with a reason."""
    path = write(tmp_path / "m.gguf", llama, TOKENIZER)
    data = path.read_bytes()
    header = data.find(b"output_norm.weight")
    reasons = []
    for seed in range(30):
        random = np.random.default_rng(seed)
        damaged = bytearray(data)
        for position in random.integers(0, header, size=3):
            damaged[position] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load_model(str(path))
        except ModelError as error:
            reasons.append(str(error))
        shutil.rmtree(cache / "models", ignore_errors=True)
    assert len(reasons) > 10
    assert all(len(reason) > 20 for reason in reasons)
