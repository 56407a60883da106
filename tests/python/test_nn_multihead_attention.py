"""allfinite.nn.MultiheadAttention is a drop-in for torch.nn.MultiheadAttention, and finite where that is not."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import Tensor

import allfinite
from support.bounds import assert_same_bits

NAN = float("nan")
L, S, N, E, H = 5, 7, 3, 8, 2


def pair(**arguments):
    """Our module and torch's with the same parameters, biases included."""
    ours = allfinite.nn.MultiheadAttention(E, H, **arguments)
    theirs = torch.nn.MultiheadAttention(E, H, **arguments)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.uniform_(-1, 1)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def tensors(batch_first=False, kdim=E, vdim=E, batched=True):
    shapes = [(L, E), (S, kdim), (S, vdim)]
    if batched:
        shapes = [(N, n, e) if batch_first else (n, N, e) for n, e in shapes]
    return [torch.randn(shape) for shape in shapes]


def masks(name) -> dict[str, Tensor]:
    """Masks that leave every query something to attend to (torch gives NaN for others); the same at every call."""
    torch.manual_seed(7)
    pair_mask = torch.rand(L, S) > 0.6
    pair_mask[:, 0] = False
    per_head = torch.rand(N * H, L, S) > 0.6
    per_head[:, :, 0] = False
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, 4:], padding[2, 6:] = True, True
    additive = torch.randn(L, S).masked_fill(pair_mask, -torch.inf)
    return {
        "none": {},
        "pairs": {"attn_mask": pair_mask},
        "pairs per head": {"attn_mask": per_head},
        "padding": {"key_padding_mask": padding},
        "pairs and padding": {"attn_mask": pair_mask, "key_padding_mask": padding},
        "additive": {"attn_mask": additive},
        "additive and additive": {
            "attn_mask": additive,
            "key_padding_mask": torch.zeros(N, S).masked_fill(padding, -torch.inf),
        },
        "causal": {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1), "is_causal": True},
        "causal and padding": {
            "attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1),
            "key_padding_mask": padding,
            "is_causal": True,
        },
    }[name]


MASKS = [
    "none",
    "pairs",
    "pairs per head",
    "padding",
    "pairs and padding",
    "additive",
    "additive and additive",
    "causal",
    "causal and padding",
]
FORMS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "own sizes": {"kdim": 6, "vdim": 10},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
    "zero key": {"add_zero_attn": True, "batch_first": True},
}


# Not together: torch drops the mask for the hint, and with it the added keys (the test of the hint is below).
COMBINATIONS = [(form, mask) for form in FORMS for mask in MASKS if not ("causal" in mask and "key" in form)]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("form", "mask"), COMBINATIONS)
def test_output_weights_and_gradients_as_torch(form, mask, need_weights):
    """Every form of module with every form of mask, in fp64, where torch's own results are right."""
    arguments = FORMS[form]
    ours, theirs = (module.double() for module in pair(**arguments))
    inputs = tensors(arguments.get("batch_first", False), arguments.get("kdim", E), arguments.get("vdim", E))
    given = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in masks(mask).items()}
    results = []
    for module in (ours, theirs):
        leaves = [t.double().requires_grad_() for t in inputs]
        output, weights = module(*leaves, need_weights=need_weights, **given)
        loss = output.square().sum() + (0 if weights is None else weights.pow(3).sum())
        gradients = torch.autograd.grad(loss, leaves + list(module.parameters()))
        results.append((output, weights, gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)  # two orders of fp64 sums


@pytest.mark.parametrize("average", [False, True])
def test_weights_per_head_and_averaged(average):
    """average_attn_weights decides between (N, heads, L, S) and (N, L, S)."""
    ours, theirs = pair()
    inputs = tensors()
    for module in (ours, theirs):
        _, weights = module(*inputs, average_attn_weights=average)
        assert weights.shape == ((N, L, S) if average else (N, H, L, S))
    torch.testing.assert_close(
        ours(*inputs, average_attn_weights=average), theirs(*inputs, average_attn_weights=average)
    )


@pytest.mark.parametrize("need_weights", [False, True])
def test_unbatched_input(need_weights):
    """(L, E) in and out, with masks of two dimensions, one, and one a head."""
    ours, theirs = pair(batch_first=True)
    inputs = tensors(batched=False)
    padding = torch.tensor([False] * 5 + [True] * 2)
    per_head = torch.rand(H, L, S) > 0.5
    per_head[..., 0] = False
    for arguments in ({}, {"key_padding_mask": padding}, {"attn_mask": per_head}):
        got, want = (m(*inputs, need_weights=need_weights, **arguments) for m in (ours, theirs))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_self_attention_in_eval_mode():
    """Where torch takes its inference path, with one tensor as query, key and value."""
    ours, theirs = pair(batch_first=True)
    x = torch.randn(N, L, E)
    with torch.no_grad():
        for need_weights in (False, True):
            got, want = (m.eval()(x, x, x, need_weights=need_weights) for m in (ours, theirs))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_causal_hint_keeps_added_keys_visible():
    """With added keys the hint must not replace the mask: a top-left causal mask would hide them from every query."""
    ours, _ = pair(add_zero_attn=True, add_bias_kv=True)
    inputs, causal = tensors(), torch.ones(L, S, dtype=torch.bool).triu(1)
    hinted = ours(*inputs, need_weights=False, attn_mask=causal, is_causal=True)[0]
    torch.testing.assert_close(hinted, ours(*inputs, need_weights=False, attn_mask=causal)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_f7_a_query_with_nothing_to_attend_to(need_weights, form, dtype):
    """F7: a fully masked row gives the bias of the output projection, weights 0 and finite gradients (torch: NaN)."""
    ours, theirs = pair()
    ours.to(dtype)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1] = True
    window = torch.zeros(L, S, dtype=torch.bool)
    window[2] = True
    arguments = {"attn_mask": window, "key_padding_mask": padding}
    if form == "additive":
        arguments = {k: torch.zeros(m.shape).masked_fill(m, -torch.inf) for k, m in arguments.items()}
    inputs = [t.to(dtype).requires_grad_() for t in tensors()]
    output, weights = ours(*inputs, need_weights=need_weights, **arguments)
    for row in (output[:, 1], output[2, :]):
        assert_same_bits(row.detach(), ours.out_proj.bias.detach().expand_as(row))
    if need_weights:
        assert torch.equal(weights[1], torch.zeros(L, S, dtype=dtype))
        assert torch.equal(weights[:, 2], torch.zeros(N, S, dtype=dtype))
    output.square().sum().backward()
    for tensor in (*inputs, *ours.parameters()):
        assert tensor.grad.isfinite().all()
    assert torch.equal(inputs[0].grad[:, 1], torch.zeros(L, E, dtype=dtype))
    assert not theirs(*tensors(), need_weights=True, attn_mask=window)[0].isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_f1_two_masks_of_the_smallest_half(need_weights):
    """F1: -65504 - 65504 is -inf in fp16: masks are added up in fp32, and a row of such sums stays a softmax."""
    ours, _ = pair()
    ours.half()
    low = torch.full((L, S), -65504.0).half()
    output, _ = ours(*(t.half() for t in tensors()), attn_mask=low, key_padding_mask=low[:N], need_weights=need_weights)
    plain, _ = ours.float()(*tensors())
    assert output.isfinite().all()
    assert output.shape == plain.shape


@pytest.mark.parametrize("need_weights", [False, True])
def test_f1_logits_beyond_fp16(need_weights):
    """F1: q . k of 1e6 overflows fp16 where the product is stored before it is scaled, and also after."""
    ours, _ = pair()
    with torch.no_grad():
        ours.in_proj_weight.mul_(60)
    ours.half()
    x = (torch.randn(L, N, E) * 30).half().requires_grad_()
    output, _ = ours(x, x, x, need_weights=need_weights)
    q, k, _ = torch.nn.functional.linear(x.float(), ours.in_proj_weight.float(), ours.in_proj_bias.float()).chunk(3, -1)
    logits = q[:, 0, :4] @ k[:, 0, :4].t() / 2
    assert logits.abs().max() > 65504
    assert output.isfinite().all()
    (output.float().sum() * 1e-3).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_f2_padding_that_holds_nan_has_no_influence(need_weights):
    """F2: 0 * NaN is NaN: padded keys and values must not be multiplied at all, forward and backward."""
    ours, _ = pair(batch_first=True)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[:, 5:] = True
    clean = tensors(batch_first=True)
    results = []
    for poison in (0.0, NAN):
        leaves = [t.clone() for t in clean]
        leaves[1][:, 5:], leaves[2][:, 5:] = poison, poison
        query = leaves[0].requires_grad_()
        output, _ = ours(query, *leaves[1:], key_padding_mask=padding, need_weights=need_weights)
        results.append((output, *torch.autograd.grad(output.sum(), query)))
    for clean_result, poisoned in zip(*results, strict=True):
        assert_same_bits(clean_result.detach(), poisoned.detach())


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_in_training_only(need_weights):
    """Dropout acts in training, keeps the mean, and is off in eval mode; p = 1 leaves the bias."""
    ours, _ = pair(dropout=0.5)
    inputs = tensors()
    plain = ours.eval()(*inputs, need_weights=need_weights)[0]
    torch.testing.assert_close(ours(*inputs, need_weights=need_weights)[0], plain)
    ours.train()
    assert not torch.equal(ours(*inputs, need_weights=need_weights)[0], ours(*inputs, need_weights=need_weights)[0])
    many = torch.stack([ours(*inputs, need_weights=need_weights)[0] for _ in range(400)]).detach()
    spread = many.std(0) / 400**0.5
    assert ((many.mean(0) - plain).abs() <= 6 * spread + 1e-4).all()  # 6 sigma over 120 numbers
    ours.dropout = 1.0
    output = ours(*inputs, need_weights=need_weights)[0]
    torch.testing.assert_close(output, ours.out_proj.bias.expand_as(output))


def test_weights_are_those_of_the_output_under_dropout():
    """As in torch, the returned weights are the ones that the output was made of."""
    ours, _ = pair(dropout=0.5)
    query, key, value = tensors()
    with torch.no_grad():
        output, weights = ours(query, key, value, average_attn_weights=False)
        v = torch.nn.functional.linear(value, ours.in_proj_weight.chunk(3)[2], ours.in_proj_bias.chunk(3)[2])
        v = v.view(S, N, H, E // H).permute(1, 2, 0, 3)
        again = ours.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))
    torch.testing.assert_close(output, again)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("form", ["plain", "added keys"])
def test_autocast(need_weights, form):
    """fp32 parameters under autocast: a 16-bit output, fp32 gradients, close to the fp32 result."""
    ours, _ = pair(**FORMS[form])
    inputs = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = ours(*inputs, need_weights=need_weights)
    assert output.dtype == torch.bfloat16
    assert weights is None or weights.dtype == torch.float32
    output.float().sum().backward()
    assert ours.in_proj_weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), ours(*inputs)[0], rtol=0.05, atol=0.05)  # a few bf16 roundings


def test_empty_batch_and_empty_lengths():
    """No batch, no query, no key: shapes as torch's, and for no key the bias alone."""
    ours, _ = pair()
    for length, keys, batch in ((0, S, N), (L, S, 0), (L, 0, N)):
        for need_weights in (False, True):
            output, _ = ours(
                torch.randn(length, batch, E),
                torch.randn(keys, batch, E),
                torch.randn(keys, batch, E),
                need_weights=need_weights,
                attn_mask=torch.zeros(length, keys, dtype=torch.bool),
            )
            assert output.shape == (length, batch, E)
            if keys == 0:
                torch.testing.assert_close(output, ours.out_proj.bias.expand_as(output))


def test_same_constructor_state_and_signatures():
    """Checkpoints go both ways, and every argument has the same name and place."""
    for arguments in FORMS.values():
        ours, theirs = pair(**arguments)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        assert repr(ours) == repr(theirs)
    for name in ("__init__", "forward"):
        ours_signature, theirs_signature = (
            inspect.signature(getattr(m.MultiheadAttention, name)) for m in (allfinite.nn, torch.nn)
        )
        assert list(ours_signature.parameters) == list(theirs_signature.parameters)
        defaults = [[p.default for p in s.parameters.values()] for s in (ours_signature, theirs_signature)]
        assert defaults[0] == defaults[1]


def test_copy_pickle_and_compile():
    """Copies and pickles keep class and values; the forward compiles without a break."""
    ours, _ = pair(batch_first=True)
    x = torch.randn(N, L, E)
    want = ours(x, x, x, need_weights=False)[0]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is allfinite.nn.MultiheadAttention
        assert_same_bits(other(x, x, x, need_weights=False)[0], want)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[0, 3:] = True
    for need_weights in (False, True):
        got, want = (m(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0] for m in (compiled, ours))
        torch.testing.assert_close(got, want)
        got.sum().backward()


def test_bad_arguments_are_of_all_types_that_torch_raises():
    """So that any handler keeps working; the arguments and their messages: bad_calls/modules.py."""
    module = allfinite.nn.MultiheadAttention(E, H)
    for kind in (ValueError, RuntimeError, AssertionError):
        with pytest.raises(kind, match=r"allfinite\.nn\.MultiheadAttention: expected query of 8 features"):
            module(*[torch.ones(L, N, 3)] * 3)
