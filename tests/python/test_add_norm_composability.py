"""add_layer_norm and add_rms_norm under transformations: opcheck, compile, export, torch.func, checkpointing."""

import io
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import allfinite
from support.add_norm import NAMES, random_case
from support.bounds import DTYPES, assert_same_bits

OPS = torch.ops.allfinite


def composed(name, x, residual, shape, *parameters):
    """The same from torch's ops."""
    total = x + residual
    norm = F.rms_norm if name == "add_rms_norm" else F.layer_norm
    return norm(total, shape, *parameters), total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(name, dtype):
    """Schema, fake tensor, autograd registration and AOT dispatch of the public ops and their two parts."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    case = random_case(name, dtype, residual_dtype=wide, batch=(4,), shape=(6,))
    leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}
    public = getattr(OPS, name).default
    torch.library.opcheck(public, (leaves["dx"], leaves["dresidual"], [6], *list(leaves.values())[2:]))
    arguments = (leaves["dx"], leaves["dresidual"], leaves["dweight"], leaves.get("dbias"), 1, 1e-5, case.rms)
    torch.library.opcheck(OPS._add_norm_forward.default, arguments)
    _, total, stats = OPS._add_norm_forward(case.x, case.residual, case.weight, case.bias, 1, 1e-5, case.rms)
    for dsum in (case.dsum, None):
        mask = [True, True, True, case.bias is not None]
        arguments = (case.dy, dsum, total, case.weight, case.bias, stats, 1, case.rms, mask)
        torch.library.opcheck(OPS._add_norm_backward.default, arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["both", "output", "residual_out"])
def test_gradcheck_and_gradgradcheck(name, which):
    """First and second derivatives against finite differences, through both outputs and through each alone."""
    case = random_case(name, torch.float64, batch=(3,), shape=(5,))
    leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}
    if which == "residual_out":
        leaves = {key: leaves[key] for key in ("dx", "dresidual")}

    def function(*tensors):
        outputs = case.call(dict(zip(leaves, tensors, strict=True)))
        return outputs if which == "both" else outputs[which == "residual_out"]

    assert gradcheck(function, tuple(leaves.values()))
    assert gradgradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_create_graph_are_those_of_the_kernel(name):
    """create_graph=True takes other code: mixed dtypes and both incoming gradients come out the same."""
    case = random_case(name, torch.float16, residual_dtype=torch.float32, weight_dtype=torch.float32)
    leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}
    outputs = case.call(leaves)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), (case.dy, case.dsum), create_graph=True)
    exact = case.reference()
    for (key, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.requires_grad or key == "dbias"  # a sum of dy, which has no graph here
        # One rounding to the dtype; values below fp16's normal range by its subnormal step.
        torch.testing.assert_close(gradient.double(), exact[key].value, rtol=2**-11, atol=2**-24)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_penalty_matches_torch(name):
    """create_graph=True in fp32: the second backward goes through the stored sum to input and residual."""
    case = random_case(name, torch.float32, batch=(4,), shape=(8,))
    results = []
    for ours in (True, False):
        leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}
        x, residual, *parameters = leaves.values()
        outputs = case.call(leaves) if ours else composed(name, x, residual, (8,), *parameters)
        loss = outputs[0].pow(3).sum() + outputs[1].pow(3).sum()
        dx, dresidual = torch.autograd.grad(loss, (leaves["dx"], leaves["dresidual"]), create_graph=True)
        penalty = dx.square().sum() + dresidual.pow(3).sum()
        second = [leaves[key] for key in ("dx", "dresidual", "dweight")]
        results.append([outputs[0], dx, dresidual, *torch.autograd.grad(penalty, second)])
    # eps differs: torch's rms_norm takes 1.2e-7 for None, ours here 1e-5; both near 1 in mean square.
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)  # two fp32 evaluations of third powers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_forward_and_backward(name, backend):
    """No graph break, and the compiled gradients are those of eager, bit for bit: the kernels are the same."""
    case = random_case(name, torch.bfloat16, residual_dtype=torch.float32)
    keys = list(case.leaves())

    def function(*tensors):
        return case.call(dict(zip(keys, tensors, strict=True)))

    results = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in case.leaves().values()]
        outputs = call(*leaves)
        torch.autograd.backward(outputs, (case.dy, case.dsum))
        results.append([*(t.detach() for t in outputs), *(t.grad for t in leaves)])
    for eager, other in zip(*results, strict=True):
        assert_same_bits(eager, other)


@pytest.mark.parametrize("name", NAMES)
def test_compile_with_an_unused_output(name):
    """A block's last sum often goes unused: the compiled backward then gets no gradient of it, or zeros."""
    op = getattr(allfinite, name)
    for which in (0, 1):
        function = lambda x, r, which=which: op(x, r, (8,))[which]  # noqa: E731
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        gradients = []
        for call in (function, compiled):
            torch.manual_seed(1)
            x, r = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
            call(x, r).square().sum().backward()
            gradients.append((x.grad, r.grad))
        torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_compile_with_dynamic_shapes_does_not_recompile(name):
    """One graph serves every number of rows and columns."""
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    op = getattr(allfinite, name)
    compiled = torch.compile(lambda x, r, w: op(x, r, (x.shape[-1],), w), backend=count, dynamic=True, fullgraph=True)
    for rows, n in ((3, 5), (7, 6), (20, 33)):
        x, r, w = torch.randn(rows, n), torch.randn(rows, n), torch.randn(n)
        for got, want in zip(compiled(x, r, w), op(x, r, (n,), w), strict=True):
            assert_same_bits(got, want)
    assert len(graphs) == 1
    aot = torch.compile(lambda x, r: op(x, r, (x.shape[-1],)), backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (2, 9):
        x, r = (torch.randn(rows, 4, requires_grad=True) for _ in range(2))
        y, total = aot(x, r)
        (y.square().sum() + total.square().sum()).backward()
        assert x.grad.shape == r.grad.shape == (rows, 4)


class Block(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, x, residual):
        return getattr(allfinite, self.name)(x, residual, (8,), self.weight)


@pytest.mark.parametrize("name", NAMES)
def test_export_save_and_load(name):
    """torch.export with a dynamic batch; the program survives a file and then serves another batch."""
    model, batch = Block(name), torch.export.Dim("batch", min=1, max=64)
    example = (torch.randn(3, 8), torch.randn(3, 8))
    program = torch.export.export(model, example, dynamic_shapes=({0: batch}, {0: batch}))
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x, residual = torch.randn(5, 8), torch.randn(5, 8)
    loaded = torch.export.load(file).module()
    for got, want in zip(loaded(x, residual), model(x, residual), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_func_grad_jacrev_and_vmap(name):
    """torch.func composes: grad, jacrev of grad (second derivatives), and vmap over samples."""
    x, residual, weight = (torch.randn(*s, dtype=torch.float64) for s in ((3, 5), (3, 5), (5,)))

    def loss(f):
        def function(x, residual, weight):
            y, total = f(x, residual, (5,), weight)
            return y.pow(3).sum() + (total * y).sum()

        return function

    ours, theirs = loss(getattr(allfinite, name)), loss(lambda *a: composed(name, *a))
    every = (0, 1, 2)
    for transform in (
        lambda f: torch.func.grad(f, argnums=every),
        lambda f: torch.func.jacrev(torch.func.grad(f, argnums=every), argnums=every),
    ):
        torch.testing.assert_close(transform(ours)(x, residual, weight), transform(theirs)(x, residual, weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap says that the op has no batching rule and loops: right, but slow
        per_row = torch.func.vmap(ours, in_dims=(0, 0, None))(x, residual, weight)
        one_residual = torch.func.vmap(ours, in_dims=(0, None, None))(x, residual[0], weight)
        gradients = torch.func.vmap(torch.func.grad(ours, argnums=every), in_dims=(0, 0, None))(x, residual, weight)
    torch.testing.assert_close(per_row.sum(), ours(x, residual, weight))
    for i in range(3):
        torch.testing.assert_close(one_residual[i], ours(x[i], residual[0], weight))
        want = torch.func.grad(theirs, argnums=every)(x[i], residual[i], weight)
        torch.testing.assert_close(tuple(g[i] for g in gradients), want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(name, use_reentrant):
    """Recomputation gives the gradients of the plain call, bit for bit."""
    case = random_case(name, torch.float32)
    gradients = []
    for recompute in (False, True):
        leaves = {key: t.clone().requires_grad_() for key, t in case.leaves().items()}

        def block(x, residual, leaves=leaves):
            y, total = case.call({**leaves, "dx": x, "dresidual": residual})
            return y.square() + total

        inputs = (leaves["dx"], leaves["dresidual"])
        y = checkpoint(block, *inputs, use_reentrant=use_reentrant) if recompute else block(*inputs)
        y.sum().backward()
        gradients.append([t.grad for t in leaves.values()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert_same_bits(plain, recomputed)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name):
    """Under autocast the norm runs in the dtypes it is given: 16-bit activations, fp32 residual stream and weights."""
    case = random_case(name, torch.bfloat16, residual_dtype=torch.float32, weight_dtype=torch.float32)
    plain = case.run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = case.run()
    for key, value in plain.items():
        assert_same_bits(under[key], value)


@pytest.mark.parametrize("name", NAMES)
def test_inference_and_no_grad_modes(name):
    """No tape in no_grad and inference mode."""
    x = torch.randn(3, 4, requires_grad=True)
    op = getattr(allfinite, name)
    with torch.no_grad():
        assert not any(t.requires_grad for t in op(x, x, (4,)))
    with torch.inference_mode():
        assert all(t.is_inference() for t in op(x, x, (4,)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_meta_and_fake_tensors(name, device):
    """Shapes, dtypes and devices without data, on a device that need not be there."""

    def run():
        rms = name == "add_rms_norm"
        x = torch.empty(2, 3, 8, device=device, dtype=torch.float16)
        residual, weight = torch.empty(2, 3, 8, device=device), torch.empty(8, device=device)
        y, total, stats = OPS._add_norm_forward(x, residual, weight, None, 1, 1e-5, rms)
        mask = [True, True, True, False]
        dx, dresidual, dweight, _ = OPS._add_norm_backward(y, total, total, weight, None, stats, 1, rms, mask)
        assert y.shape == total.shape == dx.shape == dresidual.shape == x.shape
        assert stats.shape == (2, 3, 2 if rms else 4)
        assert y.dtype == dx.dtype == torch.float16
        assert total.dtype == dresidual.dtype == dweight.dtype == stats.dtype == torch.float32
        assert {t.device.type for t in (y, total, stats, dx, dresidual, dweight)} == {device}

    if device == "meta":
        run()
    else:
        with FakeTensorMode():
            run()


@pytest.mark.parametrize("name", NAMES)
def test_saved_tensor_hooks_see_what_is_kept(name):
    """Saved are the sum (an output, which the next block needs anyway), the weight and a few numbers a row."""
    sizes = []
    x, residual, weight = (torch.randn(*s, requires_grad=True) for s in ((10, 64), (10, 64), (64,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        y, _ = getattr(allfinite, name)(x, residual, (64,), weight)
    y.sum().backward()
    assert sorted(sizes) == sorted([10 * (2 if name == "add_rms_norm" else 4), 64, 10 * 64])


class Watched(torch.autograd.Function):
    """The identity; its node owns ``marker``, so that one can see when the graph is gone."""

    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Marker:
    """An object that can be watched by a weak reference."""


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_graph_is_freed(name):
    """The node keeps the sum, which is its own output: if each owned the other, training would leak activations."""
    marker = Marker()
    watched = weakref.ref(marker)
    outputs = getattr(allfinite, name)(
        Watched.apply(torch.randn(4, 8, requires_grad=True), marker), torch.ones(4, 8), (8,)
    )
    del marker
    assert watched() is not None
    del outputs
    assert watched() is None
