// Paddle's dtypes as the number formats that the kernels know.
#pragma once

#include <string>

#include "paddle_api.h"
#include "paddle_kv/common/element_type.h"

namespace paddle_kv {

// "float16", "float8_e4m3fn", ... for messages.
std::string DtypeName(paddle::DataType dtype);

// ValueError for two tensors that should have the same dtype.
[[noreturn]] void ThrowDtypesDiffer(const std::string& name, paddle::DataType dtype, const std::string& other_name,
                                    paddle::DataType other_dtype);

// float32, float16 or bfloat16; ValueError naming the tensor for anything else.
ElementType PlainTypeOf(paddle::DataType dtype, const std::string& name);
ElementType PlainTypeOf(const paddle::Tensor& tensor, const std::string& name);

// What `cache` holds according to kv_cache_dtype ("auto": its own dtype, which then is a plain one). ValueError if the
// dtype of the tensor is not one that keeps this format: fp8 lies in uint8 or, in Paddle 3, in the fp8 dtype of that
// name; int8 in int8; paddle_uint8 in uint8.
ElementType CacheTypeOf(const paddle::Tensor& cache, const std::string& name, const std::string& kv_cache_dtype);

// ValueError unless the dtype of the tensor keeps codes of this 8-bit float.
void CheckFp8Codes(const paddle::Tensor& codes, const std::string& name, ElementType type);

// The dtype that keeps fp8 codes: Paddle 2.6 has none of its own, so uint8 there.
paddle::DataType Fp8Dtype(ElementType type);

// "float16", "bfloat16" or "float32" as a dtype and as a format; ValueError naming the argument for anything else.
paddle::DataType PlainDtypeNamed(const std::string& dtype, const std::string& argument);
ElementType PlainTypeNamed(const std::string& dtype, const std::string& argument);

}  // namespace paddle_kv
