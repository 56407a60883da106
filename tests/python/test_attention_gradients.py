"""Gradients by finite differences, of any layout, for any subset of the inputs; what is refused is refused by name."""

import pytest
import torch
from torch.autograd import gradcheck

import allfinite
from support.attention_cases import Case, random_case, run
from support.bounds import DTYPES, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention


def doubles(*shapes):
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (1, 2)},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7},
    "all": {"scale": 0.9, "softcap": 2.0, "window": (2, 1)},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature):
    """Gradients through output and lse against finite differences."""
    q, k, v = doubles((2, 4, 3), (2, 5, 3), (2, 5, 2))
    assert gradcheck(lambda *t: sdpa(*t, return_lse=True, **FEATURES[feature]), (q, k, v))


@pytest.mark.parametrize("shape", [(4, 5), (1, 5), (4, 1), (2, 4, 5), (2, 1, 5), (1, 1)])
def test_gradcheck_bias(shape):
    """The bias' gradient, whatever it is broadcast over."""
    q, k, v, bias = doubles((2, 4, 3), (2, 5, 3), (2, 5, 2), shape)
    assert gradcheck(lambda *t: sdpa(*t, softcap=2.0, return_lse=True), (q, k, v, bias))


def test_gradcheck_grouped_heads_and_dropout():
    """Grouped heads; dropout with the mask held fixed, of output and lse (which is before dropout)."""
    q, k, v, bias = doubles((1, 4, 3, 3), (1, 2, 4, 3), (1, 2, 4, 2), (4, 3, 4))

    def function(*t):
        torch.manual_seed(3)
        return sdpa(*t, dropout_p=0.4, enable_gqa=True, return_lse=True)

    assert gradcheck(function, (q, k, v, bias))


def test_gradcheck_broadcast_dimensions():
    """Leading dimensions that broadcast, heads too: gradients are summed over them."""
    q, k, v, bias = doubles((2, 1, 3, 3, 2), (1, 2, 1, 4, 2), (4, 2), (2, 1, 1, 3, 4))
    assert gradcheck(lambda *t: sdpa(*t), (q, k, v, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_input_alone(dtype):
    """The gradient of one input has the same bits whichever others are asked for."""
    case = random_case(dtype, queries=20, keys=30, mask=torch.randn(20, 30))
    everything = run(case)
    tensors = [case.query, case.key, case.value, case.mask]
    for i, name in enumerate(("dq", "dk", "dv", "dmask")):
        leaves = [t.clone().requires_grad_(j == i) for j, t in enumerate(tensors)]
        output, lse = sdpa(*leaves, return_lse=True)
        (grad,) = torch.autograd.grad([output, lse], [leaves[i]], [case.grad, case.grad_lse])
        assert_same_bits(grad, everything[name])


def test_only_output_or_only_lse():
    """One of the two outputs unused: as a gradient of zeros for it."""
    case = random_case(torch.float32, queries=20, keys=30)
    zeros = Case(case.query, case.key, case.value, torch.zeros_like(case.grad), None, case.grad_lse)
    leaves = case.leaves()
    _, lse = sdpa(*leaves, return_lse=True)
    for name, grad in zip(("dq", "dk"), torch.autograd.grad(lse, leaves[:2], case.grad_lse), strict=True):
        assert_same_bits(grad, run(zeros)[name])
    assert not torch.autograd.grad(sdpa(*leaves, return_lse=True)[1].sum(), leaves[2])[0].any()
    case.grad_lse = None
    leaves = case.leaves()
    grads = torch.autograd.grad(sdpa(*leaves), leaves, case.grad)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_same_bits(grad, run(case)[name])


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second column": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2],
    "every second row": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -2).flatten(-3, -2)[..., ::2, :],
    "columns first": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "misaligned": lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view_as(t),
    "negative offset": lambda t: t.flip(-2).contiguous().flip(-2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layouts(layout, dtype):
    """q, k, v, dO and mask of any strides give the bits of contiguous ones."""
    case = random_case(dtype, queries=20, keys=36, mask=torch.randn(2, 2, 20, 36))
    move = LAYOUTS[layout]
    expected = run(case)
    leaves = [move(t).detach().requires_grad_() for t in (case.query, case.key, case.value, case.mask)]
    output, lse = sdpa(*leaves, return_lse=True)
    assert_same_bits(output, expected["output"])
    grads = torch.autograd.grad([output, lse], leaves, [move(case.grad), case.grad_lse])
    for name, grad in zip(("dq", "dk", "dv", "dmask"), grads, strict=True):
        assert_same_bits(grad, expected[name])


def test_expanded_tensors():
    """Stride 0: y.sum().backward(), keys expanded over heads, a batch of one expanded."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 1, 11, 8), torch.randn(1, 4, 11, 8)
    ones, results = torch.ones(2, 4, 9, 8), []
    for copy in (False, True):
        leaves = [t.expand(2, 4, -1, -1) for t in (q, k, v)]
        leaves = [(t.contiguous() if copy else t).detach().requires_grad_() for t in leaves]
        output = sdpa(*leaves)
        grads = torch.autograd.grad(output, leaves, ones) if copy else torch.autograd.grad(output.sum(), leaves)
        results.append([output, *grads])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_strided_incoming_gradient():
    """dO[:, ::2] and a transposed dO: wrong gradients elsewhere."""
    case = random_case(torch.float16, queries=16, keys=16)
    case.grad_lse = None
    wide = torch.full((2, 4, 16, 24), torch.nan).half()
    wide[:, ::2] = case.grad
    expected = run(case)
    case.grad = wide[:, ::2]
    for name, value in run(case).items():
        assert_same_bits(value, expected[name])


def test_double_backward_is_refused_by_name():
    """create_graph=True gives the first gradient; only its gradient raises, and names the op."""
    q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
    (plain,) = torch.autograd.grad(sdpa(q, k, v).sum(), q)
    assert_same_bits(dq.detach(), plain)
    with pytest.raises(NotImplementedError, match=r"allfinite::scaled_dot_product_attention: .* a double backward"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused_by_name():
    """A tangent must not become zero in silence."""
    q = torch.randn(2, 5, 4)
    with pytest.raises(NotImplementedError, match=r"allfinite::scaled_dot_product_attention: .* forward-mode tangent"):
        torch.func.jvp(lambda t: sdpa(t, q, q), (q,), (q,))


def test_backward_twice_raises():
    """A second backward without retain_graph is torch's error, not a crash; with it the same bits."""
    q = torch.randn(2, 5, 4, requires_grad=True)
    output = sdpa(q, q, q).sum()
    (first,) = torch.autograd.grad(output, q, retain_graph=True)
    (second,) = torch.autograd.grad(output, q)
    assert_same_bits(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, q)


def test_input_changed_in_place_is_noticed():
    """An input that was overwritten before the backward is an error, not a wrong gradient."""
    q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    output = sdpa(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
