// AllFinite's ops for C++. Each is a torch op as well (torch.ops.allfinite.<name>) with autograd, autocast
// and meta kernels, on CPU and CUDA. The numeric contract (F1 to F7) is in docs/numerics.md.
#pragma once
#include "allfinite/ops/attention.h"
#include "allfinite/ops/gradients.h"
#include "allfinite/ops/losses.h"
#include "allfinite/ops/norms.h"
#include "allfinite/ops/softmax.h"
