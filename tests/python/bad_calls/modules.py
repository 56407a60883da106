"""Bad input of the modules and of convert: a module's forward names the op that refuses it."""

import torch

import allfinite
from allfinite.nn.attention_arguments import AttentionArgumentError
from bad_calls.case import BadCall, Refusals, nested

E, H, L, N = 8, 2, 5, 3
X = torch.ones(L, N, E)
NESTED = nested(torch.ones(2, E), torch.ones(3, E))
attend = Refusals("allfinite.nn.MultiheadAttention", allfinite.nn.MultiheadAttention(E, H))


def forward(name: str, module: torch.nn.Module, op: str, *arguments: object) -> BadCall:
    return Refusals(f"allfinite::{op}", module)(f"{type(module).__name__}: {name}", *arguments)


ATTENTION = [
    attend("dimensions", X[None], X, X).raises(
        AttentionArgumentError, "expected query of 2 or 3 dimensions, but got shape [1, 5, 3, 8]"
    ),
    attend("query's features", X[..., :3], X, X).raises(
        AttentionArgumentError, "expected query of 8 features, but got [5, 3, 3]"
    ),
    attend("key's features", X, X[..., :3], X).raises(
        AttentionArgumentError, "expected key of 8 features, but got [5, 3, 3]"
    ),
    attend("value's dimensions", X, X, X[:, 0]).raises(
        AttentionArgumentError, "expected value of 3 dimensions as query, but got [5, 8]"
    ),
    attend("lengths", X, X, X[:4]).raises(
        AttentionArgumentError, "expected key and value of one length and batch, but got [5, 3, 8] and [4, 3, 8]"
    ),
    attend("batches", X, X[:, :2], X[:, :2]).raises(
        AttentionArgumentError, "expected key of batch 3 as query, but got [5, 2, 8]"
    ),
    attend("padding's shape", X, X, X, key_padding_mask=torch.zeros(L, N, dtype=torch.bool)).raises(
        AttentionArgumentError, "expected key_padding_mask of shape [3, 5], but got [5, 3]"
    ),
    attend("padding's dtype", X, X, X, key_padding_mask=torch.zeros(N, L, dtype=torch.uint8)).raises(
        AttentionArgumentError, "expected key_padding_mask of bool or a floating dtype, but got torch.uint8"
    ),
    attend("mask's shape", X, X, X, attn_mask=torch.zeros(L, 4)).raises(
        AttentionArgumentError, "expected attn_mask of shape [5, 5] or [6, 5, 5], but got [5, 4]"
    ),
    attend("mask's dtype", X, X, X, attn_mask=torch.zeros(L, L).long()).raises(
        AttentionArgumentError, "expected attn_mask of bool or a floating dtype, but got torch.int64"
    ),
    attend("hint alone", X, X, X, is_causal=True).raises(
        AttentionArgumentError, "expected attn_mask with the hint is_causal=True, but got None"
    ),
    attend("nested", NESTED, NESTED, NESTED).raises(
        AttentionArgumentError, "expected dense tensors with a key_padding_mask, but got a nested tensor"
    ),
]

FLOATS = "expected input to be float16, bfloat16, float32 or float64, but got Long"
OTHERS = [
    forward("shape", allfinite.nn.LayerNorm(4), "layer_norm", X).raises(
        ValueError, "expected input to end in normalized_shape [4], but got input of shape [5, 3, 8]"
    ),
    forward("dtype", allfinite.nn.LayerNorm(8), "layer_norm", X.long()).raises(TypeError, FLOATS),
    forward("parameters", allfinite.nn.LayerNorm(8), "layer_norm", X.double()).raises(
        TypeError, "expected weight of input's dtype, Double, or float32 beside a 16-bit input, but got Float"
    ),
    forward("shape", allfinite.nn.RMSNorm(4), "rms_norm", X).raises(
        ValueError, "expected input to end in normalized_shape [4], but got input of shape [5, 3, 8]"
    ),
    forward("dtype", allfinite.nn.RMSNorm(8), "rms_norm", X.long()).raises(TypeError, FLOATS),
    forward("negative eps", allfinite.nn.RMSNorm(8, eps=-1.0), "rms_norm", X).raises(
        ValueError, "expected eps >= 0 and finite, but got -1"
    ),
    forward("dimension", allfinite.nn.Softmax(3), "softmax", X).raises(
        IndexError, "expected dim in [-3, 2], but got 3"
    ),
    forward("dtype", allfinite.nn.Softmax(1), "softmax", X.long()).raises(TypeError, FLOATS),
    forward("rows", allfinite.nn.CrossEntropyLoss(), "cross_entropy", X[0], torch.zeros(2).long()).raises(
        ValueError, "expected target of shape [3] (class indices) or [3, 8] (class probabilities), but got [2]"
    ),
    forward("class", allfinite.nn.CrossEntropyLoss(), "cross_entropy", X[0], torch.tensor([0, 1, 8])).raises(
        IndexError, "expected classes in [0, 8) or ignore_index -100, but got 8 at row 2"
    ),
    Refusals("allfinite.convert", allfinite.convert)("a tensor", X).raises(
        TypeError, "expected a torch.nn.Module, but got Tensor"
    ),
    Refusals("allfinite.convert", allfinite.convert)("a class", torch.nn.LayerNorm).raises(
        TypeError, "expected a torch.nn.Module, but got type"
    ),
]

CASES = [*ATTENTION, *OTHERS]
