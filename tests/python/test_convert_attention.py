"""allfinite.convert and attention in timm's shape: what is taken for it, and that it is finite afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allfinite
from support.bounds import assert_same_bits
from support.vit import Block, EagerAttention, FusedAttention, ViT, randomized


def converted(module):
    report = allfinite.convert(module)
    assert not report.left, str(report)
    return module


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", [EagerAttention, FusedAttention], ids=lambda k: k.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_output_as_before(kind, qk_norm, training):
    """Eager and fused, with norms of queries and keys, in both modes."""
    module, x = randomized(kind(qk_norm=qk_norm)).train(training), torch.randn(2, 9, 32)
    want = module(x)
    torch.testing.assert_close(converted(module)(x), want, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("fused", [False, True])
def test_mask_argument(fused):
    """attn_mask keeps its meaning: added if float, True takes part if bool."""
    module, x = randomized(FusedAttention(fused_attn=fused)), torch.randn(2, 5, 32)
    allowed = torch.rand(2, 1, 5, 5) > 0.4
    allowed[..., 0] = True
    additive = torch.randn(5, 5).masked_fill(~allowed, -torch.inf)
    want = module(x, additive)
    converted(module)
    torch.testing.assert_close(module(x, attn_mask=additive), want, rtol=1e-4, atol=1e-5)
    only_mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(module(x, allowed), module(x, only_mask))


def test_dropouts_act_in_training():
    """attn_drop acts on the weights and proj_drop on the output, in training only; their p may change later."""
    module, x = randomized(EagerAttention(drop=0.5)), torch.randn(2, 6, 32)
    converted(module)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    module.proj_drop.p, module.attn_drop.p = 0.0, 1.0
    torch.testing.assert_close(module(x), module.proj.bias.expand(2, 6, 32))
    module.proj_drop.p = 1.0
    assert torch.equal(module(x), torch.zeros(2, 6, 32))


def test_f1_finite_where_the_fp16_original_is_not():
    """F1: q . k > 65504: the stored logit is inf and the softmax NaN; converted, the run stays finite and right."""
    model = randomized(Block())
    with torch.no_grad():
        model.attn.qkv.weight.mul_(100)
    model.half()
    x = torch.randn(2, 7, 32).half()
    assert not model(x).isfinite().all()
    allfinite.convert(model)
    y = model(x)
    assert y.isfinite().all()
    (y.float().sum() * 1e-4).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_f1_under_autocast_as_in_training():
    """F1: the same under torch.autocast in fp16, with fp32 parameters."""
    model, x = randomized(ViT()), torch.randn(2, 7, 32)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(100)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not model(x).isfinite().all()
        allfinite.convert(model)
        y = model(x)
    assert y.isfinite().all()
    assert y.dtype == torch.float16
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_compiles_without_a_break():
    """A converted model goes through torch.compile(fullgraph=True), forward and backward."""
    model, x = randomized(ViT(depth=1)), torch.randn(2, 5, 32)
    allfinite.convert(model)
    want = torch.autograd.grad(model(x).sum(), model.norm.weight)[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), model.norm.weight)[0], want)


def test_the_trial_leaves_no_trace():
    """No hook fires, no random number is drawn, no gradient, attribute or mode changes."""
    module = EagerAttention(drop=0.1)
    fired = []
    for child in module.modules():
        child.register_forward_hook(lambda *_: fired.append(1))
    state, before = torch.get_rng_state(), {k: v.clone() for k, v in module.state_dict().items()}
    attributes = {name: dict(vars(m)) for name, m in module.named_modules()}
    report = allfinite.convert(module)
    assert len(report.swapped) == 1
    assert report.swapped[0].note.startswith("hooks on attn_drop no longer run")
    assert fired == []
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert_same_bits(value, before[name])
    for name, m in module.named_modules():
        assert vars(m) == attributes[name]


def test_the_trial_is_not_fooled_by_a_projection_of_zeros():
    """A block that starts as the identity hides any difference, so the trial brings weights of its own."""

    class Other(EagerAttention):
        def forward(self, x):
            q, k, v = self.heads(x)
            return self.finish((q @ k.transpose(-2, -1)).relu(), v)

    module = Other()
    nn.init.zeros_(module.proj.weight)
    (left,) = allfinite.convert(module).left
    assert "differs from attention" in left.reason


# --- what is not taken for attention: each differs from it in one thing


class WrongScale(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.finish((q @ k.transpose(-2, -1) * 0.5).softmax(-1), v)


class Cosine(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.finish((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1), v)


class Transposed(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.finish((k @ q.mT * self.scale).softmax(-1), v)


class ReturnsWeights(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT * self.scale).softmax(-1)
        return self.finish(weights, v), weights


class KeepsWeights(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        self.last_weights = (q @ k.mT * self.scale).softmax(-1)
        return self.finish(self.last_weights, v)


class DropsTheOutput(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        out = self.attn_drop((q @ k.mT * self.scale).softmax(-1) @ v) + v
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class ForgetsTheDropout(EagerAttention):
    def forward(self, x):
        q, k, v = self.heads(x)
        out = (q @ k.mT * self.scale).softmax(-1) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class TakesMore(EagerAttention):
    def forward(self, x, rel_pos_bias=None):
        return super().forward(x)


class NeedsMore(EagerAttention):
    def forward(self, x, attn_mask):
        return super().forward(x)


class Table(EagerAttention):
    def __init__(self):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.zeros(3))


class Pooling(EagerAttention):
    def __init__(self):
        super().__init__()
        self.sr = nn.Conv1d(32, 32, 2)


class Temperature(EagerAttention):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(())


class Raises(EagerAttention):
    def forward(self, x):
        raise RuntimeError("needs 49 tokens")


class GroupedHeads(EagerAttention):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 64)


LEFT = {
    WrongScale: "differs from attention by",
    Cosine: "differs from attention by",
    Transposed: "differs from attention by",
    ReturnsWeights: "gave a tuple, not a tensor",
    KeepsWeights: "stored something in last_weights",
    DropsTheOutput: "differs from attention by",
    ForgetsTheDropout: "with attn_drop at 1, differs from attention by",
    TakesMore: "its forward takes 'rel_pos_bias', which is not of the known shape",
    NeedsMore: "its forward takes 'attn_mask', which is not of the known shape",
    Table: "it has parameters or buffers of its own: relative_position_bias_table",
    Pooling: "it has submodules that are not of the known shape: sr",
    Temperature: "scale is a Tensor, not a number",
    Raises: "raised RuntimeError: needs 49 tokens",
    GroupedHeads: "qkv gives 64 features, which is not 3 x 4 heads of what proj takes, 32",
}


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_other_mathematics_is_left_alone(kind):
    """Swapping one of these would change the model in silence."""
    module = kind()
    report = allfinite.convert(module)
    assert not report.swapped
    assert type(module) is kind
    (left,) = report.left
    assert LEFT[kind] in left.reason


def test_timm_itself():
    """A ViT of timm, where timm is installed."""
    timm = pytest.importorskip("timm")
    model = randomized(timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2)).eval()
    x = torch.randn(1, 3, 224, 224)
    want = model(x)
    report = allfinite.convert(model)
    assert len(report.swapped) == 2 * 3 + 1, str(report)
    torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-3)
