"""allfinite.convert and other projects' norms: what is taken for one, in which form, and what is left."""

import copy
import pickle

import pytest
import torch
from torch import nn

import allfinite
from support.bounds import assert_same_bits
from support.norms import KNOWN, LEFT, CastsBack, ChannelsFirst, ChannelsFirstByHand, FlaggedLayerNorm, OnePlusWeight
from support.vit import randomized

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sample(kind, dtype=torch.float32):
    first = KNOWN[kind][2] == 1
    return torch.randn((2, 32, 3, 5) if first else (2, 5, 32), dtype=torch.float64).add(0.5).to(dtype)


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_form(kind):
    """Each way of writing a norm is found in its own form, and the report says which op runs."""
    module = kind()
    (swapped,) = allfinite.convert(module).swapped
    form = type(module)._allfinite_form
    assert (form.kind, form.offset, form.axis, form.keeps_layout, form.dtype) == KNOWN[kind]
    assert swapped.now == f"allfinite.{form.kind}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_result_as_before(kind, dtype):
    """Value, dtype, shape and strides are those of the module's own forward, with every weight that it takes."""
    x, compared = sample(kind, dtype), 0
    for weight_dtype in DTYPES:
        module = randomized(kind()).to(weight_dtype)
        try:
            want = module(x)
        except RuntimeError:
            continue  # torch's layer_norm does not take these two together
        allfinite.convert(module)
        got = module(x)
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        # The module's own forward rounds up to four times to the coarsest of the dtypes, half an epsilon each.
        eps = max(torch.finfo(t).eps for t in (dtype, weight_dtype, want.dtype, torch.float32))
        torch.testing.assert_close(got.double(), want.double(), rtol=4 * eps, atol=4 * eps)
        compared += 1
    assert compared >= 1


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_gradients_as_before(kind):
    """Of the input and of every parameter, also where the weight is used plus one or the channels come first."""
    module, x = randomized(kind()), sample(kind).requires_grad_()
    dy = torch.randn(x.shape)
    wanted = torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    allfinite.convert(module)
    got = torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)  # fp32 sums in another order


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_other_mathematics_is_left_alone(kind):
    """Each differs from a norm in one thing; swapping it would change the model in silence."""
    module = kind()
    report = allfinite.convert(module)
    assert type(module) is kind
    (left,) = report.left
    assert LEFT[kind] in left.reason


def test_a_fast_path_of_autocast_is_left():
    """A flag under which autocast makes the result 16-bit: the swapped norm would give float32 to what follows."""
    (left,) = allfinite.convert(FlaggedLayerNorm(fast=True)).left
    assert "under autocast gives bfloat16 for float32" in left.reason


def test_torch_s_other_norms_are_not_mentioned():
    """Batch, group and instance norms, their subclasses, and convolutions with an epsilon are not looked for."""

    class Own(nn.GroupNorm):
        def forward(self, x):
            return super().forward(x)

    standardised = nn.Conv2d(2, 2, 3)
    standardised.eps = 1e-6
    others = nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), Own(2, 4), standardised
    report = allfinite.convert(nn.Sequential(*others))
    assert not report.swapped
    assert not report.left


def test_layout_of_channels_last_images():
    """A channels-last image stays one, in both forms of channels first."""
    for kind in (ChannelsFirst, ChannelsFirstByHand):
        module = kind()
        x = sample(kind).to(memory_format=torch.channels_last)
        want = module(x)
        allfinite.convert(module)
        assert module(x).stride() == want.stride()


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_copies_compile_and_undo(kind):
    """Pickled, copied, compiled in one graph, called by the argument's name, and back."""
    module, x = randomized(kind()), sample(kind)
    stock = module(x)
    report = allfinite.convert(module)
    want = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert_same_bits(other(x).detach(), want.detach())
    assert_same_bits(torch.compile(module, backend="eager", fullgraph=True)(x).detach(), want.detach())
    assert_same_bits(module(**{type(module)._allfinite_form.argument: x}).detach(), want.detach())
    report.undo()
    assert type(module) is kind
    assert_same_bits(module(x).detach(), stock.detach())


def test_modules_built_alike_but_wider_are_tried_apart():
    """The width shows neither in repr nor in an attribute; a verdict for one width must not serve another."""

    class Narrow(CastsBack):
        def forward(self, x):
            out = super().forward(x)
            return out if self.weight.numel() < 40 else 2 * out

    report = allfinite.convert(nn.Sequential(Narrow(32), Narrow(48)))
    assert [s.name for s in report.swapped] == ["0"]
    assert [left.name for left in report.left] == ["1"]


def test_parameters_without_a_shape_are_left():
    """A lazy module has no width yet: it is named, and nothing raises."""
    module = CastsBack()
    module.weight = nn.parameter.UninitializedParameter()
    (left,) = allfinite.convert(module).left
    assert left.reason == "its parameters are not initialised yet"


def test_the_trial_leaves_no_trace():
    """No random number is drawn; weights, mode and attributes stay as they were."""
    module = randomized(OnePlusWeight())
    state, before = torch.get_rng_state(), module.weight.clone()
    attributes = dict(vars(module))
    allfinite.convert(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_bits(module.weight.detach(), before.detach())
    assert vars(module) == attributes


def test_f1_an_fp16_norm_that_squares_in_fp16():
    """F1: a forward that squares in fp16 gives 0 from 256 on; the swapped one is right up to 65504."""

    class Squares(CastsBack):
        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    module, x = Squares().half(), torch.tensor([[30000.0, -65504.0] * 16]).half()
    assert (module(x) == 0).all()
    allfinite.convert(module)
    exact = x.double() / x.double().square().mean().sqrt()
    torch.testing.assert_close(module(x).double(), exact, rtol=2**-10, atol=0)  # one rounding to fp16


def test_timm_s_norms():
    """All of timm's layer norms and RMS norms."""
    norm = pytest.importorskip("timm.layers.norm")
    for name in ("LayerNorm", "LayerNormFp32", "LayerNorm2d", "LayerNorm2dFp32", "RmsNorm", "RmsNormFp32", "RmsNorm2d"):
        assert len(allfinite.convert(getattr(norm, name)(16)).swapped) == 1, name
    assert len(allfinite.convert(norm.SimpleNorm(16)).left) == 1


def test_a_convnext_of_timm():
    """Channels-first norms inside a convolutional model."""
    timm = pytest.importorskip("timm")
    model = randomized(timm.models.convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5)).eval()
    x = torch.randn(1, 3, 64, 64)
    want = model(x)
    report = allfinite.convert(model)
    assert not report.left, str(report)
    assert sum("LayerNorm2d" in s.was for s in report.swapped) >= 4
    torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-3)  # fp32 sums in another order


@pytest.mark.parametrize(
    "path",
    [
        "llama.modeling_llama.LlamaRMSNorm",
        "t5.modeling_t5.T5LayerNorm",
        "gemma.modeling_gemma.GemmaRMSNorm",
        "mistral.modeling_mistral.MistralRMSNorm",
        "qwen3.modeling_qwen3.Qwen3RMSNorm",
        "sam2.modeling_sam2.Sam2LayerNorm",
        "vitdet.modeling_vitdet.VitDetLayerNorm",
    ],
)
def test_norms_of_transformers(path):
    """The norms of the common families, as transformers writes them."""
    transformers = pytest.importorskip("transformers")
    package, module, name = path.split(".")
    kind = getattr(getattr(getattr(transformers.models, package), module), name)
    norm = kind(16)
    report = allfinite.convert(norm)
    assert len(report.swapped) == 1, str(report)
