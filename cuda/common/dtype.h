// Storage types of the CUDA kernels, as the argument structs name them. Torch-free.
#pragma once

namespace allfinite::cuda {

enum class DType : int { kFloat16, kBFloat16, kFloat32 };

}  // namespace allfinite::cuda
