"""Safetensors folders: shards, identity, and everything that can be wrong with them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda.errors import ConfigError, ModelError, ModelNotFound, UnsupportedModel, WeightsError
from pagoda.files import content_hash
from pagoda.kernels import CompactMatrix, Int8Matrix
from pagoda.model import loader
from pagoda.model.loader import load_model
from pagoda.model.weights import SafetensorsFolder, weights_identity
from tests.model import tokenizers_made_here as made
from tests.model.models import as_saved, build, load, reference_logits, save
from tests.model.paged import PagedRun

pytestmark = pytest.mark.usefixtures("cache")
TOKENIZER = made.byte_level()
VOCAB = TOKENIZER.get_vocab_size() + 3


@pytest.fixture
def folder(tmp_path):
    save(build("llama", vocab_size=VOCAB), tmp_path)
    return made.save(TOKENIZER, tmp_path)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def test_load_model_from_a_folder(folder):
    steps = []
    model = load_model(str(folder), progress=lambda what, done, total: steps.append((what, done, total)))
    ids = model.tokenizer.encode("The tide turns.")
    expected = reference_logits(build("llama", vocab_size=VOCAB), ids)
    assert (PagedRun(model.decoder).chunked(ids, [3, 1]) - expected).abs().max() < 1e-3
    assert model.spec.eos_ids == (2,)
    assert model.tokenizer.eos_ids == (2, TOKENIZER.token_to_id("<|end|>"))
    assert model.decoder.dtype == torch.float32
    total = len(load_file(folder / "model.safetensors"))
    assert steps[-1] == ("hashing model.safetensors", *[(folder / "model.safetensors").stat().st_size] * 2)
    assert ("loading weights", total, total) in steps


@pytest.mark.parametrize(
    ("saved", "asked", "used"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float16", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(folder, saved, asked, used):
    save(build("llama", vocab_size=VOCAB).to(getattr(torch, saved)), folder)
    assert load_model(str(folder), dtype=asked).decoder.dtype == used


def test_settings_out_of_range(folder):
    with pytest.raises(ConfigError, match="dtype must be auto, float32 or bfloat16"):
        load_model(str(folder), dtype="int8")
    assert load_model(str(folder), max_model_len=32).spec.max_context == 32
    with pytest.raises(ConfigError, match=r"`--weights` .* must be full or int8"):
        load_model(str(folder), weights_format="int4")
    for length in (0, 129):
        with pytest.raises(ConfigError, match="between 1 and the model's 128"):
            load_model(str(folder), max_model_len=length)


def test_shards_give_the_same_model(tmp_path):
    model = build("qwen2")
    whole = load(save(model, tmp_path / "whole"))
    sharded_folder = save(model, tmp_path / "sharded", max_shard_size="30KB")
    sharded = load(sharded_folder)
    assert len(SafetensorsFolder(sharded_folder).files) > 2
    for mine, other in zip(whole.weights.layers, sharded.weights.layers, strict=True):
        assert torch.equal(mine.qkv, other.qkv)
        assert torch.equal(mine.qkv_bias, other.qkv_bias)
        assert torch.equal(mine.gate_up, other.gate_up)
    assert torch.equal(whole.weights.lm_head, sharded.weights.lm_head)


def test_tensors_start_at_cache_lines(tmp_path):
    tensors = {f"t{i}": torch.randn(i, 3) for i in range(1, 9)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    for name, tensor in tensors.items():
        read = folder.read(name, tuple(tensor.shape))
        assert read.data_ptr() % 64 == 0
        assert torch.equal(read, tensor)


def test_tied_embeddings_share_memory(tmp_path):
    weights = load(save(build("qwen3"), tmp_path)).weights
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize("variant", ["llama-biased-tied", "qwen3-mixed-windows", "gemma2"])
def test_int8(tmp_path, variant):
    save(build(variant, vocab_size=VOCAB).bfloat16(), tmp_path)
    made.save(TOKENIZER, tmp_path)
    full, int8 = load_model(str(tmp_path)), load_model(str(tmp_path), weights_format="int8")
    assert int8.weights_identity != full.weights_identity
    assert int8.weights_identity == load_model(str(tmp_path), weights_format="int8").weights_identity
    assert int8.decoder.dtype == torch.bfloat16
    weights, originals = int8.decoder.weights, full.decoder.weights
    assert (weights.lm_head is weights.embedding) == int8.spec.tie_embeddings
    for layer, original in zip((weights, *weights.layers), (originals, *originals.layers), strict=True):
        for name in type(layer).__slots__:
            mine, theirs = getattr(layer, name), getattr(original, name)
            if isinstance(mine, Int8Matrix):
                saved = as_saved(theirs)
                assert torch.equal(mine.codes, Int8Matrix.quantize(saved).codes)
                assert 0.5 * saved.nbytes < mine.nbytes < 0.6 * saved.nbytes
            elif isinstance(mine, torch.Tensor):
                assert torch.equal(mine, theirs)
                assert mine.dim() == 1
    ids = list(range(3, 40))
    logits, exact = (PagedRun(model.decoder).chunked(ids, [20, 1]) for model in (int8, full))
    assert 0 < (logits - exact).std() < 0.1 * exact.std()


def test_what_a_model_is_does_not_depend_on_how_the_kernels_want_it(tmp_path, monkeypatch):
    sizes = {"vocab_size": VOCAB + -VOCAB % 16, "hidden_size": 192, "intermediate_size": 64}  # whole tiles
    save(build("llama", **sizes).bfloat16(), tmp_path)
    made.save(TOKENIZER, tmp_path)
    models = []
    for compacts in (False, True):
        monkeypatch.setattr(loader, "has_matrix_tiles", lambda compacts=compacts: compacts)
        models.append(load_model(str(tmp_path)))
    plain, compact = models
    assert plain.weights_identity == compact.weights_identity
    assert isinstance(compact.decoder.weights.lm_head, CompactMatrix)
    assert torch.equal(as_saved(compact.decoder.weights.lm_head), plain.decoder.weights.lm_head)
    ids = list(range(3, 40))
    logits, same = (PagedRun(model.decoder).chunked(ids, [20, 1]) for model in models)
    torch.testing.assert_close(logits, same, rtol=0.02, atol=0.02 * float(same.std()))


def test_weights_that_are_not_finite_are_not_quantized(folder):
    def spoil(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan

    edit_tensors(folder, spoil)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: .* not finite"):
        load_model(str(folder), weights_format="int8")


def test_identity_follows_the_content(folder):
    def identity():
        return weights_identity(SafetensorsFolder(folder))

    first = identity()
    assert identity() == first
    assert len(first) == 64
    edit_config(folder, rms_norm_eps=1e-4)
    second = identity()
    assert second != first

    def nudge(tensors):
        tensors["model.norm.weight"][0] += 1

    edit_tensors(folder, nudge)
    assert identity() not in (first, second)


def test_hashes_are_remembered_until_the_file_changes(tmp_path, cache, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    first = content_hash(file)
    monkeypatch.setattr("pagoda.files._hash_file", lambda *_: pytest.fail("hashed again"))
    assert content_hash(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("PAGODA_CACHE", str(cache))
    file.write_bytes(b"other")
    assert content_hash(file) != first
    (record,) = (cache / "hashes").iterdir()
    record.write_text("not json")
    assert content_hash(file) != first
    with pytest.raises(WeightsError, match="cannot read"):
        content_hash(tmp_path / "none")


def test_an_unwritable_cache_only_costs_time(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("PAGODA_CACHE", str(blocked))
    assert len(content_hash(blocked)) == 64


def truncate(path, share=0.5):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_truncated_weights(folder, share):
    truncate(folder / "model.safetensors", share)
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt"):
        load_model(str(folder))


def test_garbage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x02}q\x00." * 100)
    with pytest.raises(WeightsError, match="truncated or corrupt"):
        load_model(str(folder))


def test_a_missing_shard(folder):
    save(build("llama", vocab_size=VOCAB), folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink()
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(WeightsError, match=f"{victim.name} is missing"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ('{"weight_map": 3}', "names shards"),
        ('{"metadata": {}}', "not a safetensors index"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "own folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "own folder"),
        ('{"weight_map": {"no.such": "model.safetensors"}}', "does not hold it"),
    ],
)
def test_a_bad_index(folder, index, message):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=message):
        load_model(str(folder))


def test_a_wrong_shape(folder):
    edit_config(folder, intermediate_size=53)
    with pytest.raises(
        WeightsError, match=r"mlp\.gate_proj\.weight has shape \[52, 42\], the config calls for \[53, 42\]"
    ):
        load_model(str(folder))


def test_a_missing_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.o_proj.weight"))
    with pytest.raises(WeightsError, match=r"no tensor 'model\.layers\.1\.self_attn\.o_proj\.weight'"):
        load_model(str(folder))


def test_a_tensor_nobody_asked_for(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(84)}))
    with pytest.raises(WeightsError, match=r"1 tensors that the config does not call for: .*q_proj\.bias"):
        load_model(str(folder))


def test_recomputed_buffers_are_no_surprise(folder):
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(7)}))
    load_model(str(folder))


def test_integer_weights(folder):
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(42, dtype=torch.int8)}))
    with pytest.raises(WeightsError, match="not floating-point"):
        load_model(str(folder))


def test_pickles_are_never_opened(folder):
    (folder / "model.safetensors").unlink()
    pickle = folder / "pytorch_model.bin"
    pickle.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    for name in (folder, pickle):
        with pytest.raises(WeightsError, match="may run code"):
            load_model(str(name))
    pickle.unlink()
    with pytest.raises(WeightsError, match="holds neither"):
        load_model(str(folder))


def test_a_folder_without_config(tmp_path):
    with pytest.raises(WeightsError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_a_truncated_config(folder):
    truncate(folder / "config.json")
    with pytest.raises(ModelError, match="not JSON"):
        load_model(str(folder))


def test_an_unsupported_architecture(folder):
    edit_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["nowhere/at/all", "no-such-model", "missing.gguf", ""])
def test_unknown_names(name):
    with pytest.raises((ModelNotFound, WeightsError)) as caught:
        load_model(name)
    assert "named" in str(caught.value) or "config.json" in str(caught.value)
