// A small Transformer encoder of torch::nn modules, with AllFinite's norm and attention inside.
#pragma once
#include <allfinite/allfinite.h>
#include <torch/torch.h>

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t dim, int64_t heads) : heads(heads) {
    norm1 = register_module("norm1", allfinite::nn::LayerNorm(std::vector<int64_t>{dim}));
    qkv = register_module("qkv", torch::nn::Linear(dim, 3 * dim));
    proj = register_module("proj", torch::nn::Linear(dim, dim));
    norm2 = register_module("norm2", allfinite::nn::LayerNorm(std::vector<int64_t>{dim}));
    mlp = register_module("mlp", torch::nn::Sequential(torch::nn::Linear(dim, 2 * dim), torch::nn::GELU(),
                                                       torch::nn::Linear(2 * dim, dim)));
  }

  // x: [batch, length, dim]
  torch::Tensor attention(const torch::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), dim = x.size(2);
    const auto parts = qkv->forward(x).view({batch, length, 3, heads, dim / heads}).permute({2, 0, 3, 1, 4});
    const auto mixed = allfinite::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    return proj->forward(mixed.transpose(1, 2).reshape({batch, length, dim}));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(norm1->forward(x));
    return x + mlp->forward(norm2->forward(x));
  }

  int64_t heads;
  allfinite::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr};
  torch::nn::Sequential mlp{nullptr};
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  TransformerImpl(int64_t vocabulary, int64_t length, int64_t dim, int64_t heads) {
    tokens = register_module("tokens", torch::nn::Embedding(vocabulary, dim));
    positions = register_parameter("positions", torch::randn({length, dim}));
    block = register_module("block", Block(dim, heads));
    norm = register_module("norm", allfinite::nn::LayerNorm(std::vector<int64_t>{dim}));
    head = register_module("head", torch::nn::Linear(dim, vocabulary));
  }

  // x: [batch, length] of token numbers; logits [batch, length, vocabulary]
  torch::Tensor forward(const torch::Tensor& x) {
    return head->forward(norm->forward(block->forward(tokens->forward(x) + positions)));
  }

  torch::nn::Embedding tokens{nullptr};
  torch::Tensor positions;
  Block block{nullptr};
  allfinite::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Transformer);
