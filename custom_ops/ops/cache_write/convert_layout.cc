// convert_layout: a whole cache in another layout.
#include "../common/allocate.h"
#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "cache_layout.h"
#include "paddle_kv/cache_write/move_tokens.h"

namespace paddle_kv {
namespace {

constexpr int64_t kPackedBytes = 16;

bool IsKey(const std::string& kind) {
  if (kind != "key" && kind != "value") ThrowValueError("kind = \"" + kind + "\" must be \"key\" or \"value\"");
  return kind == "key";
}

bool IsPacked(Layout layout) { return layout == Layout::kPackedKey || layout == Layout::kPackedValue; }

// The x of a packed key cache that is to be made.
int64_t PackedX(const CacheShape& shape, Layout target, int64_t element_bytes) {
  const int64_t x = kPackedBytes / element_bytes;
  if (target == Layout::kPackedKey && shape.head_size % x != 0) {
    ThrowValueError("target_layout \"packed\" keeps " + std::to_string(x) +
                    " elements together, which do not divide the head size " + std::to_string(shape.head_size));
  }
  return x;
}

}  // namespace

std::vector<paddle::Tensor> ConvertLayout(const paddle::Tensor& cache, const std::string& kind,
                                          const std::string& source_layout, const std::string& target_layout,
                                          int64_t stream) {
  const bool is_key = IsKey(kind);
  Layout source = LayoutNamed(source_layout, "source_layout", is_key);
  Layout target = LayoutNamed(target_layout, "target_layout", is_key);
  const CacheTensor from = CheckCacheTensor(cache, "cache", source);
  const bool same = source == target;
  const int64_t x = same ? cache.shape().back() : PackedX(from.shape, target, from.element_bytes);
  paddle::Tensor converted = NewTensor(same ? cache.shape() : TensorShape(from.shape, target, x), cache.dtype(), cache);
  if (same) source = target = Layout::kHnd;  // bytes as they are: any layout with contiguous rows will do

  // The kernels know a cache and contiguous rows; here both are caches, and the packed one, if any, is the cache.
  const RowPlace source_place = PlaceOf(BytesOf(cache), from.shape, source, cache.shape().back(), from.element_bytes);
  const RowPlace target_place = PlaceOf(BytesOf(converted), from.shape, target, x, from.element_bytes);
  const bool to_cache = IsPacked(target);
  const TokenMove move{to_cache ? source_place : target_place,
                       to_cache ? target_place : source_place,
                       {},
                       from.shape.blocks,
                       from.shape.blocks * from.shape.block_size,
                       from.shape.heads,
                       from.shape.head_size,
                       from.element_bytes};
  if (OnGpu(cache)) {
    const DeviceStream where = WhereOf(cache, stream);
    if (to_cache) {
      LAUNCH_CUDA(where.device, ScatterTokensCuda(move, where));
    } else {
      LAUNCH_CUDA(where.device, GatherTokensCuda(move, where));
    }
  } else {
    to_cache ? ScatterTokensCpu(move) : GatherTokensCpu(move);
  }
  return {converted};
}

// Shape inference does not know the dtype, of which x depends: packed keys have unknown dimensions in a program.
std::vector<std::vector<int64_t>> ConvertLayoutShape(const std::vector<int64_t>& cache, const std::string& kind,
                                                     const std::string& source_layout,
                                                     const std::string& target_layout) {
  const bool is_key = IsKey(kind);
  const Layout source = LayoutNamed(source_layout, "source_layout", is_key);
  const Layout target = LayoutNamed(target_layout, "target_layout", is_key);
  if (source == target) return {cache};
  std::vector<int64_t> shape = TensorShape(ReadShape(cache, source, "cache"), target, 1);
  if (target == Layout::kPackedKey) shape[2] = shape[4] = -1;
  return {shape};
}

std::vector<paddle::DataType> ConvertLayoutDtype(const paddle::DataType& cache) { return {cache}; }

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_convert_layout)
    .Inputs({"cache"})
    .Outputs({"converted"})
    .Attrs({"kind: std::string", "source_layout: std::string", "target_layout: std::string", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ConvertLayout))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_kv::ConvertLayoutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_kv::ConvertLayoutDtype));
