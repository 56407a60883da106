"""cross_entropy under torch's transformations: opcheck, compile, export, autograd, torch.func, autocast, meta."""

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
ce = allfinite.cross_entropy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 6, 3)], ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["index", "probabilities"])
def test_opcheck(dtype, shape, probabilities):
    """Schema, fake tensor (strides too), autograd registration and AOT dispatch of the public op and its parts."""
    x, rows = torch.randn(shape).to(dtype), () if len(shape) == 1 else shape[:1] + shape[2:]
    target = torch.rand(shape).to(dtype) if probabilities else torch.randint(0, 6, rows)
    weight = torch.rand(6).to(dtype)
    leaves = x.clone().requires_grad_(), target.clone().requires_grad_(probabilities)
    for reduction, name in enumerate(("none", "mean", "sum")):
        torch.library.opcheck(OPS.cross_entropy.default, (*leaves, weight, -100, name, 0.1), {"z_loss": 0.01})
        torch.library.opcheck(OPS._cross_entropy_forward.default, (*leaves, weight, -100, reduction, 0.1, 0.01))
        loss, stats, denominator = OPS._cross_entropy_forward(x, target, weight, -100, reduction, 0.1, 0.01)
        torch.library.opcheck(
            OPS._cross_entropy_backward.default,
            (loss, x, target, weight, stats, denominator, -100, reduction, 0.1, 0.01, [True, probabilities]),
        )


@pytest.mark.parametrize("probabilities", [False, True], ids=["index", "probabilities"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradcheck_and_gradgradcheck(probabilities, reduction):
    """First and second derivatives, also of the target, against finite differences, with every option at once."""
    for shape in ((5,), (3, 5), (2, 4, 3)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        classes, rows = (5, ()) if len(shape) == 1 else (shape[1], shape[:1] + shape[2:])
        weight = torch.rand(classes, dtype=torch.float64)
        if probabilities:
            target = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        else:
            target = torch.randint(0, classes, rows)
            if rows:
                target.view(-1)[0] = -100

        def function(x, target, weight=weight):
            return ce(x, target, weight, -100, reduction, 0.2, z_loss=0.05)

        assert gradcheck(function, (x, target))
        assert gradgradcheck(function, (x, target))


def test_second_derivatives_match_torch_in_fp32():
    """create_graph=True, as in a gradient penalty; an ignored row of NaN leaves nothing there either."""
    x, target = torch.randn(4, 8), torch.tensor([1, -100, 3, 7])
    results = []
    for op in (ce, F.cross_entropy):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(op(leaf, target, label_smoothing=0.1), leaf, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), leaf)[0])
    torch.testing.assert_close(*results)
    bad = x.clone()
    bad[1] = float("nan")
    leaf = bad.requires_grad_()
    (dx,) = torch.autograd.grad(ce(leaf, target), leaf, create_graph=True)
    assert torch.equal(torch.autograd.grad(dx.square().sum(), leaf)[0][1], torch.zeros(8))


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", False), ("aot_eager", True), ("inductor", False), ("inductor", True)]
)
def test_compile_fullgraph_forward_and_backward(backend, dynamic):
    """No graph break, and the compiled loss and gradients are those of eager, bit for bit."""
    weight = torch.rand(6)

    def function(x, target):
        return ce(x * 1, target, weight, label_smoothing=0.1, z_loss=1e-3)

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for shape in ((5, 6), (9, 6)) if dynamic else ((5, 6),):
        for target in (torch.randint(0, 6, shape[:1]), torch.rand(shape)):
            results = []
            x = torch.randn(shape)
            for call in (function, compiled):
                leaf = x.clone().requires_grad_()
                loss = call(leaf, target)
                loss.backward()
                results.append((loss.detach(), leaf.grad))
            for eager, other in zip(*results, strict=True):
                assert_same_bits(eager, other)


def test_compile_with_dynamic_shapes_does_not_recompile():
    """One graph serves every number of rows, positions and classes."""
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda x, t: ce(x, t), backend=count, dynamic=True, fullgraph=True)
    for rows, classes, positions in ((3, 5, 2), (7, 6, 4), (20, 33, 9)):
        x, t = torch.randn(rows, classes, positions), torch.randint(0, classes, (rows, positions))
        assert_same_bits(compiled(x, t), ce(x, t))
    assert len(graphs) == 1


class Loss(torch.nn.Module):
    def forward(self, x, target):
        return ce(x, target, label_smoothing=0.1)


def test_export_save_and_load():
    """torch.export with a dynamic batch; the program survives a file and then serves another batch."""
    batch = torch.export.Dim("batch", min=1, max=64)
    example = torch.randn(3, 8), torch.tensor([1, 2, 3])
    program = torch.export.export(Loss(), example, dynamic_shapes=({0: batch}, {0: batch}))
    assert any("allfinite" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x, target = torch.randn(5, 8), torch.tensor([0, 7, 3, 2, 1])
    assert_same_bits(torch.export.load(file).module()(x, target), Loss()(x, target))


def test_func_grad_jacrev_and_vmap():
    """torch.func composes: grad, jacrev of grad (second derivatives), and vmap over samples."""
    x, target = torch.randn(3, 5, dtype=torch.float64), torch.tensor([1, -100, 4])
    for transform in (torch.func.grad, lambda f: torch.func.jacrev(torch.func.grad(f))):
        torch.testing.assert_close(transform(ce)(x, target), transform(F.cross_entropy)(x, target))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap says that the op has no batching rule and loops: right, but slow
        over_rows = torch.func.vmap(ce)(x[[0, 2]], target[[0, 2]])
        per_sample = torch.func.vmap(torch.func.grad(ce))(x[[0, 2]], target[[0, 2]])
        over_targets = torch.func.vmap(ce, in_dims=(None, 0))(x, torch.tensor([[0, 1, 2], [4, 4, 4]]))
    for i, row in enumerate((0, 2)):
        torch.testing.assert_close(over_rows[i], F.cross_entropy(x[row], target[row]))
        torch.testing.assert_close(per_sample[i], torch.func.grad(F.cross_entropy)(x[row], target[row]))
    torch.testing.assert_close(over_targets[1], F.cross_entropy(x, torch.tensor([4, 4, 4])))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch, at first use of forward mode
def test_jvp_is_refused_by_name():
    """Forward mode is refused, never silently zero."""
    x = torch.randn(2, 4)
    with pytest.raises(NotImplementedError, match="allfinite::cross_entropy"):
        torch.func.jvp(lambda t: ce(t, torch.tensor([0, 1])), (x,), (x,))


def test_grad_of_weight_is_refused_in_torch_func():
    """A transformed weight does not show requires_grad to Python: the op must see it all the same."""
    with pytest.raises(NotImplementedError, match="expected a weight that requires no gradient"):
        torch.func.grad(lambda w: ce(torch.ones(1, 4), torch.tensor([0]), w))(torch.ones(4))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    """Recomputation gives the gradients of the plain call, bit for bit."""
    x, target, gradients = torch.randn(5, 8), torch.randint(0, 8, (5,)), []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        loss = checkpoint(ce, leaf, target, use_reentrant=use_reentrant) if recompute else ce(leaf, target)
        loss.backward()
        gradients.append(leaf.grad)
    assert_same_bits(*gradients)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_autocast_gives_fp32_and_keeps_sixteen_bit_logits(dtype):
    """As torch, the loss is fp32 (fp64 of fp64); the logits are not cast, and their gradient is rounded once."""
    x, target = torch.randn(4, 8).to(dtype), torch.randint(0, 8, (4,))
    with torch.autocast("cpu", dtype=dtype):
        leaf = x.clone().requires_grad_()
        loss = ce(leaf, target)
        for other in (x.float(), x.double()):
            assert ce(other, target).dtype == other.dtype
            for weight in (torch.rand(8).to(dtype), torch.rand(8)):
                if other.dtype == torch.float32:
                    assert_same_bits(ce(other, target, weight), ce(other, target, weight.float()))
        assert ce(x, target, torch.rand(8)).dtype == torch.float32
        assert ce(x, torch.rand(4, 8)).dtype == torch.float32
    assert loss.dtype == torch.float32
    assert_same_bits(loss.detach(), ce(x, target))
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype


def test_inference_and_no_grad_modes():
    """No tape in no_grad and inference mode."""
    x, target = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 2])
    with torch.no_grad():
        assert not ce(x, target).requires_grad
    with torch.inference_mode():
        assert ce(x, target).is_inference()


@pytest.mark.parametrize("device", ["meta", "cpu", "cuda"])
def test_meta_and_fake_tensors(device):
    """Shapes, dtypes and devices without data, on a device that need not be there."""

    def run():
        # A graph on a device that is not there ends a torch without CUDA; the op of the backward needs none.
        x = torch.empty(2, 8, 3, device=device, dtype=torch.bfloat16)
        target = torch.empty(2, 3, device=device, dtype=torch.long)
        for reduction, name in enumerate(("none", "mean", "sum")):
            loss = ce(x, target, reduction=name)
            assert loss.shape == ((2, 3) if name == "none" else ())
            assert loss.dtype == torch.float32
            parts = OPS._cross_entropy_forward(x, target, None, -100, reduction, 0.0, 0.0)
            dx, _ = OPS._cross_entropy_backward(
                loss, x, target, None, *parts[1:], -100, reduction, 0.0, 0.0, [True, False]
            )
            assert dx.shape == x.shape
            assert dx.dtype == x.dtype
            assert {t.device.type for t in (loss, dx)} == {device}

    if device == "meta":
        run()
    else:
        with FakeTensorMode():
            run()


def test_saved_tensor_hooks_see_what_is_kept():
    """Saved are the logits themselves, the target and three numbers a row: no log-probabilities."""
    sizes = []
    x, target = torch.randn(10, 64, requires_grad=True), torch.randint(0, 64, (10,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        loss = ce(x, target)
    loss.backward()
    assert sorted(sizes) == [1, 10, 3 * 10, 64 * 10]


def test_uint8_targets():
    """As torch: class indices of images are often uint8, with 255 for what is ignored."""
    x, target = torch.randn(5, 300), torch.tensor([0, 255, 7, 254, 255], dtype=torch.uint8)
    for ignore_index in (-100, 255):
        ours = ce(x, target, ignore_index=ignore_index)
        torch.testing.assert_close(ours, F.cross_entropy(x, target, ignore_index=ignore_index))
