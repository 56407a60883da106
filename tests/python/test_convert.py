"""allfinite.convert: what it keeps, what it leaves alone, and that it can be undone."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import allfinite
import allfinite._C
from support.bounds import assert_same_bits
from support.vit import EagerAttention, FusedAttention, ViT, randomized


class OwnNorm(nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) * 2


class RenamedNorm(nn.LayerNorm):
    """Keeps torch's forward, and has a constructor and a method of its own."""

    def __init__(self, dim):
        super().__init__(dim, eps=1e-6)
        self.calls = 0

    def width(self):
        return self.normalized_shape[0]


class OwnMultihead(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def encoder(layers=2, **arguments):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **arguments)
    return randomized(nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(16), enable_nested_tensor=False))


def swapped_names(report):
    return {s.name for s in report.swapped}


def test_report_says_what_was_swapped_and_what_was_not():
    """Each module that convert looks for is in the report, under its name, with the reason if it was left."""
    model = nn.ModuleDict(
        {"vit": ViT(depth=12), "own": OwnNorm(4), "attention": OwnMultihead(8, 2), "bn": nn.BatchNorm1d(4)}
    )
    report = allfinite.convert(model)
    assert len(report.swapped) == 12 * 3 + 1
    differs = "its forward, tried on random input, differs from a layer norm and from an RMS norm by 0.4 of its size"
    assert {(left.name, left.reason) for left in report.left} == {
        ("own", differs),
        ("attention", "it has a forward of its own"),
    }
    assert str(report).splitlines() == [
        "allfinite.convert: 37 modules swapped, 2 left alone",
        "  swapped:",
        "    vit.blocks.*.norm1 (12)  torch.nn.LayerNorm -> allfinite.nn.LayerNorm",
        "    vit.blocks.*.attn (12)  support.vit.EagerAttention -> allfinite.scaled_dot_product_attention",
        "    vit.blocks.*.norm2 (12)  torch.nn.LayerNorm -> allfinite.nn.LayerNorm",
        "    vit.norm  torch.nn.LayerNorm -> allfinite.nn.LayerNorm",
        "  left alone:",
        f"    own  test_convert.OwnNorm: {differs}",
        "    attention  test_convert.OwnMultihead: it has a forward of its own",
    ]


def test_output_and_gradients_stay_what_they_were():
    """The swapped model computes the same function, forward and backward."""
    model, x = randomized(ViT(qk_norm=True)), torch.randn(3, 6, 32)
    before = model(x)
    gradients = torch.autograd.grad(before.square().sum(), list(model.parameters()))
    allfinite.convert(model)
    after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)  # fp32 sums in another order
    again = torch.autograd.grad(after.square().sum(), list(model.parameters()))
    torch.testing.assert_close(again, gradients, rtol=1e-3, atol=1e-3)


def test_objects_flags_and_names_are_kept():
    """An optimizer, a checkpoint and a frozen parameter must not notice."""
    model = ViT().half()
    model.blocks[0].eval()
    model.norm.weight.requires_grad_(False)
    model.norm.register_buffer("seen", torch.ones(2), persistent=False)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    flags = {name: m.training for name, m in modules.items()}
    keys = list(model.state_dict())
    allfinite.convert(model)
    assert all(model.get_submodule(name) is m for name, m in modules.items())
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert {name: m.training for name, m in model.named_modules()} == flags
    assert list(model.state_dict()) == keys
    assert not model.norm.weight.requires_grad
    assert model.norm.seen.tolist() == [1, 1]
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (nn.LayerNorm(8), (torch.randn(3, 8),)),
        (nn.RMSNorm(8), (torch.randn(3, 8),)),
        (nn.RMSNorm(8, eps=1e-3, elementwise_affine=False), (torch.randn(3, 8),)),
        (nn.Softmax(-1), (torch.randn(3, 8),)),
        (
            nn.CrossEntropyLoss(torch.rand(8), ignore_index=2, reduction="sum", label_smoothing=0.1),
            (torch.randn(3, 8), torch.tensor([1, 2, 3])),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_each_kind_of_torch(module, arguments):
    """Swapped for the module of the same name with the same settings; copied, pickled and taken back."""
    want, kind, text = module(*arguments), type(module), repr(module)
    report = allfinite.convert(module)
    assert type(module) is getattr(allfinite.nn, kind.__name__)
    assert repr(module) == text
    torch.testing.assert_close(module(*arguments), want)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(other(*arguments).detach(), module(*arguments).detach())
    report.undo()
    assert type(module) is kind


def test_hooks_of_every_kind_go_on_firing():
    """Forward, pre-forward, backward and state-dict hooks on swapped modules and on their submodules."""
    model, fired = ViT(depth=1), []
    attn, norm = model.blocks[0].attn, model.norm
    attn.qkv.register_forward_hook(lambda *_: fired.append("qkv"))
    attn.register_forward_pre_hook(lambda *_: fired.append("attn pre"))
    attn.register_forward_hook(lambda *_: fired.append("attn"))
    attn.register_full_backward_hook(lambda *_: fired.append("attn backward"))
    norm.register_forward_hook(lambda *_: fired.append("norm"))
    norm.register_full_backward_pre_hook(lambda *_: fired.append("norm backward pre"))
    norm.register_state_dict_pre_hook(lambda *_: fired.append("state"))
    norm.weight.register_hook(lambda g: fired.append("weight"))
    allfinite.convert(model)
    assert fired == []  # the trial of convert itself fires none
    model(torch.randn(2, 4, 32)).sum().backward()
    model.state_dict()
    assert fired[:4] == ["attn pre", "qkv", "attn", "norm"]
    assert sorted(fired[4:]) == ["attn backward", "norm backward pre", "state", "weight"]


def test_state_dicts_go_both_ways():
    """A checkpoint from before loads after, and from after loads into a plain model."""
    plain, converted = randomized(ViT()), ViT()
    allfinite.convert(converted)
    converted.load_state_dict(plain.state_dict())
    back = ViT()
    back.load_state_dict(converted.state_dict())
    x = torch.randn(2, 5, 32)
    assert_same_bits(back(x).detach(), plain(x).detach())
    torch.testing.assert_close(converted(x), plain(x), rtol=1e-4, atol=1e-5)


def test_undo_restores_the_very_model():
    """After undo the outputs have the bits of before, the objects are the same, and their classes too."""
    model, x = randomized(nn.Sequential(encoder(), ViT(dim=16))), torch.randn(2, 5, 16)
    classes = {name: (m, type(m)) for name, m in model.named_modules()}
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    want = model(x)
    report = allfinite.convert(model)
    assert any(type(m) is not kind for m, kind in classes.values())
    report.undo()
    assert {name: (m, type(m)) for name, m in model.named_modules()} == classes
    for name, module in model.named_modules():
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
    assert_same_bits(model(x).detach(), want.detach())
    report.undo()  # nothing left to do


def test_undo_refuses_when_something_else_changed_the_class():
    """Half an undo would be worse than none."""
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    report = allfinite.convert(model)
    model[1].__class__ = OwnNorm
    with pytest.raises(RuntimeError, match="expected a module of class LayerNorm, which convert gave"):
        report.undo()
    assert type(model[0]) is allfinite.nn.LayerNorm


def test_a_second_call_finds_nothing_to_do():
    """Idempotent: nothing is wrapped twice, and the second report says that it was done before."""
    model = nn.Sequential(encoder(), ViT(dim=16), RenamedNorm(16))
    first = allfinite.convert(model)
    classes = [type(m) for m in model.modules()]
    second = allfinite.convert(model)
    assert [type(m) for m in model.modules()] == classes
    assert not second.swapped
    assert not second.switched_off
    assert set(second.already) == swapped_names(first)
    second.undo()
    assert [type(m) for m in model.modules()] == classes


def test_a_module_that_is_used_twice_is_swapped_once():
    """Shared modules stay shared, and the report names both places."""
    norm = nn.LayerNorm(4)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)})
    report = allfinite.convert(model)
    assert model["a"] is model["b"][0] is norm
    (entry,) = report.swapped
    assert (entry.name, entry.also) == ("a", ("b.0",))
    assert "a is also b.0" in str(report)


def test_the_model_itself_may_be_one():
    """The root has no parent to hang a new object into: it changes in place, and the report says so."""
    model = nn.LayerNorm(64)
    report = allfinite.convert(model)
    assert type(model) is allfinite.nn.LayerNorm
    assert model(torch.randn(2, 64) * 1e30).isfinite().all()
    assert "(the model itself)  torch.nn.LayerNorm -> allfinite.nn.LayerNorm" in str(report)
    attention = EagerAttention()
    assert swapped_names(allfinite.convert(attention)) == {""}


def test_subclass_without_a_forward_is_swapped_and_stays_itself():
    """It is still an instance of its class, with its attributes and methods."""
    module, x = RenamedNorm(64), torch.randn(3, 64)
    want = module(x)
    allfinite.convert(module)
    assert isinstance(module, RenamedNorm)
    assert module.width() == 64
    assert module.calls == 0
    torch.testing.assert_close(module(x), want)
    assert module(x * 1e30).isfinite().all()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_converted_model_stay_converted(way):
    """EMA copies and whole-model checkpoints: classes that were made at run time must survive them."""
    model = randomized(nn.Sequential(ViT(depth=1, attention=FusedAttention), RenamedNorm(5)))
    allfinite.convert(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert other[1].weight is not model[1].weight
    x = torch.randn(2, 4, 32)
    assert_same_bits(other(x).detach(), model(x).detach())


def test_modules_whose_forward_or_class_is_not_torch_s_are_left():
    """A forward put on the object would win over a class; a parametrization has changed the class already."""
    patched, parametrized = nn.LayerNorm(4), nn.LayerNorm(4)
    patched.forward = lambda x: x
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    report = allfinite.convert(nn.ModuleDict({"patched": patched, "parametrized": parametrized}))
    assert not report.swapped
    assert {left.name: left.reason for left in report.left} == {
        "patched": "its forward was replaced on the object",
        "parametrized": "it is parametrized, which changes its class as well",
    }


def test_attention_of_other_shapes_is_named():
    """What convert does not know is said, not passed over."""

    class SomeSelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    (left,) = allfinite.convert(nn.Sequential(SomeSelfAttention())).left
    assert left.name == "0"
    assert "not attention of a shape that convert knows" in left.reason


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torchscript_is_left():
    """A compiled part has no Python forward to swap; the report names its layer norm, the rest is converted."""
    compiled = torch.jit.script(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    model = nn.Sequential(nn.LayerNorm(4), compiled)
    report = allfinite.convert(model)
    assert [entry.name for entry in report.swapped] == ["0"]
    assert [(entry.name, "TorchScript" in entry.reason) for entry in report.left] == [("1.0", True)]


def test_an_error_leaves_the_model_as_it_was():
    """A class that cannot be derived from stops the walk: nothing may stay half converted without a report."""

    class Final(nn.LayerNorm):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    model = nn.Sequential(nn.LayerNorm(4), Final(4))
    with pytest.raises(TypeError, match="final"):
        allfinite.convert(model)
    assert type(model[0]) is nn.LayerNorm


def test_not_a_module():
    """A list of modules, or a state dict, is a mistake that says what came."""
    with pytest.raises(TypeError, match=r"allfinite\.convert: expected a torch\.nn\.Module, but got list"):
        allfinite.convert([nn.LayerNorm(4)])


def test_meta_and_other_devices():
    """A model without data converts; the trial of an attention module needs no device of the model's."""
    with torch.device("meta"):
        model = ViT()
    assert len(allfinite.convert(model).swapped) == 2 * 3 + 1
    assert model(torch.randn(2, 4, 32, device="meta")).shape == (2, 5)


def test_a_device_without_kernels_is_named():
    """On a device that this build has no kernel for, a swapped module would raise at its first call."""
    with FakeTensorMode():
        model = nn.LayerNorm(4, device="cuda")
        report = allfinite.convert(model)
    if allfinite._C.cuda_built():
        assert swapped_names(report) == {""}
    else:
        assert [left.reason for left in report.left] == ["it is on cuda, for which this build has no kernel"]


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 does not guard on the class of a module: convert first"
)
def test_a_compiled_model_notices():
    """torch.compile guards on the classes: after convert it must not go on running the former code."""
    model = nn.Sequential(nn.LayerNorm(64))
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 64) * 1e30
    assert not (compiled(x).std(1) > 0.5).all()
    allfinite.convert(model)
    assert (compiled(x).std(1) > 0.5).all()


# --- torch's own Transformer


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_transformer_encoder(training, padded, nested):
    """In train and eval mode, with padding, also where torch would take its fast path with nested tensors."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = randomized(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)).train(training)
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    arguments = {"src_key_padding_mask": padding} if padded else {}
    kept = ~padding if padded else torch.ones(3, 6, dtype=torch.bool)
    with torch.set_grad_enabled(training):
        want = model(x, **arguments)
        report = allfinite.convert(model)
        got = model(x, **arguments)
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=1e-4)
    assert len(report.swapped) == 6
    assert {s.attribute for s in report.switched_off} >= {"activation_relu_or_gelu"}
    assert ("use_nested_tensor" in str(report)) == nested


def test_the_fast_path_does_not_bypass_swapped_modules():
    """In eval mode without gradients torch computes past every forward: its norm would overflow."""
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 3, 16) * 1e30
    with torch.no_grad():
        first = model(x)
        allfinite.convert(model)
        second = model(x)
    assert not torch.equal(first, second)
    assert second.isfinite().all()
    exact = x.double() + model.self_attn.double()(*[nn.LayerNorm(16).double()(x.double())] * 3)[0]
    model.double()
    exact = exact + model._ff_block(nn.LayerNorm(16).double()(exact))
    torch.testing.assert_close(second.double(), exact, rtol=1e-6, atol=1e24)


def test_f7_padding_that_masks_a_whole_sequence():
    """F7: an empty sequence in the batch gives NaN in torch's encoder, and through it NaN gradients everywhere."""
    model = encoder()
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[2] = True
    allfinite.convert(model)
    model(x, src_key_padding_mask=padding).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_whole_transformer():
    """Encoder and decoder with cross attention and causal masks."""
    model = randomized(nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True))
    source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    arguments = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4), "tgt_is_causal": True}
    want = model(source, target, **arguments)
    report = allfinite.convert(model)
    assert len(report.swapped) == 3 + 5 + 2
    torch.testing.assert_close(model(source, target, **arguments), want, rtol=1e-4, atol=1e-4)
