"""The packaged model on real text: tokenizer, logits and greedy answers against Transformers."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
import transformers

from pagoda.engine.params import SamplingParams
from pagoda.errors import ModelNotFound
from pagoda.model.gguf import convert_gguf
from pagoda.model.loader import load_model
from pagoda.model.registry import resolve
from pagoda.model.sampler import SampledToken, SamplerState, sample
from pagoda.model.tokenizer import TextStream
from tests.model.paged import PagedRun

pytestmark = pytest.mark.slow

PARAGRAPH = (
    "The ferry to the island leaves at seven, and on most mornings it carries nobody but the postman, two "
    "schoolteachers and a crate of oranges. In winter, when the harbour freezes, the captain walks across the ice and "
    "reads the newspaper aloud in the café; 14 people come to listen. C'est la vie, he says. 船は港を出た。\n\n"
)


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load_model("smollm2", dtype="float32")
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(smollm2):
    return transformers.LlamaForCausalLM.from_pretrained(convert_gguf(resolve("smollm2"), torch.float32)).eval()


@pytest.fixture(scope="module")
def long_text(smollm2):
    ids = smollm2.tokenizer.encode(PARAGRAPH + inspect.getsource(textwrap))
    assert len(ids) >= 400
    return ids[:400]


def test_shape(smollm2):
    spec = smollm2.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_context, spec.tie_embeddings) == (49152, 8192, True)


def test_logits_equal_transformers(smollm2, reference, long_text):
    """Chunks of many sizes and single tokens, through 16-token blocks in random order."""
    with torch.inference_mode():
        expected = reference(torch.tensor([long_text])).logits[0]
    run = PagedRun(smollm2.decoder, block_size=16, num_blocks=32)
    got = run.chunked(long_text, [200, 70, 1, 1, 17, 50, 57, 1, 1, 1, 1])
    assert (got - expected).abs().max() < 1e-3
    loss = torch.nn.functional.cross_entropy(got[:-1], torch.tensor(long_text[1:]))
    assert loss < 3.5, "the model reads this text as text"


def test_greedy_answer(smollm2, reference):
    tokenizer = smollm2.tokenizer
    prompt = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt.endswith("<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    run = PagedRun(smollm2.decoder, block_size=16)
    sequence = run.add(ids)
    state = SamplerState(SamplingParams(temperature=0.0), smollm2.spec.vocab_size, ids)
    stream, text = TextStream(tokenizer), ""
    logits = run.step([(sequence, len(ids))], all_logits=False)
    while True:
        (outcome,) = sample(logits, [state])
        assert isinstance(outcome, SampledToken)
        sequence.token_ids.append(outcome.token_id)
        state.append(outcome.token_id)
        text += stream.push(outcome.token_id)
        if outcome.token_id in tokenizer.eos_ids or state.num_output_tokens == 40:
            break
        logits = run.step([(sequence, 1)], all_logits=False)
    assert "Paris" in text + stream.flush()
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, pad_token_id=2)
    assert sequence.token_ids == expected[0].tolist()


@pytest.mark.parametrize(
    "text", [PARAGRAPH, "x = 12345 + 0.5  # don't\n\tpass", "🚤👩‍👩‍👧‍👦 naïve", "<|im_start|>user\nhi<|im_end|>"]
)
def test_text_round_trips(smollm2, text):
    tokenizer = smollm2.tokenizer
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_digits_are_single_tokens(smollm2):
    tokenizer = smollm2.tokenizer
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]
