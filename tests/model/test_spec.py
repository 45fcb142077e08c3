"""config.json -> ModelSpec, and the frequencies of each rotary variant against Transformers'."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagoda.errors import UnsupportedModel
from pagoda.model.rope import RopeSpec
from pagoda.model.spec import ModelSpec, token_ids
from tests.model.models import GEMMA3_ROPE, LINEAR_ROPE, LLAMA3_ROPE, SIZES, YARN_ROPE

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2, 7],
    "torch_dtype": "bfloat16",
    **SIZES,
}


def test_llama_config():
    spec = ModelSpec.from_hf_config(LLAMA)
    assert spec.family == "llama"
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 6, 2, 14)
    assert spec.windows == (None, None, None)
    assert spec.eos_ids == (2, 7)
    assert spec.dtype == "bfloat16"
    assert spec.max_context == 128
    assert spec.ropes[0] == RopeSpec(theta=10000.0)
    options = (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm, spec.tie_embeddings)
    assert not any(options)
    assert hash(spec) == hash(ModelSpec.from_hf_config(dict(LLAMA)))


def test_defaults_that_old_configs_leave_out():
    config = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads", "architectures")}
    spec = ModelSpec.from_hf_config({**config, "model_type": "llama", "hidden_size": 48, "rope_theta": 5e5})
    assert (spec.num_kv_heads, spec.head_dim, spec.ropes[0].theta) == (6, 8, 5e5)


@pytest.mark.parametrize(
    ("architecture", "extra", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}, (16, 16, 16)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False}, (None, None, None)),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 16),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(architecture, extra, windows):
    assert ModelSpec.from_hf_config({**LLAMA, "architectures": [architecture], **extra}).windows == windows


GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
}


def test_gemma3_config():
    spec = ModelSpec.from_hf_config({**GEMMA3, "hidden_activation": "gelu_pytorch_tanh"})
    assert spec.windows == (8, 8, 8, 8, 8, None, 8)
    assert (spec.ropes[0], spec.ropes[5]) == (RopeSpec(1e4), RopeSpec(1e6))
    assert (spec.attention_scale, spec.embedding_scale, spec.norm_offset) == (0.25, 42**0.5, 1.0)
    assert spec.sandwich_norms
    assert spec.qk_norm
    assert spec.tie_embeddings, "Gemma configs leave this default out"
    assert (spec.attention_softcap, spec.logit_softcap, spec.activation) == (None, None, "gelu_tanh")


def test_gemma3_rotates_sliding_layers_by_frequencies_of_their_own():
    old = {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_local_base_freq": 100.0}
    new = {"rope_parameters": GEMMA3_ROPE}
    for spelled in (old, new):
        spec = ModelSpec.from_hf_config({**GEMMA3, **spelled, "sliding_window_pattern": 3})
        assert spec.windows == (8, 8, None, 8, 8, None, 8)
        assert spec.ropes[2] == RopeSpec(5000.0, "linear", 2.0)
        assert spec.ropes[0] == RopeSpec(100.0)


def test_gemma2_config():
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    spec = ModelSpec.from_hf_config({**GEMMA3, "architectures": ["Gemma2ForCausalLM"], **caps})
    assert spec.windows == (8, None, 8, None, 8, None, 8)
    assert (spec.attention_softcap, spec.logit_softcap, spec.qk_norm) == (50.0, 30.0, False)
    assert set(spec.ropes) == {RopeSpec(1e4)}


@pytest.mark.parametrize("change", [{"hidden_activation": "relu"}, {"use_bidirectional_attention": True}])
def test_gemma_variants_that_are_refused(change):
    with pytest.raises(UnsupportedModel, match=r"relu|bidirectional"):
        ModelSpec.from_hf_config({**GEMMA3, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported.*LlamaForCausalLM.*Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"architectures": []}, "None is not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 4}, "cannot share"),
        ({"head_dim": 7}, "even head_dim"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_attention_heads": 0}, "num_heads is 0|ZeroDivisionError"),
        ({"vocab_size": "many"}, "malformed"),
        ({"rope_scaling": {"rope_type": "mystery"}}, "mystery"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"eos_token_id": "</s>"}, "integers"),
    ],
)
def test_refusals_name_the_reason(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        ModelSpec.from_hf_config({**LLAMA, **change})


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"])
def test_a_missing_key_is_named(missing):
    with pytest.raises(UnsupportedModel, match=missing):
        ModelSpec.from_hf_config({k: v for k, v in LLAMA.items() if k != missing})


def test_token_ids():
    assert (token_ids(None), token_ids(3), token_ids([3, 4])) == ((), (3,), (3, 4))


YARN_FULL = {**YARN_ROPE, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9}
LONGROPE_SAME = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
}


@pytest.mark.parametrize(
    "parameters", [LLAMA3_ROPE, LINEAR_ROPE, YARN_ROPE, YARN_FULL, {**YARN_ROPE, "truncate": False}, LONGROPE_SAME]
)
def test_frequencies_equal_transformers(parameters):
    config = transformers.LlamaConfig(**SIZES, rope_parameters=parameters)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=100)
    rope = RopeSpec.from_hf_config({**SIZES, "rope_parameters": parameters})
    torch.testing.assert_close(rope.frequencies(14), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_the_old_spelling_means_the_same():
    old = {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}}
    new = {"rope_parameters": LLAMA3_ROPE}
    assert RopeSpec.from_hf_config({**SIZES, **old}) == RopeSpec.from_hf_config({**SIZES, **new})


def test_yarn_stretches_the_context_and_dynamic_does_not():
    yarn = {**LLAMA, "max_position_embeddings": 32, "rope_parameters": YARN_ROPE}
    assert ModelSpec.from_hf_config(yarn).max_context == 128
    dynamic = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert ModelSpec.from_hf_config(dynamic).max_context == 128
    assert ModelSpec.from_hf_config(dynamic).ropes[0] == RopeSpec(theta=10000.0)
