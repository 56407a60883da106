"""The attention function ``allfinite`` of transformers, called as its models call it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import allfinite
from support.bounds import assert_same_bits
from support.models import NESTED

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("allfinite.integrations.transformers")

CAUSAL, FULL = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)


def tensors(queries: int = 5, keys: int = 5, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 4, queries, 8)
    k, v = torch.randn(2, 2, 4 // groups, keys, 8)
    return q, k, v


def call(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    out, weights = integration.attention(module, q, k, v, mask, **kwargs)
    assert weights is None
    assert out.shape == (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    assert out.is_contiguous()
    return out.transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, scale: float = 8**-0.5) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return ((q @ k.mT) * scale + bias).softmax(-1) @ v


def banned(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


def test_registered_under_its_name():
    """Importing the module is enough; the masks are those of sdpa, which are bool."""
    assert transformers.AttentionInterface()["allfinite"] is integration.attention
    assert transformers.AttentionMaskInterface()["allfinite"] is transformers.AttentionMaskInterface()["sdpa"]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads_and_scaling(groups: int):
    """Each key head serves heads / key heads consecutive query heads, as repeat_kv; scaling replaces 1 / sqrt(D)."""
    q, k, v = tensors(groups=groups)
    torch.testing.assert_close(call(FULL, q, k, v), exact(q, k, v))
    torch.testing.assert_close(call(FULL, q, k, v, scaling=0.7), exact(q, k, v, scale=0.7))


@pytest.mark.parametrize("keys", [5, 8])
def test_causal_without_a_mask(keys: int):
    """The module decides, or the argument; from the top left, also where a static cache has more keys than queries."""
    q, k, v = tensors(keys=keys)
    causal = banned(torch.ones(5, keys, dtype=torch.bool).tril())
    want = exact(q, k, v, causal)
    torch.testing.assert_close(call(CAUSAL, q, k, v), want)
    torch.testing.assert_close(call(object(), q, k, v), want)  # causal is the default, as in transformers' sdpa
    torch.testing.assert_close(call(FULL, q, k, v, is_causal=True), want)
    torch.testing.assert_close(call(CAUSAL, q, k, v, is_causal=False), exact(q, k, v))


def test_one_query_and_a_mask_switch_causal_off():
    """A decoded token sees the whole cache; where there is a mask, it says all."""
    q, k, v = tensors(queries=1, keys=6)
    torch.testing.assert_close(call(CAUSAL, q, k, v), exact(q, k, v))
    q, k, v = tensors()
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    allowed[..., 0] = True
    torch.testing.assert_close(call(CAUSAL, q, k, v, allowed), exact(q, k, v, banned(allowed)))
    bias = torch.randn(2, 1, 5, 5)
    torch.testing.assert_close(call(CAUSAL, q, k, v, bias), exact(q, k, v, bias))


def test_softcap_and_sliding_window():
    """softcap caps the scaled score; a window of w is the token itself and the w - 1 before it."""
    q, k, v = tensors(groups=1)
    capped = 3 * torch.tanh(q @ k.mT * 8**-0.5 / 3)
    torch.testing.assert_close(call(FULL, q, k, v, softcap=3.0), capped.softmax(-1) @ v)
    distance = torch.arange(5)[:, None] - torch.arange(5)
    near = banned((distance >= 0) & (distance < 2))
    torch.testing.assert_close(call(CAUSAL, q, k, v, sliding_window=2), exact(q, k, v, near))
    allowed = torch.ones(5, 5, dtype=torch.bool)
    torch.testing.assert_close(call(CAUSAL, q, k, v, allowed, sliding_window=2), exact(q, k, v))  # the mask says all


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_position_bias(mask: str | None):
    """T5's learnt bias is added beside either kind of mask, beside the diagonal, and gets its gradient."""
    q, k, v = tensors()
    bias = torch.randn(1, 4, 5, 5, requires_grad=True)
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    given = {None: None, "bool": allowed, "float": banned(allowed)}[mask]
    want = exact(q, k, v, bias + banned(allowed))
    got = call(CAUSAL, q, k, v, given, position_bias=bias)
    torch.testing.assert_close(got, want)
    (theirs,), (ours,) = (torch.autograd.grad(out.square().sum(), bias) for out in (want, got))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(call(FULL, q, k, v, position_bias=bias), exact(q, k, v, bias))


def test_dropout_acts_on_the_weights():
    """With all weights left out the output is 0; the model passes 0 outside training."""
    q, k, v = tensors()
    assert (call(FULL, q, k, v, dropout=1.0) == 0).all()


def test_f7_a_row_of_padding_gives_zero():
    """F7: transformers' sdpa gives NaN for a query that may attend to nothing."""
    q, k, v = tensors()
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    allowed[1, :, 2] = False
    out = call(FULL, q, k, v, allowed)
    assert (out[1, :, 2] == 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("argument", ["output_attentions", "head_mask", "s_aux"])
def test_what_needs_the_weights_is_refused(argument: str):
    """Ignoring one of these would give another result, or None in place of the weights, in silence."""
    given = True if argument == "output_attentions" else torch.ones(4)
    with pytest.raises(ValueError, match=f"expected a call without .*{argument}.*eager"):
        call(FULL, *tensors(), **{argument: given})
    call(FULL, *tensors(), **{argument: None if argument != "output_attentions" else False})


def test_a_model_refuses_output_attentions():
    """As with transformers' other implementations that store no weights: at the config and at the call."""
    case = NESTED["bert"]
    model = case.build()
    model.set_attn_implementation("allfinite")
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(**case.data(), output_attentions=True)


def test_chosen_at_construction():
    """attn_implementation="allfinite" in the config, and the same function as eager."""
    config = NESTED["llama"].build().config
    eager = transformers.LlamaForCausalLM(config).eval()
    config.attn_implementation = "allfinite"
    ours = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="allfinite").eval()
    assert ours.config._attn_implementation == "allfinite"
    ours.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    data = NESTED["llama"].data()
    kept = data["attention_mask"].bool()
    torch.testing.assert_close(ours(**data).logits[kept], eager(**data).logits[kept], rtol=1e-4, atol=1e-5)


def test_generation_with_a_cache():
    """One token at a time from the cache gives the tokens that eager attention gives."""
    model = NESTED["llama"].build()
    data = NESTED["llama"].data()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": True, "eos_token_id": None}
    left_padded = {name: t.flip(-1) for name, t in data.items()}
    want = model.generate(**left_padded, **options)
    allfinite.convert(model)
    model.set_attn_implementation("allfinite")
    assert torch.equal(model.generate(**left_padded, **options), want)


def test_sliding_window_of_a_model():
    """Mistral passes its window; the masks carry it where the sequence is longer."""
    config = transformers.MistralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        sliding_window=3,
        attn_implementation="eager",
    )
    model = transformers.MistralModel(config).eval()
    ids = torch.randint(0, 50, (2, 9))
    want = model(ids).last_hidden_state
    model.set_attn_implementation("allfinite")
    torch.testing.assert_close(model(ids).last_hidden_state, want, rtol=1e-4, atol=1e-5)


def test_compiles_for_any_length():
    """dynamic=True: one graph for all lengths, although causal depends on whether there is more than one query."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for length in (5, 7, 9):
        given = tensors(length, length)
        assert_same_bits(compiled(CAUSAL, *given), call(CAUSAL, *given))
    assert len(graphs) == 1


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    ("name", "options", "swaps"),
    [
        ("Gemma2", SMALL | {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, 2 * 4 + 1),
        ("Qwen3", SMALL, 2 * 4 + 1),
        ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50}, 2 * 5 + 2),
    ],
)
def test_families(name: str, options: dict[str, Any], swaps: int):
    """Softcap, window and 1 + weight; norms of queries and keys; position biases and cross attention: as with eager."""
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()
    model.set_attn_implementation("eager")
    data = NESTED["llama"].data()
    kept = data["attention_mask"].bool()
    if name == "T5":
        data["decoder_input_ids"] = data["input_ids"]
    want = model(**data).last_hidden_state
    model.set_attn_implementation("allfinite")
    report = allfinite.convert(model)
    assert (len(report.swapped), report.left) == (swaps, []), str(report)
    torch.testing.assert_close(model(**data).last_hidden_state[kept], want[kept], rtol=1e-4, atol=1e-5)


def test_f5_a_sequence_does_not_depend_on_its_batch():
    """F5: bit for bit, through the interface."""
    q, k, v = tensors()
    assert_same_bits(call(CAUSAL, q[:1], k[:1], v[:1]), call(CAUSAL, q, k, v)[:1])


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """transformers is optional: the name of the module and the command, not a bare ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "allfinite.integrations.transformers")
    with pytest.raises(ImportError, match=r"allfinite\.integrations\.transformers: .*pip install -U transformers"):
        __import__("allfinite.integrations.transformers")


def test_softcap_is_torch_s_formula():
    """The cap is on the scaled score and before the mask: a masked key stays masked."""
    q, k, v = tensors(groups=1)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    scores = 2 * torch.tanh(q @ k.mT * 0.5 / 2)
    want = F.softmax(scores + banned(allowed), -1) @ v
    torch.testing.assert_close(call(CAUSAL, q, k, v, allowed, scaling=0.5, softcap=2.0), want)
