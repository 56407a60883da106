"""rms_norm under torch's transformations: opcheck, compile, export, autograd modes, torch.func, autocast, meta."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import allfinite
from support.bounds import DTYPES, SIXTEEN_BIT, assert_same_bits
from support.norm_reference import rms_norm_reference

OPS = torch.ops.allfinite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_opcheck(dtype, affine):
    """Schema, fake tensor, autograd registration and AOT dispatch of the public op and its two parts."""
    x, dy = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype)
    weight = torch.randn(6).to(dtype) if affine else None
    leaves = [t if t is None else t.clone().requires_grad_() for t in (x, weight)]
    torch.library.opcheck(OPS.rms_norm.default, (leaves[0], [6], leaves[1]))
    torch.library.opcheck(OPS._rms_norm_forward.default, (*leaves, 1, 1e-5))
    _, stats = OPS._rms_norm_forward(x, weight, 1, 1e-5)
    torch.library.opcheck(OPS._rms_norm_backward.default, (dy, x, weight, stats, 1, [True, affine]))


@pytest.mark.parametrize("eps", [1e-5, None])
def test_gradcheck_and_gradgradcheck(eps):
    """First and second derivatives against finite differences, also without weight and over two dimensions."""
    x, weight = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))
    for inputs, shape in (((x, weight), (5,)), ((x,), (5,)), ((x,), (3, 5))):

        def function(x, weight=None, shape=shape):
            return allfinite.rms_norm(x, shape, weight, eps)

        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e25])
def test_gradients_under_create_graph_are_those_of_the_kernel(scale):
    """create_graph=True takes other code: its first gradients keep the contract too, in rows of any magnitude."""
    x, weight, dy = torch.randn(4, 8) * scale, torch.randn(8), torch.randn(4, 8)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    dx, dweight = torch.autograd.grad(allfinite.rms_norm(leaves[0], (8,), leaves[1]), leaves, dy, create_graph=True)
    exact = rms_norm_reference(x, (8,), weight, None, dy)
    torch.testing.assert_close(dx.double(), exact["dx"].value, rtol=1e-6, atol=0)  # one rounding to fp32
    torch.testing.assert_close(dweight.double(), exact["dweight"].value, rtol=1e-6, atol=0)


def test_second_gradients_of_a_row_of_zeros_are_finite():
    """eps 0 and a row of zeros: 1 / 0 must not reach the second derivatives either."""
    x = torch.zeros(2, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    (dx,) = torch.autograd.grad(allfinite.rms_norm(x, (8,), weight, 0.0).sum(), x, create_graph=True)
    second = torch.autograd.grad(dx.sum(), (x, weight))
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (dx, *second))


def test_gradient_penalty_matches_torch():
    """create_graph=True in fp32, as in a gradient penalty: the second backward is right, not merely there."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    results = []
    for op in (allfinite.rms_norm, F.rms_norm):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        (dx,) = torch.autograd.grad(op(leaves[0], (8,), leaves[1]).pow(3).sum(), leaves[0], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaves))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)  # two fp32 evaluations of third powers


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_forward_and_backward(backend):
    """No graph break, and the compiled gradients are those of eager, bit for bit: the kernels are the same."""

    def function(x, weight):
        return allfinite.rms_norm(x, (x.shape[-1],), weight)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for call in (function, compiled):
        torch.manual_seed(1)
        leaves = [torch.randn(*s, requires_grad=True) for s in ((6, 16), (16,))]
        y = call(*leaves)
        y.backward(torch.ones_like(y).cumsum(0))
        results.append([y.detach(), *(t.grad for t in leaves)])
    for eager, other in zip(*results, strict=True):
        assert_same_bits(eager, other)


def test_compile_with_dynamic_shapes_does_not_recompile():
    """One graph, forward and backward, serves every number of rows and columns."""
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(
        lambda x, w: allfinite.rms_norm(x, (x.shape[-1],), w), backend=count, dynamic=True, fullgraph=True
    )
    for rows, n in ((3, 5), (7, 6), (20, 33)):
        x, w = torch.randn(rows, n), torch.randn(n)
        assert_same_bits(compiled(x, w), allfinite.rms_norm(x, (n,), w))
    assert len(graphs) == 1
    aot = torch.compile(lambda x: allfinite.rms_norm(x, (x.shape[-1],)), backend="aot_eager", dynamic=True)
    for rows in (2, 9):
        x = torch.randn(rows, 4, requires_grad=True)
        aot(x).square().sum().backward()
        assert x.grad is not None


def test_export_save_load_and_copy():
    """torch.export with a dynamic batch; the program survives a file and a copy, and serves another batch."""
    model = allfinite.nn.RMSNorm(8)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(5, 8)
    assert_same_bits(torch.export.load(file).module()(x), model(x))
    assert_same_bits(copy.deepcopy(program).module()(x), model(x))


def test_func_grad_jacrev_and_vmap():
    """torch.func composes: grad, jacrev of grad (second derivatives), and vmap over samples."""
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def loss(f):
        return lambda x, weight: f(x, (5,), weight).pow(3).sum()

    ours, theirs = loss(allfinite.rms_norm), loss(F.rms_norm)
    for transform in (torch.func.grad, lambda f: torch.func.jacrev(torch.func.grad(f))):
        torch.testing.assert_close(transform(ours)(x, weight), transform(theirs)(x, weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap says that the op has no batching rule and loops: right, but slow
        over_rows = torch.func.vmap(ours, in_dims=(0, None))(x, weight)
        per_sample = torch.func.vmap(torch.func.grad(ours, argnums=(0, 1)), in_dims=(0, None))(x, weight)
        over_weights = torch.func.vmap(ours, in_dims=(None, 0))(x, torch.stack([weight, 2 * weight]))
    torch.testing.assert_close(over_rows.sum(), ours(x, weight))
    for i in range(3):
        want = torch.func.grad(theirs, argnums=(0, 1))(x[i], weight)
        torch.testing.assert_close((per_sample[0][i], per_sample[1][i]), want)
    torch.testing.assert_close(over_weights[1], ours(x, 2 * weight))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    """Recomputation gives the gradients of the plain call, bit for bit."""
    x, w = torch.randn(5, 8), torch.randn(8, requires_grad=True)
    gradients = []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        w.grad = None

        def block(t):
            return allfinite.rms_norm(t, (8,), w).square()

        y = checkpoint(block, leaf, use_reentrant=use_reentrant) if recompute else block(leaf)
        y.sum().backward()
        gradients.append((leaf.grad, w.grad))
    for plain, recomputed in zip(*gradients, strict=True):
        assert_same_bits(plain, recomputed)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_autocast_keeps_sixteen_bits(dtype):
    """Under autocast the norm runs in the dtype it is given, with fp32 weights: no cast of the activations."""
    x, weight = torch.randn(4, 8).to(dtype), torch.randn(8, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = allfinite.rms_norm(x, (8,), weight)
        wide = allfinite.rms_norm(x.float(), (8,), weight)
    assert y.dtype == dtype
    assert wide.dtype == torch.float32
    y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_inference_and_no_grad_modes():
    """No tape in no_grad and inference mode."""
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert not allfinite.rms_norm(x, (4,)).requires_grad
    with torch.inference_mode():
        assert allfinite.rms_norm(x, (4,)).is_inference()


@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_meta_and_fake_tensors(device):
    """Shapes, dtypes and devices without data, on a device that need not be there."""

    def run():
        x = torch.empty(2, 3, 8, device=device, dtype=torch.bfloat16)
        weight = torch.empty(8, device=device)
        y = allfinite.rms_norm(x, (8,), weight)
        stats = OPS._rms_norm_forward(x, weight, 1, 1e-5)[1]
        dx, dweight = OPS._rms_norm_backward(y, x, weight, stats, 1, [True, True])
        assert y.shape == dx.shape == x.shape
        assert y.dtype == dx.dtype == torch.bfloat16
        assert dweight.dtype == stats.dtype == torch.float32
        assert {t.device.type for t in (y, dx, dweight, stats)} == {device}

    if device == "meta":
        run()
    else:
        with FakeTensorMode():
            run()


def test_saved_tensor_hooks_see_what_is_kept():
    """Saved are the input, the weight and two numbers a row: no second tensor of activations."""
    sizes = []
    x, weight = torch.randn(10, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        y = allfinite.rms_norm(x, (64,), weight)
    y.sum().backward()
    assert sorted(sizes) == [10 * 2, 64, 10 * 64]
    assert x.grad is not None


def test_accumulates_over_two_uses():
    """A module used twice: its gradients add up."""
    x, w = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    allfinite.rms_norm(allfinite.rms_norm(x, (8,), w), (8,), w).square().sum().backward()
    ours = w.grad
    w.grad = None
    F.rms_norm(F.rms_norm(x, (8,), w), (8,), w).square().sum().backward()
    torch.testing.assert_close(ours, w.grad)
