"""layer_norm under torch's transformations: opcheck, compile, export, autograd modes, torch.func, autocast, meta."""

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

OPS = torch.ops.allfinite


def double_case(*, affine=True):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    parameters = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)] if affine else [None, None]
    return x, *parameters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_opcheck(dtype, affine):
    """Schema, fake tensor, autograd registration and AOT dispatch of the public op and its two parts."""
    x, dy = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype)
    weight, bias = (torch.randn(6).to(dtype), torch.randn(6).to(dtype)) if affine else (None, None)
    leaves = [t if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(OPS.layer_norm.default, (leaves[0], [6], *leaves[1:], 1e-5))
    torch.library.opcheck(OPS._layer_norm_forward.default, (*leaves, 1, 1e-5))
    _, stats = OPS._layer_norm_forward(x, weight, bias, 1, 1e-5)
    torch.library.opcheck(OPS._layer_norm_backward.default, (dy, x, weight, bias, stats, 1, [True, affine, affine]))


def test_gradcheck_and_gradgradcheck():
    """First and second derivatives against finite differences, also without weight and bias and over two dimensions."""
    for x, weight, bias in (double_case(), double_case(affine=False)):
        inputs = tuple(t for t in (x, weight, bias) if t is not None)
        for shape in ((5,), (3, 5)):
            if weight is not None and len(shape) == 2:
                continue

            def function(*args, shape=shape):
                return allfinite.layer_norm(args[0], shape, *args[1:])

            assert gradcheck(function, inputs)
            assert gradgradcheck(function, inputs)


def test_gradient_penalty_matches_torch():
    """create_graph=True in fp32, as in a gradient penalty: the second backward is right, not merely there."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    results = []
    for op in (allfinite.layer_norm, F.layer_norm):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        (dx,) = torch.autograd.grad(op(leaves[0], (8,), leaves[1]).pow(3).sum(), leaves[0], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaves))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)  # two fp32 evaluations of third powers


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph_forward_and_backward(backend):
    """No graph break, and the compiled gradients are those of eager, bit for bit: the kernels are the same."""

    def function(x, weight, bias):
        return allfinite.layer_norm(x, (x.shape[-1],), weight, bias)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for call in (function, compiled):
        torch.manual_seed(1)
        leaves = [torch.randn(*s, requires_grad=True) for s in ((6, 16), (16,), (16,))]
        y = call(*leaves)
        y.backward(torch.ones_like(y).cumsum(0))
        results.append([y.detach(), *(t.grad for t in leaves)])
    for eager, other in zip(*results, strict=True):
        assert_same_bits(eager, other)


def test_compile_with_dynamic_shapes_does_not_recompile():
    """One graph serves every number of rows and columns."""
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(
        lambda x, w: allfinite.layer_norm(x, (x.shape[-1],), w), backend=count, dynamic=True, fullgraph=True
    )
    for rows, n in ((3, 5), (7, 6), (20, 33)):
        x, w = torch.randn(rows, n), torch.randn(n)
        assert_same_bits(compiled(x, w), allfinite.layer_norm(x, (n,), w))
    assert len(graphs) == 1
    aot = torch.compile(lambda x: allfinite.layer_norm(x, (x.shape[-1],)), backend="aot_eager", dynamic=True)
    for rows in (2, 9):
        x = torch.randn(rows, 4, requires_grad=True)
        aot(x).square().sum().backward()
        assert x.grad is not None


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        return allfinite.layer_norm(x, (8,), self.weight)


def test_export_save_and_load():
    """torch.export with a dynamic batch; the program survives a file and then serves another batch."""
    model = Norm()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(5, 8)
    assert_same_bits(torch.export.load(file).module()(x), model(x))


def test_deepcopy_of_an_exported_program():
    """The op is referred to by name, so a copy of the graph still calls it."""
    program = torch.export.export(Norm(), (torch.randn(3, 8),))
    x = torch.randn(3, 8)
    assert_same_bits(copy.deepcopy(program).module()(x), program.module()(x))


def test_func_grad_jacrev_and_vmap():
    """torch.func composes: grad, jacrev of grad (second derivatives), and vmap over samples."""
    x, weight, bias = (t.detach() for t in double_case())

    def loss(f):
        return lambda x, weight, bias: f(x, (5,), weight, bias).pow(3).sum()

    ours, theirs = loss(allfinite.layer_norm), loss(F.layer_norm)
    for transform in (torch.func.grad, lambda f: torch.func.jacrev(torch.func.grad(f))):
        torch.testing.assert_close(transform(ours)(x, weight, bias), transform(theirs)(x, weight, bias))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap says that the op has no batching rule and loops: right, but slow
        over_rows = torch.func.vmap(ours, in_dims=(0, None, None))(x, weight, bias)
        per_sample = torch.func.vmap(torch.func.grad(ours, argnums=(0, 1)), in_dims=(0, None, None))(x, weight, bias)
        over_weights = torch.func.vmap(ours, in_dims=(None, 0, None))(x, torch.stack([weight, 2 * weight]), bias)
    torch.testing.assert_close(over_rows.sum(), ours(x, weight, bias))
    for i in range(3):
        want = torch.func.grad(theirs, argnums=(0, 1))(x[i], weight, bias)
        torch.testing.assert_close((per_sample[0][i], per_sample[1][i]), want)
    torch.testing.assert_close(over_weights[1], ours(x, 2 * weight, bias))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch, at first use of forward mode
def test_jvp_is_refused_by_name():
    """Forward mode is refused, never silently zero."""
    x = torch.randn(2, 4)
    with pytest.raises(NotImplementedError, match="allfinite::layer_norm"):
        torch.func.jvp(lambda t: allfinite.layer_norm(t, (4,)), (x,), (x,))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    """Recomputation gives the gradients of the plain call, bit for bit."""
    x, w = torch.randn(5, 8), torch.randn(8, requires_grad=True)
    gradients = []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        w.grad = None

        def block(t):
            return allfinite.layer_norm(t, (8,), w).square()

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
        y = allfinite.layer_norm(x, (8,), weight)
        wide = allfinite.layer_norm(x.float(), (8,), weight)
    assert y.dtype == dtype
    assert wide.dtype == torch.float32
    y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_inference_and_no_grad_modes():
    """No tape in no_grad and inference mode."""
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert not allfinite.layer_norm(x, (4,)).requires_grad
    with torch.inference_mode():
        assert allfinite.layer_norm(x, (4,)).is_inference()


@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_meta_and_fake_tensors(device):
    """Shapes, dtypes and devices without data, on a device that need not be there."""

    def run(device):
        # A graph on a device that is not there ends a torch without CUDA; the op of the backward needs none.
        graph = device != "cuda"
        x = torch.empty(2, 3, 8, device=device, dtype=torch.bfloat16, requires_grad=graph)
        weight = torch.empty(8, device=device, requires_grad=graph)
        y = allfinite.layer_norm(x, (8,), weight)
        if not graph:
            stats = torch.empty(2, 3, 4, device=device)
            dx, dweight, _ = OPS._layer_norm_backward(y.detach(), x, weight, None, stats, 1, [True, True, False])
        else:
            dx, dweight = torch.autograd.grad(y, (x, weight), torch.empty_like(y))
        assert y.shape == dx.shape == x.shape
        assert y.dtype == dx.dtype == torch.bfloat16
        assert dweight.dtype == torch.float32
        assert {t.device.type for t in (y, dx, dweight)} == {device}

    if device == "meta":
        run(device)
    else:
        with FakeTensorMode():
            run(device)


def test_saved_tensor_hooks_see_what_is_kept():
    """Saved are the input, the weight and four numbers a row: no second tensor of activations."""
    sizes = []
    x, weight = torch.randn(10, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        y = allfinite.layer_norm(x, (64,), weight)
    y.sum().backward()
    assert sorted(sizes) == [10 * 4, 64, 10 * 64]
    assert x.grad is not None


def test_accumulates_over_two_uses():
    """A module used twice: its gradients add up."""
    x, w = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    allfinite.layer_norm(allfinite.layer_norm(x, (8,), w), (8,), w).square().sum().backward()
    ours = w.grad
    w.grad = None
    F.layer_norm(F.layer_norm(x, (8,), w), (8,), w).square().sum().backward()
    torch.testing.assert_close(ours, w.grad)
