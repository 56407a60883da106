"""A small Vision Transformer, its attention in timm's shape (`qkv`, `proj`, `num_heads`, `scale`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import recipe


class EagerAttention(nn.Module):
    """Self-attention with each product written out, as most model files do.

    Under autocast the product `q @ k^T` is stored in fp16 before the scale, so it is inf beyond 65504, and softmax
    makes NaN of inf - inf.

    Args:
        dim: width of the tokens, a multiple of `num_heads`.
        num_heads: number of heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over the tokens: (batch, tokens, dim) to the same shape."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        out = (self.attn_drop(weights) @ v).transpose(1, 2).reshape(batch, tokens, dim)
        projected: Tensor = self.proj_drop(self.proj(out))
        return projected


class SdpaAttention(EagerAttention):
    """The same attention through `torch.nn.functional.scaled_dot_product_attention`."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention over the tokens: (batch, tokens, dim) to the same shape."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        projected: Tensor = self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, dim)))
        return projected


class Block(nn.Module):
    """One pre-norm Transformer block: attention, then a two-layer MLP, both with a residual."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        hidden = recipe.MLP_RATIO * dim
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) to the same shape."""
        attended: Tensor = x + self.attn(self.norm1(x))
        mixed: Tensor = attended + self.mlp(self.norm2(attended))
        return mixed


class ViT(nn.Module):
    """Images to class scores: patches, blocks, mean over the tokens, linear head; DeiT's initialisation.

    Args:
        attention: class of the attention modules, `EagerAttention` or `SdpaAttention`.
        image_size: height and width of the images, a multiple of the patch size.
        classes: number of classes.
    """

    def __init__(self, attention: type[EagerAttention], image_size: int = 8, classes: int = 10) -> None:
        super().__init__()
        dim = recipe.DIM
        tokens = (image_size // recipe.PATCH) ** 2
        self.embed = nn.Linear(recipe.PATCH**2, dim)
        self.pos = nn.Parameter(torch.randn(1, tokens, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, attention(dim, recipe.HEADS)) for _ in range(recipe.DEPTH)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (batch, classes) for images of shape (batch, 1, height, width)."""
        size = recipe.PATCH
        patches = images.unfold(2, size, size).unfold(3, size, size).reshape(len(images), -1, size * size)
        x = self.embed(patches) + self.pos
        scores: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return scores
