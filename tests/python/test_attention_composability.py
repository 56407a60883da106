"""Attention under torch's transformations: opcheck, compile, export, autocast, meta, torch.func, hooks, threads."""

import copy
import threading
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import allfinite
from support.attention_cases import random_case
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits

sdpa = allfinite.scaled_dot_product_attention
OPS = torch.ops.allfinite


def leaves(dtype=torch.float32, keys=7):
    shapes = (2, 4, 5, 8), (2, 4, keys, 8), (2, 4, keys, 6), (4, 1, keys)
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    """Schema, fake tensor, autograd registration and AOT dispatch of the public ops and of their parts."""
    q, k, v, bias = leaves(dtype)
    torch.library.opcheck(
        OPS.scaled_dot_product_attention.default, (q, k[:, :1], v[:, :1], None, 0.0, True, None, True)
    )
    options = {"softcap": 2.0, "window": [1, 2]}
    torch.library.opcheck(OPS.scaled_dot_product_attention_lse.default, (q, k, v, bias, 0.0, False, 0.5), options)
    seed = torch.tensor([1234])
    for mask in (bias[None], bias[None] > 0) if dtype == torch.float32 else (None,):
        torch.library.opcheck(
            OPS._scaled_dot_product_attention_forward.default, (q, k, v, mask, seed, 0.3, None, 2.0, 1, -1)
        )
        tensors = [t if t is None else t.detach() for t in (q, k, v, mask)]
        output, lse, stats = OPS._scaled_dot_product_attention_forward(*tensors, seed, 0.3, None, 2.0, 1, -1)
        wanted = [True, True, True, mask is not None and mask.is_floating_point()]
        torch.library.opcheck(
            OPS._scaled_dot_product_attention_backward.default,
            (output, lse, *tensors, seed, stats, 0.3, None, 2.0, 1, -1, wanted),
        )


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compile_fullgraph_forward_and_backward(backend, dynamic):
    """No graph break; compiled results are those of eager, bit for bit, for a second shape too (scale=None is 1/sqrt(D)
    of the run, not a constant or NaN)."""

    def function(q, k, v, bias):
        return sdpa(q, k, v, bias, softcap=3.0, window=(3, -1), return_lse=True)

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for keys in (7, 12) if backend != "inductor" else (7,):
        inputs = leaves(keys=keys)
        results = []
        for call in (function, compiled):
            output, lse = call(*inputs)
            assert output.stride() == (120, 30, 6, 1)
            weights = torch.linspace(0, 1, output.numel()).view_as(output)
            grads = torch.autograd.grad([output, lse], inputs, [weights, torch.ones_like(lse)])
            results.append([output.detach(), lse.detach(), *grads])
        for eager, other in zip(*results, strict=True):
            assert_same_bits(other, eager)


def test_compile_with_dropout():
    """Dropout in a compiled graph: the backward uses the forward's mask (V's gradient shows it), masks change."""
    compiled = torch.compile(lambda *t: sdpa(*t, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    q, identity = torch.zeros(20, 1), torch.eye(20).requires_grad_()
    first, second = compiled(q, q, identity), compiled(q, q, identity)
    assert not torch.equal(first, second)
    weights = torch.randn(20, 20)
    (grad,) = torch.autograd.grad(first, identity, weights)
    torch.testing.assert_close(grad, first.detach().T @ weights)


class Model(torch.nn.Module):
    """Attention with a causal mask between two reshapes."""

    def forward(self, x, bias):
        q, k, v = x.view(x.size(0), x.size(1), 3, 2, 8).permute(2, 0, 3, 1, 4)
        return sdpa(q, k, v, bias).transpose(1, 2).flatten(2)


def test_export():
    """torch.export with a dynamic length; the exported graph holds our op and gives its bits."""
    x, bias = torch.randn(2, 6, 48), torch.randn(6, 6)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Model(), (x, bias), dynamic_shapes=({1: length}, {0: length, 1: length}), strict=False
    )
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    for n in (6, 9):
        x, bias = torch.randn(2, n, 48), torch.randn(n, n)
        assert_same_bits(program.module()(x, bias), Model()(x, bias))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake(kind):
    """Shapes, strides and dtypes without data are those of a run."""
    for dtype in DTYPES:
        real = leaves(dtype)
        expected = sdpa(*real, return_lse=True)
        with FakeTensorMode() if kind == "fake" else warnings.catch_warnings():
            device = "cpu" if kind == "fake" else "meta"
            got = sdpa(*(torch.empty(t.shape, dtype=t.dtype, device=device) for t in real), return_lse=True)
        for a, b in zip(got, expected, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_autocast(dtype):
    """Under autocast fp16, bf16, fp32 become its dtype, fp64 and the mask stay; gradients come back fp32."""
    q, k, v, bias = leaves()
    bias.data[..., 0] = -1e9  # in fp16 this would be -inf
    with torch.autocast("cpu", dtype=dtype):
        output = sdpa(q, k, v, bias)
        lse_output, lse = sdpa(q.bfloat16(), k.half(), v, bias, return_lse=True)
        assert sdpa(q.double(), k.double(), v.double()).dtype == torch.float64
    assert output.dtype == lse_output.dtype == dtype
    assert lse.dtype == torch.float32
    assert_same_bits(output, sdpa(q.to(dtype), k.to(dtype), v.to(dtype), bias))
    grads = torch.autograd.grad(output.sum(), (q, k, v, bias))
    assert all(g.dtype == torch.float32 for g in grads)
    with torch.autocast("cpu", enabled=False):
        assert sdpa(q, k, v, bias).dtype == torch.float32


@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA", "Meta", "CompositeImplicitAutograd"])
def test_registrations(key):
    """A C++ trainer on a GPU has autocast without Python: the keys are registered in C++."""
    public = "allfinite::scaled_dot_product_attention"
    parts = "allfinite::_scaled_dot_product_attention_"
    names = [public, public + "_lse"] if key != "Meta" else [parts + "forward", parts + "backward"]
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_func_grad():
    """torch.func.grad and jacrev give the gradients of autograd."""
    q, k, v, bias = (t.detach() for t in leaves())
    got = torch.func.grad(lambda *t: sdpa(*t).square().sum(), argnums=(0, 1, 2, 3))(q, k, v, bias)
    inputs = [t.clone().requires_grad_() for t in (q, k, v, bias)]
    expected = torch.autograd.grad(sdpa(*inputs).square().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    """vmap over samples is the batched call, and per-sample gradients are right."""
    q, k, v, _ = (t.detach() for t in leaves())
    assert_same_bits(torch.func.vmap(sdpa)(q, k, v), sdpa(q, k, v))
    grads = torch.func.vmap(torch.func.grad(lambda *t: sdpa(*t).square().sum()))(q, k, v)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sdpa(leaf, k, v).square().sum(), leaf)
    assert_same_bits(grads, expected)


def test_deepcopied_modules_and_hooks():
    """Gradient hooks on inputs and outputs see the gradients that arrive."""
    model = copy.deepcopy(Model())
    x = torch.randn(2, 6, 48, requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    model(x, torch.zeros(6, 6)).sum().backward()
    assert_same_bits(seen[0], x.grad)


def test_node_is_named():
    """The autograd graph says whose node it is."""
    assert sdpa(*leaves()).grad_fn.name() == "allfinite::scaled_dot_product_attentionBackward"


def test_no_graph_without_gradients():
    """no_grad and inputs that need none: no node."""
    tensors = [t.detach() for t in leaves()]
    assert sdpa(*tensors).grad_fn is None
    with torch.no_grad():
        assert sdpa(*leaves()).grad_fn is None
    with torch.inference_mode():
        assert sdpa(*tensors).is_inference()


def test_calls_from_several_threads():
    """Concurrent calls do not share scratch memory."""
    case = random_case(torch.float32, queries=90, keys=200)
    expected = sdpa(case.query, case.key, case.value)
    results = [None] * 4

    def work(i):
        results[i] = sdpa(case.query, case.key, case.value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results:
        assert_same_bits(result, expected)
