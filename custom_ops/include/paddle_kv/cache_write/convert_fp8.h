// Converts a run of elements between a plain format and an 8-bit float format.
#pragma once

#include <cstdint>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/element_type.h"
#include "paddle_kv/common/status.h"

namespace paddle_kv {

// One scale: `pointer` where it lies in memory (the device's, for a CUDA launcher), or `value` where that is null.
struct Scale {
  const float* pointer = nullptr;
  float value = 1.0f;
};

// codes[i] = Quantize(source[i], scale). `plain` is the format of the source, `format` that of the codes.
void EncodeFp8Cpu(const void* source, std::uint8_t* codes, std::int64_t count, ElementType plain, ElementType format,
                  const Scale& scale);
Status EncodeFp8Cuda(const void* source, std::uint8_t* codes, std::int64_t count, ElementType plain, ElementType format,
                     const Scale& scale, const DeviceStream& where);

// target[i] = Dequantize(codes[i], scale), rounded to `plain`.
void DecodeFp8Cpu(const std::uint8_t* codes, void* target, std::int64_t count, ElementType format, ElementType plain,
                  const Scale& scale);
Status DecodeFp8Cuda(const std::uint8_t* codes, void* target, std::int64_t count, ElementType format, ElementType plain,
                     const Scale& scale, const DeviceStream& where);

}  // namespace paddle_kv
