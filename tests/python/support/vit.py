"""Attention in the forms in which projects write it, for the tests of ``convert``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EagerAttention(nn.Module):
    """timm's shape with the logits stored, as DeiT and its many descendants write it; scaled after the product."""

    def __init__(self, dim=32, num_heads=4, qk_norm=False, drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(dim // num_heads) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // num_heads) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def heads(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def finish(self, weights, v):
        out = self.attn_drop(weights) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.finish(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1), v)


class FusedAttention(EagerAttention):
    """timm's newer form: torch's fused op behind a flag, and an optional mask."""

    def __init__(self, *args, fused_attn=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.fused_attn = fused_attn

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        if self.fused_attn:
            p = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p)
            return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))
        scores = (q * self.scale) @ k.transpose(-2, -1)
        return self.finish((scores if attn_mask is None else scores + attn_mask).softmax(dim=-1), v)


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, dim=32, attention=EagerAttention, **kwargs):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention(dim, **kwargs)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Blocks, a last norm and a head, over tokens of ``dim`` features."""

    def __init__(self, dim=32, depth=2, **kwargs):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dim, **kwargs) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)).mean(1))


def randomized(module: nn.Module) -> nn.Module:
    """The module with every parameter random, so that no initial zero hides a difference."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2) + (p.dim() == 1))
    return module
