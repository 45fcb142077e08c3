from __future__ import annotations

import pytest

from pagoda.errors import ModelNotFound, UnsupportedModel
from pagoda.plan.catalog import CATALOG, find_shape, shape_of
from pagoda.plan.shape import ModelShape

PUBLISHED_PARAMETERS = {  # as counted in the published weights
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_those_published(name: str) -> None:
    assert shape_of(name).parameters.total == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", CATALOG)
def test_every_entry_can_be_read(name: str) -> None:
    shape = shape_of(name)
    assert shape.num_heads % shape.num_kv_heads == 0
    assert 0 < shape.parameters.active <= shape.parameters.total


def test_deepseek_v3_computes_a_token_with_36_6_billion_parameters() -> None:
    parameters = shape_of("deepseek-v3").parameters
    assert round((parameters.active + parameters.output) / 1e9, 1) == 36.6


def test_a_step_of_many_tokens_reads_every_expert() -> None:
    parameters = shape_of("mixtral-8x7b").parameters
    dense = parameters.shared + parameters.output
    assert parameters.read_by(1) == dense + 2 * parameters.expert
    assert parameters.read_by(2) == dense + 3.5 * parameters.expert  # 8 experts, each missed with 3/4 x 3/4
    assert parameters.read_by(1e6) == dense + 8 * parameters.expert


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [
        ("gemma-3-4b", 5, 29, 1024),
        ("gemma-3-27b", 10, 52, 1024),
        ("gemma-2-9b", 21, 21, 4096),
        ("mistral-7b-v0.1", 0, 32, 4096),
        ("mistral-7b-v0.3", 32, 0, None),
        ("gpt-oss-20b", 12, 12, 128),
        ("qwen2.5-7b", 28, 0, None),
    ],
)
def test_windows(name: str, full: int, sliding: int, window: int | None) -> None:
    windows = shape_of(name).windows
    assert windows.count(None) == full
    assert [w for w in windows if w is not None] == [window] * sliding


def test_gemma_3_has_a_full_layer_after_every_five() -> None:
    assert [i for i, w in enumerate(shape_of("gemma-3-1b").windows) if w is None] == [5, 11, 17, 23]


def test_the_last_layers_of_a_qwen_may_slide() -> None:
    config = {**CATALOG["qwen2.5-7b"], "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 26}
    assert ModelShape.from_config("x", config).windows == (None,) * 26 + (512, 512)
    assert ModelShape.from_config("x", {**config, "use_sliding_window": False}).windows == (None,) * 28


def test_a_multimodal_config_means_its_language_model() -> None:
    config = {"model_type": "gemma3", "text_config": CATALOG["gemma-3-4b"]}
    assert ModelShape.from_config("gemma-3-4b", config) == shape_of("gemma-3-4b")


def test_names_ignore_case_and_know_aliases() -> None:
    assert find_shape("SmolLM2") == shape_of("smollm2-135m")
    assert find_shape("gpt-5") is None
    with pytest.raises(ModelNotFound, match="llama-3-8b"):
        shape_of("gpt-5")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None},
        {"layer_types": ["full_attention", "linear_attention"] * 16},
        {"layer_types": ["full_attention"]},
        {"num_hidden_layers": 0},
        {"quantization_config": {"quant_method": "secret"}},
        {"dtype": "int3"},
    ],
)
def test_what_cannot_be_read_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match="mine"):
        ModelShape.from_config("mine", {**CATALOG["llama-3-8b"], **change})
