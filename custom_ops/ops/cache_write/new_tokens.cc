#include "new_tokens.h"

#include <algorithm>
#include <cmath>

#include "../common/element_type.h"
#include "../common/validate.h"
#include "paddle_kv/common/cuda_device.h"

namespace paddle_kv {
namespace {

// A cache of one of the layouts, taken apart.
struct CacheShape {
  int64_t blocks;
  int64_t heads;
  int64_t block_size;
  int64_t head_size;
  int64_t packed;  // elements of a group: x of packed keys, 1 of packed values, 0 where a row is one piece
};

CacheShape ShapeOf(const paddle::Tensor& cache, const std::string& name, const std::string& layout, bool is_key) {
  CheckCache(cache, name);
  const auto shape = cache.shape();
  const std::string have = name + " has shape " + ShapeText(shape) + "; layout \"" + layout + "\" expects ";
  if (layout == "packed" && is_key) {
    if (shape.size() != 5) ThrowValueError(have + "[blocks, heads, head size / x, block size, x]");
    return {shape[0], shape[1], shape[3], CheckedProduct(shape[2], shape[4], name), shape[4]};
  }
  if (shape.size() != 4) {
    ThrowValueError(have + (layout == "HND"   ? "[blocks, heads, block size, head size]"
                            : layout == "NHD" ? "[blocks, block size, heads, head size]"
                                              : "[blocks, heads, head size, block size]"));
  }
  if (layout == "HND") return {shape[0], shape[1], shape[2], shape[3], 0};
  if (layout == "NHD") return {shape[0], shape[2], shape[1], shape[3], 0};
  return {shape[0], shape[1], shape[3], shape[2], 1};
}

RowPlace PlaceOf(const paddle::Tensor& cache, const CacheShape& shape, const std::string& layout) {
  const auto item_bytes = static_cast<int64_t>(phi::SizeOf(cache.dtype()));
  const int64_t row_bytes = shape.head_size * item_bytes;
  RowPlace place{};
  place.data = BytesOf(cache);
  place.block_size = shape.block_size;
  place.block_stride = shape.heads * shape.block_size * row_bytes;
  place.head_stride = shape.block_size * row_bytes;
  place.token_stride = row_bytes;
  place.group_bytes = row_bytes;
  place.group_stride = row_bytes;
  if (layout == "NHD") {
    place.token_stride = shape.heads * row_bytes;
    place.head_stride = row_bytes;
  } else if (shape.packed > 0) {
    place.group_bytes = shape.packed * item_bytes;
    place.token_stride = place.group_bytes;
    place.group_stride = shape.block_size * place.group_bytes;
  }
  return place;
}

void CheckFits(const StridedInput& tokens, const std::string& name, const CacheShape& shape,
               const std::string& cache_name, const std::string& layout) {
  CheckRank(tokens, name, 3, "[tokens, heads, head size]");
  if (layout == "packed" && shape.packed > 1 && tokens.shape[2] % shape.packed != 0) {
    ThrowValueError(name + " has head size " + std::to_string(tokens.shape[2]) + "; layout \"packed\" with x = " +
                    std::to_string(shape.packed) + " (the last dimension of " + cache_name + ") expects a multiple of x");
  }
  if (tokens.shape[1] != shape.heads || tokens.shape[2] != shape.head_size) {
    ThrowValueError(name + " has shape " + ShapeText(tokens.shape) + ", " + cache_name + " has " +
                    std::to_string(shape.heads) + " heads of size " + std::to_string(shape.head_size) +
                    "; both must agree");
  }
}

SourceRows SourceOf(const StridedInput& tokens) {
  return {tokens.data, tokens.strides[0], tokens.strides[1], tokens.strides[2]};
}

}  // namespace

void CheckOnCpuOrGpu(const paddle::Tensor& cache, const std::string& name) {
  if (!OnGpu(cache) && !cache.is_cpu()) {
    ThrowValueError(name + " is in pinned memory; a cache on the GPU (or, without one, on the CPU) is expected");
  }
}

TokenWrite CheckKeyValueWrite(const KeyValueWrite& given, const paddle::Tensor& key_cache,
                              const paddle::Tensor& value_cache) {
  const std::string& layout = given.layout;
  if (layout != "HND" && layout != "NHD" && layout != "packed") {
    ThrowValueError("layout = \"" + layout + "\" must be \"HND\", \"NHD\" or \"packed\"");
  }
  const CacheShape key_shape = ShapeOf(key_cache, "key_cache", layout, true);
  const CacheShape value_shape = ShapeOf(value_cache, "value_cache", layout, false);
  if (key_shape.blocks != value_shape.blocks || key_shape.block_size != value_shape.block_size) {
    ThrowValueError("key_cache has " + std::to_string(key_shape.blocks) + " blocks of " +
                    std::to_string(key_shape.block_size) + " tokens, value_cache has " +
                    std::to_string(value_shape.blocks) + " of " + std::to_string(value_shape.block_size) +
                    "; both must agree");
  }
  CheckOnCpuOrGpu(key_cache, "key_cache");
  if (key_cache.place() != value_cache.place()) {
    ThrowValueError("key_cache and value_cache are on different devices; both must be on one");
  }
  CheckFits(given.key, "key", key_shape, "key_cache", layout);
  CheckFits(given.value, "value", value_shape, "value_cache", layout);
  if (given.key.shape[0] != given.value.shape[0]) {
    ThrowValueError("key has " + std::to_string(given.key.shape[0]) + " tokens, value has " +
                    std::to_string(given.value.shape[0]) + "; both must have the same number");
  }
  CheckBeside(given.key, "key", key_cache, "key_cache");
  CheckBeside(given.value, "value", key_cache, "key_cache");
  if (given.key.dtype != given.value.dtype) {
    ThrowValueError("key has dtype " + DtypeName(given.key.dtype) + ", value has " + DtypeName(given.value.dtype) +
                    "; both must have the same");
  }

  TokenWrite write{};
  write.part_count = 2;
  write.plain = PlainTypeOf(given.key.dtype, "key");
  write.stored = CacheTypeOf(key_cache, "key_cache", given.kv_cache_dtype);
  if (CacheTypeOf(value_cache, "value_cache", given.kv_cache_dtype) != write.stored) {
    ThrowValueError("key_cache and value_cache differ in dtype; both must have the same");
  }
  if (given.kv_cache_dtype == "auto" && write.stored != write.plain) {
    ThrowValueError("key has dtype " + DtypeName(given.key.dtype) + ", key_cache has " + DtypeName(key_cache.dtype()) +
                    "; with kv_cache_dtype \"auto\" both must have the same");
  }
  write.parts[0] = {SourceOf(given.key), PlaceOf(key_cache, key_shape, layout), key_shape.heads, key_shape.head_size, {}};
  write.parts[1] = {SourceOf(given.value), PlaceOf(value_cache, value_shape, layout), value_shape.heads,
                    value_shape.head_size, {}};
  CheckApart({{BytesOf(key_cache), key_shape.blocks * write.parts[0].cache.block_stride},
              {BytesOf(value_cache), value_shape.blocks * write.parts[1].cache.block_stride}},
             "key_cache and value_cache");
  CheckSlots(given.slot_mapping, CheckedProduct(key_shape.blocks, key_shape.block_size, "key_cache"),
             given.key.shape[0], "key", given.padded, key_cache, &write);
  return write;
}

HeadScale CheckScale(const GivenScale& given, const std::string& name, int64_t heads, ElementType stored,
                     const paddle::Tensor& cache) {
  HeadScale scale;
  if (given.tensor.data == nullptr) {
    scale.value = static_cast<float>(given.number);
    if (!(scale.value > 0.0f) || std::isinf(scale.value)) {
      ThrowValueError(name + " = " + std::to_string(given.number) + " must be a positive finite float32");
    }
    return scale;
  }
  if (!IsQuantized(stored)) ThrowValueError(name + " is given, but kv_cache_dtype \"auto\" has no scales");
  const StridedInput& tensor = given.tensor;
  if (tensor.dtype != paddle::DataType::FLOAT32) {
    ThrowValueError(name + " has dtype " + DtypeName(tensor.dtype) + "; float32 is expected");
  }
  CheckBeside(tensor, name, cache, "the cache");
  const bool one = tensor.Rank() == 0 || (tensor.Rank() == 1 && tensor.shape[0] == 1);
  if (!one && !(tensor.Rank() == 1 && tensor.shape[0] == heads)) {
    ThrowValueError(name + " has shape " + ShapeText(tensor.shape) + "; one value or [" + std::to_string(heads) +
                    "], one for each head, is expected");
  }
  scale.pointer = reinterpret_cast<const float*>(tensor.data);
  scale.stride_per_head = one ? 0 : tensor.strides[0] / static_cast<int64_t>(sizeof(float));
  return scale;
}

void CheckSlots(const StridedInput& slot_mapping, int64_t slot_limit, int64_t rows, const std::string& rows_name,
                bool padded, const paddle::Tensor& cache, TokenWrite* write) {
  CheckRank(slot_mapping, "slot_mapping", 1, "[tokens]");
  const bool is_int64 = slot_mapping.dtype == paddle::DataType::INT64;
  if (!is_int64 && slot_mapping.dtype != paddle::DataType::INT32) {
    ThrowValueError("slot_mapping has dtype " + DtypeName(slot_mapping.dtype) + "; int32 or int64 is expected");
  }
  CheckBeside(slot_mapping, "slot_mapping", cache, "the cache");
  write->tokens = slot_mapping.shape[0];
  if (rows < write->tokens || (rows > write->tokens && !padded)) {
    ThrowValueError(rows_name + " has " + std::to_string(rows) + " tokens, slot_mapping has " +
                    std::to_string(write->tokens) +
                    (rows < write->tokens ? "; a slot without a token" : "; set padded=True if the last are padding"));
  }
  write->slots = {slot_mapping.data, slot_mapping.strides[0] / slot_mapping.ItemBytes(), slot_limit, is_int64};
}

void CheckSlotValues(const TokenWrite& write, const paddle::Tensor& cache, const DeviceStream& where) {
  if (!CheckRequested() || write.tokens == 0) return;
  TokenSlots slots = write.slots;
  std::vector<std::uint8_t> read;
  if (OnGpu(cache)) {
    bool capturing = false;
    LAUNCH_CUDA(where.device, StreamIsCapturing(where, &capturing));
    if (capturing) return;  // nothing may wait for a stream that is being captured
    const std::size_t item_bytes = slots.is_int64 ? sizeof(int64_t) : sizeof(std::int32_t);
    read.resize(((write.tokens - 1) * slots.stride + 1) * item_bytes);
    LAUNCH_CUDA(where.device, CopyToHost(read.data(), slots.slots, static_cast<int64_t>(read.size()), where));
    slots.slots = read.data();
  }
  std::vector<std::pair<int64_t, int64_t>> named;  // slot, token
  for (int64_t token = 0; token < write.tokens; ++token) {
    const int64_t slot = IntegerAt(slots.slots, slots.is_int64, token * slots.stride);
    if (slot >= slots.limit) {
      ThrowIndexError("slot_mapping[" + std::to_string(token) + "] = " + std::to_string(slot) + " must be in [0, " +
                      std::to_string(slots.limit) + "), or negative to skip the token");
    }
    if (slot >= 0) named.emplace_back(slot, token);
  }
  std::sort(named.begin(), named.end());
  for (std::size_t i = 1; i < named.size(); ++i) {
    if (named[i].first == named[i - 1].first) {
      ThrowValueError("slot_mapping[" + std::to_string(named[i - 1].second) + "] and slot_mapping[" +
                      std::to_string(named[i].second) + "] both name slot " + std::to_string(named[i].first) +
                      "; each slot may be written only once");
    }
  }
}

}  // namespace paddle_kv
