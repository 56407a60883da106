"""Bad input of scaled_dot_product_attention."""

import math
from dataclasses import replace

import torch
from torch.nn.attention.bias import causal_upper_left

import allfinite
from bad_calls.case import Refusals, nested

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 4, 7, 8)
NESTED = nested(Q[0, 0])
DENSE = "to be a dense (strided) tensor, but got a nested one"
BIAS = causal_upper_left(5, 6)
bad = Refusals("allfinite::scaled_dot_product_attention", allfinite.scaled_dot_product_attention)

OF_BOTH_SCHEMAS = [
    bad("integers", Q.long(), K, K).raises(
        TypeError, "expected query to be float16, bfloat16, float32 or float64, but got Long"
    ),
    bad("none", None, K, K).raises(TypeError, "expected query to be a tensor, but got none"),
    bad("key's dtype", Q, K.half(), K).raises(TypeError, "expected key of query's dtype, Float, but got Half"),
    bad("value's dtype", Q, K, K.double()).raises(TypeError, "expected value of query's dtype, Float, but got Double"),
    bad("sparse key", Q, K.to_sparse(), K).raises(
        NotImplementedError, "expected key to be a dense (strided) tensor, but got layout Sparse"
    ),
    bad("key's device", Q, K.to("meta"), K).raises(
        RuntimeError, "expected key on the device of query, cpu, but got meta"
    ),
    bad("one dimension", Q[0, 0, 0], K, K).raises(
        ValueError, "expected query of shape (..., length, size), but got [8]"
    ),
    bad("key's size", Q, K[..., :6], K).raises(
        ValueError, "expected query and key of one size in the last dimension, but got [2, 4, 5, 8] and [2, 4, 7, 6]"
    ),
    bad("value's length", Q, K, K[..., :3, :]).raises(
        ValueError, "expected key and value of one length, but got [2, 4, 7, 8] and [2, 4, 3, 8]"
    ),
    bad("heads", Q, K[:, :2], K).raises(
        ValueError,
        "expected query, key and value whose leading dimensions broadcast, but got [2, 4, 5, 8], [2, 2, 7, 8] and "
        "[2, 4, 7, 8]",
    ),
    bad("heads that do not divide", Q, K[:, :3], K[:, :3], enable_gqa=True).raises(
        ValueError, "expected query heads to be a multiple of key heads, but got 4 and 3"
    ),
    bad("heads of key and value", Q, K[:, :2], K, enable_gqa=True).raises(
        ValueError, "expected key and value of one number of heads, but got 2 and 4"
    ),
    bad("no heads", Q[0, 0], K[0, 0], K[0, 0], enable_gqa=True).raises(
        ValueError, "expected (..., heads, length, size) with enable_gqa, but got [5, 8]"
    ),
    bad("integer mask", Q, K, K, attn_mask=torch.ones(5, 7, dtype=torch.uint8)).raises(
        TypeError, "expected attn_mask to be bool (True: takes part) or floating (added), but got Byte"
    ),
    bad("mask's length", Q, K, K, attn_mask=torch.zeros(5, 6)).raises(
        ValueError, "expected attn_mask to broadcast to [2, 4, 5, 7], but got [5, 6]"
    ),
    bad("mask of more dimensions", Q, K, K, attn_mask=torch.zeros(3, 2, 4, 5, 7)).raises(
        ValueError, "expected attn_mask to broadcast to [2, 4, 5, 7], but got [3, 2, 4, 5, 7]"
    ),
    bad("mask's device", Q, K, K, attn_mask=torch.zeros(5, 7, device="meta")).raises(
        RuntimeError, "expected attn_mask on the device of query, cpu, but got meta"
    ),
    bad("mask and causal", Q, K, K, attn_mask=torch.zeros(5, 7), is_causal=True).raises(
        RuntimeError, "expected attn_mask or is_causal, but got both"
    ),
    bad("negative dropout", Q, K, K, dropout_p=-0.1).raises(ValueError, "expected dropout_p in [0, 1], but got -0.1"),
    bad("too much dropout", Q, K, K, dropout_p=1.5).raises(ValueError, "expected dropout_p in [0, 1], but got 1.5"),
    bad("NaN dropout", Q, K, K, dropout_p=math.nan).raises(ValueError, "expected dropout_p in [0, 1], but got nan"),
    bad("NaN scale", Q, K, K, scale=math.nan).raises(ValueError, "expected a finite scale, but got nan"),
    bad("infinite scale", Q, K, K, scale=math.inf).raises(ValueError, "expected a finite scale, but got inf"),
    bad("negative softcap", Q, K, K, softcap=-1.0).raises(ValueError, "expected softcap >= 0 and finite, but got -1"),
    bad("NaN softcap", Q, K, K, softcap=math.nan).raises(ValueError, "expected softcap >= 0 and finite, but got nan"),
    bad("window of one", Q, K, K, window=(1,)).raises(
        ValueError, "expected window to be (left, right), each >= 0, or -1 for unbounded, but got [1]"
    ),
    bad("window below -1", Q, K, K, window=(-2, 0)).raises(
        ValueError, "expected window to be (left, right), each >= 0, or -1 for unbounded, but got [-2, 0]"
    ),
    bad("nested", NESTED, K, K).raises(NotImplementedError, f"expected query {DENSE}"),
    bad("nested mask", Q, K, K, NESTED).raises(NotImplementedError, f"expected attn_mask {DENSE}"),
]

CASES = [
    *OF_BOTH_SCHEMAS,
    *(
        replace(case, name=f"{case.name}, with lse", keywords={**case.keywords, "return_lse": True})
        for case in OF_BOTH_SCHEMAS
    ),
    bad("a mask, with dropout", Q, K, K, torch.zeros(5, 6), 0.5).raises(
        ValueError, "expected attn_mask to broadcast to [2, 4, 5, 7], but got [5, 6]"
    ),
    bad("causal twice", Q, K, K, BIAS, is_causal=True).raises(
        ValueError, "expected a CausalBias or is_causal, but got both"
    ),
    bad("causal of other lengths", Q, K, K, BIAS).raises(
        ValueError, "expected a CausalBias of lengths (5, 7), but got (5, 6)"
    ),
]
