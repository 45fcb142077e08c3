"""The packaged Gemma 3 on real text, where its packages are installed: logits against Transformers, and sense."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
import transformers

from pagoda.errors import ModelNotFound
from pagoda.model.gguf import convert_gguf
from pagoda.model.loader import load_model
from pagoda.model.registry import resolve
from tests.model.paged import PagedRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gemma3():
    try:
        return load_model("gemma3-270m", dtype="float32")
    except ModelNotFound as error:
        pytest.skip(str(error))


def test_shape(gemma3):
    spec = gemma3.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (18, 4, 1, 256)
    assert [layer for layer, window in enumerate(spec.windows) if window is None] == [5, 11, 17]
    assert {window for window in spec.windows if window} == {512}
    assert {rope.theta for rope in spec.ropes} == {1e4, 1e6}
    assert (spec.vocab_size, spec.max_context) == (262144, 32768)


def test_logits_equal_transformers(gemma3):
    """Beyond the window of 512, in chunks of many sizes."""
    reference = transformers.Gemma3ForCausalLM.from_pretrained(convert_gguf(resolve("gemma3-270m"), torch.float32))
    ids = gemma3.tokenizer.encode(inspect.getsource(textwrap))[:1100]
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([ids]), logits_to_keep=40).logits[0]
    run = PagedRun(gemma3.decoder, block_size=16, num_blocks=80)
    sequence = run.add(ids)
    for size in (512, 300, 1, 17, 230):
        run.step([(sequence, size)], all_logits=False)
    got = torch.cat([run.step([(sequence, size)]) for size in (1, 20, 1, 18)])
    assert (got - expected).abs().max() < 1e-2
    loss = torch.nn.functional.cross_entropy(got[:-1], torch.tensor(ids[-39:]))
    assert loss < 2.5, "the model reads this text as text"


def test_greedy_text(gemma3):
    ids = gemma3.tokenizer.encode("Water boils at")
    assert ids[0] == 2, "Gemma expects a <bos>"
    run = PagedRun(gemma3.decoder, block_size=16)
    sequence = run.add(ids)
    logits = run.step([(sequence, len(ids))], all_logits=False)
    for _ in range(8):
        sequence.token_ids.append(int(logits[-1].argmax()))
        logits = run.step([(sequence, 1)], all_logits=False)
    assert gemma3.tokenizer.decode(sequence.token_ids[len(ids) :]).startswith(" 100 degrees")
