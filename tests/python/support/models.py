"""Small models of the libraries that people train with, with random weights: nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import allfinite
from support.vit import randomized

TOKENS, VOCABULARY = 9, 50


@dataclass(frozen=True)
class Nested:
    """A library's model and how it is called.

    Attributes:
        build: the model, in eval mode; skips the test where the library is not installed.
        data: the arguments of one call, for a batch of two, the second one padded where the model knows padding.
        output: the tensor of interest in what a call gives.
        sharpen: scales the projections of queries and keys so that logits pass 65504 in fp16.
        by_name: attention is chosen by name, as transformers does.
        swaps: how many modules ``convert`` swaps.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], dict[str, Tensor]]
    output: Callable[[object], Tensor]
    sharpen: Callable[[nn.Module], None]
    by_name: bool
    swaps: int

    def run(self, model: nn.Module) -> Tensor:
        """One call, with floating point inputs in the model's dtype, which need a gradient as inside a larger model."""
        dtype = next(model.parameters()).dtype
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.data().items()}
        for name in ("src", "x"):
            if name in given:
                given[name].requires_grad_()
        return self.output(model(**given))

    def convert(self, model: nn.Module) -> allfinite.ConversionReport:
        """All of AllFinite that there is for the model."""
        if self.by_name:
            pytest.importorskip("allfinite.integrations.transformers")
            model.set_attn_implementation("allfinite")
        report = allfinite.convert(model)
        assert len(report.swapped) == self.swaps, str(report)
        assert not report.left, str(report)
        return report


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
    return randomized(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()


def _vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    vit = timm.models.vision_transformer.VisionTransformer
    model = vit(img_size=16, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=256, qk_norm=True)
    for block in model.blocks:
        block.attn.fused_attn = False  # timm's form for export and for older GPUs, which stores the logits
    return randomized(model).eval()


def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return randomized(transformers.BertModel(config)).eval()


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation="eager",
    )
    return randomized(transformers.LlamaForCausalLM(config)).eval()


def _scaled(*names: str) -> Callable[[nn.Module], None]:
    def sharpen(model: nn.Module) -> None:
        with torch.no_grad():
            scaled = [p for name, p in model.named_parameters() if name.endswith(names)]
            assert scaled
            for parameter in scaled:
                parameter.mul_(300)

    return sharpen


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    kept = torch.ones(2, TOKENS, dtype=torch.long)
    kept[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": kept}


def _features() -> dict[str, Tensor]:
    padding = torch.zeros(2, TOKENS)
    padding[1, 6:] = -torch.inf
    return {
        "src": torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(5)),
        "src_key_padding_mask": padding,
    }


def _images() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))}


NESTED = {
    "encoder": Nested(_encoder, _features, lambda out: out, _scaled("in_proj_weight"), False, 2 * 3),
    "timm_vit": Nested(_vit, _images, lambda out: out, _scaled("q_norm.weight", "k_norm.weight"), False, 2 * 5 + 1),
    "bert": Nested(
        _bert, _tokens, lambda out: out.last_hidden_state, _scaled("query.weight", "key.weight"), True, 2 * 2 + 1
    ),
    "llama": Nested(
        _llama, _tokens, lambda out: out.logits, _scaled("q_proj.weight", "k_proj.weight"), True, 2 * 2 + 1
    ),
}
