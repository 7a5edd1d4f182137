#include "new_tokens.h"

#include <algorithm>

#include "../common/element_type.h"
#include "../common/validate.h"
#include "cache_layout.h"
#include "paddle_kv/common/cuda_device.h"
#include "scale_argument.h"

namespace paddle_kv {
namespace {

void CheckFits(const StridedInput& tokens, const std::string& name, const CacheShape& shape,
               const std::string& cache_name) {
  CheckRank(tokens, name, 3, "[tokens, heads, head size]");
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

TokenWrite CheckKeyValueWrite(const KeyValueWrite& given, const paddle::Tensor& key_cache,
                              const paddle::Tensor& value_cache) {
  const CacheTensor keys = CheckCacheTensor(key_cache, "key_cache", LayoutNamed(given.layout, "layout", true));
  const CacheTensor values = CheckCacheTensor(value_cache, "value_cache", LayoutNamed(given.layout, "layout", false));
  if (keys.shape.blocks != values.shape.blocks || keys.shape.block_size != values.shape.block_size) {
    ThrowValueError("key_cache has " + std::to_string(keys.shape.blocks) + " blocks of " +
                    std::to_string(keys.shape.block_size) + " tokens, value_cache has " +
                    std::to_string(values.shape.blocks) + " of " + std::to_string(values.shape.block_size) +
                    "; both must agree");
  }
  CheckSameDevice(value_cache, "value_cache", key_cache, "key_cache");
  CheckFits(given.key, "key", keys.shape, "key_cache");
  CheckFits(given.value, "value", values.shape, "value_cache");
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
    ThrowDtypesDiffer("key_cache", key_cache.dtype(), "value_cache", value_cache.dtype());
  }
  if (given.kv_cache_dtype == "auto" && write.stored != write.plain) {
    ThrowValueError("key has dtype " + DtypeName(given.key.dtype) + ", key_cache has " + DtypeName(key_cache.dtype()) +
                    "; with kv_cache_dtype \"auto\" both must have the same");
  }
  write.parts[0] = {SourceOf(given.key), keys.place, keys.shape.heads, keys.shape.head_size, {}};
  write.parts[1] = {SourceOf(given.value), values.place, values.shape.heads, values.shape.head_size, {}};
  CheckTensorsApart({keys.memory, values.memory}, "key_cache and value_cache");
  CheckSlots(given.slot_mapping, CheckedProduct(keys.shape.blocks, keys.shape.block_size, "key_cache"),
             given.key.shape[0], "key", given.padded, key_cache, &write);
  return write;
}

HeadScale ScaleOf(const paddle::optional<paddle::Tensor>& tensor, float number, const std::string& name, int64_t heads,
                  const paddle::Tensor& cache) {
  HeadScale scale;
  scale.value = number;
  scale.pointer = CheckScale(tensor, name, heads, cache, "the cache");
  scale.stride_per_head = scale.pointer != nullptr && tensor->numel() > 1 ? 1 : 0;
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
                    (rows < write->tokens ? "; each slot needs a token" : "; set padded=True if the last are padding"));
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
    const SlotMemory memory = MemoryOfSlots(slots, write.tokens);
    read.resize(memory.bytes);
    LAUNCH_CUDA(where.device, CopyToHost(read.data(), memory.lowest, memory.bytes, where));
    slots.slots = read.data() + memory.first;
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
