"""Norms in the forms in which projects write them, for the tests of ``convert``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CastsBack(nn.Module):
    """Llama's: back to the input's dtype, then times the weight, which promotes."""

    def __init__(self, width=32, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def normalized(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * self.normalized(hidden_states).to(hidden_states.dtype)


class InInputDtype(CastsBack):
    """Weight in float32, then back to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.float() * self.normalized(x)).to(x.dtype)


class InWeightDtype(CastsBack):
    """T5's: a 16-bit weight decides, also over a float32 input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class OnePlusWeight(CastsBack):
    """Gemma's: the weight is kept as its distance from 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalized(x) * (1.0 + self.weight.float())).type_as(x)


class FlaggedLayerNorm(nn.LayerNorm):
    """timm's: a subclass of torch's with a fast path behind a flag, which under autocast gives a 16-bit result."""

    def __init__(self, width=32, fast=False):
        super().__init__(width, eps=1e-6)
        self.fast = fast

    def forward(self, x: Tensor) -> Tensor:
        if self.fast and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ChannelsFirst(nn.LayerNorm):
    """A layer norm over dimension 1 of images, by permutation: the result has the permuted strides."""

    def __init__(self, width=32):
        super().__init__(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ChannelsFirstByHand(nn.Module):
    """The same with sums over dimension 1: a contiguous input gives a contiguous result."""

    def __init__(self, width=32):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / ((x - mean).pow(2).mean(1, keepdim=True) + self.eps).sqrt()
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class WithoutBias(FlaggedLayerNorm):
    """A layer norm without bias, which keeps the flag under the name of the parameter."""

    def __init__(self, width=32):
        super().__init__(width)
        self.register_parameter("bias", None)
        del self.bias
        self.bias = False

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


# class: (op, offset, axis, keeps_layout, dtype of the output)
KNOWN = {
    CastsBack: ("rms_norm", 0, -1, False, "promoted"),
    InInputDtype: ("rms_norm", 0, -1, False, "input"),
    InWeightDtype: ("rms_norm", 0, -1, False, "weight"),
    OnePlusWeight: ("rms_norm", 1, -1, False, "input"),
    FlaggedLayerNorm: ("layer_norm", 0, -1, False, "input"),
    WithoutBias: ("layer_norm", 0, -1, False, "input"),
    ChannelsFirst: ("layer_norm", 0, 1, False, "input"),
    ChannelsFirstByHand: ("layer_norm", 0, 1, True, "promoted"),
}


class SampleVariance(FlaggedLayerNorm):
    def forward(self, x):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class EpsOutside(CastsBack):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class OtherEps(CastsBack):
    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class Gated(CastsBack):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x) * F.silu(gate)


class Stores(CastsBack):
    def forward(self, x):
        self.last = x
        return super().forward(x)


class Tuple(CastsBack):
    def forward(self, x):
        return super().forward(x), x


class InPlace(CastsBack):
    def forward(self, x):
        return x.copy_(super().forward(x))


class NoisyInTraining(CastsBack):
    def forward(self, x):
        return super().forward(x) * (1.5 if self.training else 1)


class Always32(CastsBack):
    def forward(self, x):
        return self.weight.float() * self.normalized(x)


class Raises(CastsBack):
    def forward(self, x):
        raise RuntimeError("needs 49 tokens")


class WithBuffer(CastsBack):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))


class WithScale(CastsBack):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class MyRMSNormOfOneWeight(CastsBack):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


class MyRMSNormWithoutWidth(nn.Module):
    eps = 1e-6

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)


class MyLayerNormWithoutEps(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalized_shape = (32,)

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape)


# class: the reason in the report
LEFT = {
    SampleVariance: "differs from a layer norm and from an RMS norm by",
    EpsOutside: "differs from a layer norm and from an RMS norm by",
    OtherEps: "differs from a layer norm and from an RMS norm by",
    Gated: "its forward takes (x, gate), not one tensor",
    Stores: "stored something in last",
    Tuple: "gave a tuple, not a tensor",
    InPlace: "changed its input",
    NoisyInTraining: "and differs there by 0.33 of its size",
    Always32: "gives float32 for float16 beside a weight in float16, which follows no known rule",
    Raises: "raised RuntimeError: needs 49 tokens",
    WithBuffer: "it has buffers: mean",
    WithScale: "it has parameters that a norm does not have: scale",
    MyRMSNormOfOneWeight: "its weight is one number",
    MyRMSNormWithoutWidth: "it has neither a weight nor a normalized_shape",
    MyLayerNormWithoutEps: "no number is in any of eps, variance_epsilon",
}
