"""softmax under torch's transformations: opcheck, compile, export, autograd modes, torch.func, autocast, meta."""

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
INF = float("inf")


def masks(shape, dtype):
    """No mask, a bool mask and a bias, the latter two broadcast and with a part that hides."""
    hidden = torch.zeros(shape[-1], dtype=torch.bool)
    hidden[1] = True
    return None, ~hidden, torch.randn(shape[-1], dtype=torch.float64).masked_fill(hidden, -INF).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    """Schema, fake tensor, autograd registration and AOT dispatch of the public op and its two parts."""
    x, dy = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype)
    for mask in masks((4, 6), dtype):
        leaf = x.clone().requires_grad_()
        bias = mask is not None and mask.is_floating_point()
        if bias:
            mask = mask.requires_grad_()
        inner = None if mask is None else mask.detach().unsqueeze(0)
        torch.library.opcheck(OPS.softmax.default, (leaf, -1), {"mask": mask, "scale": 0.5})
        for keep in (False, True):
            torch.library.opcheck(OPS._softmax_forward.default, (leaf, inner, 1, 0.5, keep))
            torch.library.opcheck(OPS._softmax_forward.default, (x, inner, 1, 0.5, keep))
        y, numbers = OPS._softmax_forward(x, inner, 1, 0.5, True)
        kept = numbers if dtype.itemsize == 2 else y
        torch.library.opcheck(OPS._softmax_backward.default, (dy, x, inner, kept, 1, 0.5, [True, bias]))


def test_gradcheck_and_gradgradcheck():
    """First and second derivatives against finite differences, of input and of a broadcast bias, masked parts too."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    plain, hiding, bias = masks((3, 5), torch.float64)
    row_hidden = torch.tensor([[True], [False], [True]])
    column_bias = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    for dim, mask, scale in ((1, plain, 1.0), (0, hiding, -0.7), (1, row_hidden, 0.3), (1, bias, 0.3), (0, bias, 2.0)):
        function = lambda t, dim=dim, mask=mask, scale=scale: allfinite.softmax(t, dim, mask=mask, scale=scale)  # noqa: E731
        assert gradcheck(function, (x,))
        assert gradgradcheck(function, (x,))
    for dim, leaf in (
        (1, torch.randn(5, dtype=torch.float64)),
        (0, torch.randn(5, dtype=torch.float64)),
        (1, column_bias),
    ):
        leaf = leaf.detach().requires_grad_()
        function = lambda t, m, dim=dim: allfinite.softmax(t, dim, mask=m, scale=0.3)  # noqa: E731
        assert gradcheck(function, (x, leaf))
        assert gradgradcheck(function, (x, leaf))


def test_gradient_penalty_matches_torch():
    """create_graph=True in fp32, as in a gradient penalty: the second backward is right, not merely there."""
    x, results = torch.randn(4, 8), []
    for op in (allfinite.softmax, F.softmax):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(op(leaf, 1).pow(3).sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaf))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)  # two fp32 evaluations of third powers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_create_graph_gives_the_gradients_of_the_kernel(dtype):
    """The differentiable expression and the kernel agree, on hidden parts, hidden rows and bad gradients there."""
    x = torch.randn(4, 6).to(dtype)
    x[1] = -INF
    x[2, 3] = -INF
    dy = torch.randn(4, 6).to(dtype)
    dy[2, 3], dy[0, 1] = INF, float("nan")
    for mask in masks((4, 6), dtype)[1:]:
        leaf = x.clone().requires_grad_()
        y = allfinite.softmax(leaf, 1, mask=mask, scale=0.5)
        (kernel,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        (graph,) = torch.autograd.grad(y, leaf, dy, create_graph=True)
        torch.testing.assert_close(kernel, graph)
        assert kernel.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile_fullgraph_forward_and_backward(backend, dtype):
    """No graph break, and the compiled gradients are those of eager, bit for bit: the kernels are the same."""

    def function(x, bias):
        return allfinite.softmax(x, -1, mask=bias, scale=0.5)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = []
    for call in (function, compiled):
        torch.manual_seed(1)
        leaves = [torch.randn(*s).to(dtype).requires_grad_() for s in ((2, 6, 16), (6, 16))]
        y = call(*leaves)
        y.backward(torch.ones_like(y).cumsum(-1))
        results.append([y.detach(), *(t.grad for t in leaves)])
    for eager, other in zip(*results, strict=True):
        assert_same_bits(eager, other)


def test_compile_with_dynamic_shapes_does_not_recompile():
    """One graph serves every number of rows and columns."""
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda x: allfinite.softmax(x, -1), backend=count, dynamic=True, fullgraph=True)
    for rows, n in ((3, 5), (7, 6), (20, 33)):
        x = torch.randn(rows, n)
        assert_same_bits(compiled(x), allfinite.softmax(x, -1))
    assert len(graphs) == 1
    aot = torch.compile(lambda x, m: allfinite.softmax(x, 0, mask=m), backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (2, 9):
        x, m = torch.randn(rows, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        aot(x, m).square().sum().backward()
        assert x.grad is not None
        assert m.grad is not None


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        return allfinite.softmax(x, -1, mask=self.bias, scale=0.5)


def test_export_save_and_load():
    """torch.export with a dynamic batch; the program survives a file and then serves another batch."""
    model = Weights()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(5, 8)
    assert_same_bits(torch.export.load(file).module()(x), model(x))


def test_func_grad_jacrev_and_vmap():
    """torch.func composes: grad, jacrev of grad (second derivatives), and vmap over samples and over masks."""
    x, bias = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def ours(x, bias):
        return allfinite.softmax(x, -1, mask=bias, scale=0.5).pow(3).sum()

    def theirs(x, bias):
        return F.softmax(x * 0.5 + bias, -1).pow(3).sum()

    both = {"argnums": (0, 1)}
    for transform in (torch.func.grad, lambda f, **k: torch.func.jacrev(torch.func.grad(f, **k), **k)):
        torch.testing.assert_close(transform(ours, **both)(x, bias), transform(theirs, **both)(x, bias))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap says that the op has no batching rule and loops: right, but slow
        over_rows = torch.func.vmap(ours, in_dims=(0, None))(x, bias)
        per_sample = torch.func.vmap(torch.func.grad(ours, **both), in_dims=(0, None))(x, bias)
        over_masks = torch.func.vmap(ours, in_dims=(None, 0))(x, torch.stack([bias, 2 * bias]))
    torch.testing.assert_close(over_rows.sum(), ours(x, bias))
    for i in range(3):
        want = torch.func.grad(theirs, **both)(x[i], bias)
        torch.testing.assert_close((per_sample[0][i], per_sample[1][i]), want)
    torch.testing.assert_close(over_masks[1], ours(x, 2 * bias))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch, at first use of forward mode
def test_jvp_is_refused_by_name():
    """Forward mode is refused, never silently zero."""
    x = torch.randn(2, 4)
    with pytest.raises(NotImplementedError, match="allfinite::softmax"):
        torch.func.jvp(lambda t: allfinite.softmax(t, 1), (x,), (x,))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_checkpoint(use_reentrant, dtype):
    """Recomputation gives the gradients of the plain call, bit for bit."""
    x, gradients = torch.randn(5, 8).to(dtype), []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()

        def block(t):
            return allfinite.softmax(t, 1).square()

        y = checkpoint(block, leaf, use_reentrant=use_reentrant) if recompute else block(leaf)
        y.sum().backward()
        gradients.append(leaf.grad)
    assert_same_bits(*gradients)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_autocast_keeps_the_dtype(dtype):
    """Under autocast softmax runs in the dtype it is given (torch's goes to fp32: twice the memory)."""
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=dtype):
        assert allfinite.softmax(x.to(dtype), 1).dtype == dtype
        assert allfinite.softmax(x, 1).dtype == torch.float32


def test_inference_and_no_grad_modes():
    """No tape in no_grad and inference mode."""
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert not allfinite.softmax(x, 1).requires_grad
    with torch.inference_mode():
        assert allfinite.softmax(x, 1).is_inference()


@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_meta_and_fake_tensors(device):
    """Shapes, dtypes and devices without data, on a device that need not be there."""

    def run(device):
        x = torch.empty(2, 3, 8, device=device, dtype=torch.bfloat16)
        mask = torch.empty(3, 1, device=device)
        y, numbers = OPS._softmax_forward(x, mask.unsqueeze(0), 1, 1.0, True)
        dx, dmask = OPS._softmax_backward(y, x, mask.unsqueeze(0), numbers, 1, 1.0, [True, True])
        assert allfinite.softmax(x, 1, mask=mask).shape == y.shape == dx.shape == x.shape
        assert numbers.shape == (2, 8, 2)
        assert numbers.dtype == torch.float64
        assert y.dtype == dx.dtype == torch.bfloat16
        assert dmask.dtype == torch.float32
        assert dmask.shape == (1, 3, 1)
        assert {t.device.type for t in (y, numbers, dx, dmask)} == {device}

    if device == "meta":
        run(device)
    else:
        with FakeTensorMode():
            run(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_tensor_hooks_see_what_is_kept(dtype):
    """Saved are the input and the output itself where that has all digits, numbers of the rows for 16."""
    kept = []
    x = torch.randn(10, 64).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = allfinite.softmax(x, 1)
    y.square().sum().backward()
    assert [t.dtype for t in kept] == [dtype, torch.float64 if dtype.itemsize == 2 else dtype]
    assert x.grad is not None


def test_only_what_is_needed_is_differentiated():
    """A bias that needs a gradient beside an input that does not, and the other way round."""
    x, bias, dy = torch.randn(4, 6), torch.randn(6), torch.randn(4, 6)
    both = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    want = torch.autograd.grad(allfinite.softmax(both[0], 1, mask=both[1]), both, dy)
    for i in range(2):
        leaves = [x.clone(), bias.clone()]
        leaves[i].requires_grad_()
        (got,) = torch.autograd.grad(allfinite.softmax(leaves[0], 1, mask=leaves[1]), leaves[i], dy)
        assert_same_bits(got, want[i])
