// What the operators share that write new tokens into caches: their checks, and the kernels' description of the write.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/launch.h"
#include "paddle_kv/cache_write/write_tokens.h"
#include "strided_input.h"

namespace paddle_kv {

// The caches of keys and values in one of the three layouts. ValueError unless they fit the tokens.
struct KeyValueWrite {
  StridedInput key;
  StridedInput value;
  StridedInput slot_mapping;
  std::string layout;
  std::string kv_cache_dtype;
  bool padded;
};
TokenWrite CheckKeyValueWrite(const KeyValueWrite& given, const paddle::Tensor& key_cache,
                              const paddle::Tensor& value_cache);

// The scale of a part: the tensor ([], [1] or one entry per head) or, where it is absent, the number.
HeadScale ScaleOf(const paddle::optional<paddle::Tensor>& tensor, float number, const std::string& name, int64_t heads,
                  const paddle::Tensor& cache);

// Fills in slots and token count. `rows` is the length of the tensor called `rows_name`.
void CheckSlots(const StridedInput& slot_mapping, int64_t slot_limit, int64_t rows, const std::string& rows_name,
                bool padded, const paddle::Tensor& cache, TokenWrite* write);

// Under PADDLE_KV_CHECK=1 reads the slots back: IndexError for one beyond the caches, ValueError for one named twice.
void CheckSlotValues(const TokenWrite& write, const paddle::Tensor& cache, const DeviceStream& where);

}  // namespace paddle_kv
