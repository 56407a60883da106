// How a list of tensors becomes a list of memory pieces, and how shared memory is found (flat_list.h).
#include "ops/flat_list.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <utility>

#include "ops/cpu_dtype.h"

namespace allfinite {

FlatList::FlatList(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {
  int64_t end = 0;
  ends_.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    ends_.push_back(end += piece.bytes());
  }
}

// Dimensions in the order of memory, merged where they follow one another; with `distinct`, expanded ones (stride 0)
// count once. A conjugate or negated view is its memory: scaling, magnitudes and zeros know no sign.
FlatList::Piece FlatList::piece_of(const at::Tensor& tensor, bool distinct) {
  const auto real = c10::toRealValueType(tensor.scalar_type());
  const int64_t parts = tensor.is_complex() ? 2 : 1;
  Piece piece;
  piece.data = static_cast<char*>(distinct ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()));
  piece.count = tensor.numel() * parts;
  piece.itemsize = static_cast<int64_t>(c10::elementSize(real));
  piece.dtype = cpu_dtype(real);
  if (tensor.is_non_overlapping_and_dense()) {
    return piece;
  }
  std::vector<Dim> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && !(distinct && tensor.stride(d) == 0)) {
      dims.push_back({tensor.size(d), tensor.stride(d) * parts});
    }
  }
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  if (parts == 2) {
    dims.push_back({2, 1});
  }
  piece.count = 1;
  for (const Dim& dim : dims) {
    piece.count *= dim.size;
    if (!piece.dims.empty() && piece.dims.back().stride == dim.size * dim.stride) {
      piece.dims.back() = {piece.dims.back().size * dim.size, dim.stride};
    } else {
      piece.dims.push_back(dim);
    }
  }
  if (piece.dims.size() == 1 && piece.dims[0].stride == 1) {
    piece.dims.clear();
  }
  return piece;
}

char* FlatList::Piece::memory_end() const {
  int64_t last = dims.empty() ? count - 1 : 0;
  for (const Dim& dim : dims) {
    last += (dim.size - 1) * dim.stride;
  }
  return data + (last + 1) * itemsize;
}

// False only where no two indices can mean the same location: each stride steps over all that lies within.
bool FlatList::Piece::may_repeat() const {
  int64_t reach = 0;
  for (size_t d = dims.size(); d-- > 0;) {
    if (dims[d].stride <= reach) {
      return true;
    }
    reach += (dims[d].size - 1) * dims[d].stride;
  }
  return false;
}

FlatList FlatList::all_elements(at::TensorList tensors) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != 0) {
      pieces.push_back(piece_of(tensor, false));
    }
  }
  return FlatList(std::move(pieces));
}

// Whether no two tensors lie in one storage: then no memory is shared, and nothing need be sorted. An open-addressing
// table of at least twice as many places as tensors.
static bool separate_storages(at::TensorList tensors) {
  size_t places = 16;
  while (places < 2 * tensors.size()) {
    places *= 2;
  }
  std::vector<const void*> table(places);
  for (const at::Tensor& tensor : tensors) {
    const void* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    // Objects lie 16 bytes or more apart; the product spreads them over the upper bits.
    auto place = static_cast<size_t>((reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15ull >> 20);
    while (table[place & (places - 1)] != nullptr) {
      if (table[place++ & (places - 1)] == storage) {
        return false;
      }
    }
    table[place & (places - 1)] = storage;
  }
  return true;
}

FlatList FlatList::distinct_memory(const char* op, at::TensorList tensors) {
  std::vector<Piece> pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != 0) {
      pieces.push_back(piece_of(tensor, true));
    }
  }
  const auto repeats = [](const Piece& piece) { return piece.may_repeat(); };
  if (separate_storages(tensors) && std::none_of(pieces.begin(), pieces.end(), repeats)) {
    return FlatList(std::move(pieces));
  }
  const auto by_address = [](const Piece& a, const Piece& b) { return a.data < b.data; };
  if (!std::is_sorted(pieces.begin(), pieces.end(), by_address)) {
    std::stable_sort(pieces.begin(), pieces.end(), by_address);
  }
  pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());

  std::vector<Piece> distinct;
  distinct.reserve(pieces.size());
  for (size_t begin = 0; begin < pieces.size();) {
    size_t end = begin + 1;
    for (char* reach = pieces[begin].memory_end(); end < pieces.size() && pieces[end].data < reach; ++end) {
      reach = std::max(reach, pieces[end].memory_end());
    }
    if (end == begin + 1 && !pieces[begin].may_repeat()) {
      distinct.push_back(std::move(pieces[begin]));
    } else {
      resolve_sharing(op, pieces.data() + begin, pieces.data() + end, distinct);
    }
    begin = end;
  }
  return FlatList(std::move(distinct));
}

// Pieces that lie within one another, as two column ranges of one matrix do: kept where no location is met twice,
// otherwise replaced by the contiguous stretches of all they touch. Rare, so a map of the memory is good enough.
void FlatList::resolve_sharing(const char* op, const Piece* begin, const Piece* end, std::vector<Piece>& out) {
  char* const base = begin->data;
  char* limit = base;
  int64_t unit = begin->itemsize;
  for (const Piece* piece = begin; piece != end; ++piece) {
    limit = std::max(limit, piece->memory_end());
    if (piece->dtype != begin->dtype || (piece->data - base) % begin->itemsize != 0) {
      unit = 1;
    }
  }
  std::vector<bool> touched(static_cast<size_t>((limit - base) / unit));
  bool repeats = false;
  for (const Piece* piece = begin; piece != end; ++piece) {
    const int64_t units = piece->itemsize / unit;
    piece->visit(0, piece->count, [&](const Run& run) {
      for (int64_t i = 0; i < run.count; ++i) {
        const int64_t first = (static_cast<char*>(run.data) - base) / unit + i * run.stride * units;
        for (int64_t u = first; u < first + units; ++u) {
          repeats = repeats || touched[static_cast<size_t>(u)];
          touched[static_cast<size_t>(u)] = true;
        }
      }
    });
  }
  if (!repeats) {
    out.insert(out.end(), begin, end);
    return;
  }
  TORCH_CHECK_VALUE(unit == begin->itemsize, op,
                    ": expected entries that share memory to share whole numbers of one dtype, but got entries that "
                    "overlap otherwise");
  for (auto from = touched.begin(); (from = std::find(from, touched.end(), true)) != touched.end();) {
    const auto to = std::find(from, touched.end(), false);
    Piece stretch;
    stretch.data = base + (from - touched.begin()) * unit;
    stretch.count = to - from;
    stretch.itemsize = unit;
    stretch.dtype = begin->dtype;
    out.push_back(std::move(stretch));
    from = to;
  }
}

}  // namespace allfinite
