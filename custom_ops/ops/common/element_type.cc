#include "element_type.h"

#include "errors.h"

namespace paddle_kv {
namespace {

// Paddle 3 has these dtypes; the headers of 2.6 have no names for them.
constexpr auto kPaddleFp8E4m3 = static_cast<paddle::DataType>(17);
constexpr auto kPaddleFp8E5m2 = static_cast<paddle::DataType>(18);

[[noreturn]] void ThrowDtype(const std::string& name, paddle::DataType dtype, const std::string& expected) {
  ThrowValueError(name + " has dtype " + DtypeName(dtype) + "; " + expected + " is expected");
}

}  // namespace

std::string DtypeName(paddle::DataType dtype) {
  if (dtype == kPaddleFp8E4m3) return "float8_e4m3fn";  // no enumerators in Paddle 2.6
  if (dtype == kPaddleFp8E5m2) return "float8_e5m2";
  switch (dtype) {
    case paddle::DataType::FLOAT16:
      return "float16";
    case paddle::DataType::BFLOAT16:
      return "bfloat16";
    case paddle::DataType::FLOAT32:
      return "float32";
    case paddle::DataType::FLOAT64:
      return "float64";
    case paddle::DataType::UINT8:
      return "uint8";
    case paddle::DataType::INT8:
      return "int8";
    case paddle::DataType::INT16:
      return "int16";
    case paddle::DataType::INT32:
      return "int32";
    case paddle::DataType::INT64:
      return "int64";
    case paddle::DataType::BOOL:
      return "bool";
    default:
      return "number " + std::to_string(static_cast<int>(dtype));
  }
}

void ThrowDtypesDiffer(const std::string& name, paddle::DataType dtype, const std::string& other_name,
                       paddle::DataType other_dtype) {
  ThrowValueError(name + " and " + other_name + " differ in dtype (" + DtypeName(dtype) + ", " +
                  DtypeName(other_dtype) + "); both must have the same");
}

ElementType PlainTypeOf(const paddle::Tensor& tensor, const std::string& name) {
  return PlainTypeOf(tensor.dtype(), name);
}

ElementType PlainTypeOf(paddle::DataType dtype, const std::string& name) {
  switch (dtype) {
    case paddle::DataType::FLOAT16:
      return ElementType::kFloat16;
    case paddle::DataType::BFLOAT16:
      return ElementType::kBFloat16;
    case paddle::DataType::FLOAT32:
      return ElementType::kFloat32;
    default:
      ThrowDtype(name, dtype, "float16, bfloat16 or float32");
  }
}

void CheckFp8Codes(const paddle::Tensor& codes, const std::string& name, ElementType type) {
  const bool is_e4m3 = type == ElementType::kFp8E4m3;
  if (codes.dtype() != paddle::DataType::UINT8 && codes.dtype() != (is_e4m3 ? kPaddleFp8E4m3 : kPaddleFp8E5m2)) {
    ThrowDtype(name, codes.dtype(), is_e4m3 ? "uint8 or float8_e4m3fn" : "uint8 or float8_e5m2");
  }
}

ElementType CacheTypeOf(const paddle::Tensor& cache, const std::string& name, const std::string& kv_cache_dtype) {
  const paddle::DataType dtype = cache.dtype();
  if (kv_cache_dtype == "auto") return PlainTypeOf(cache, name);
  const std::string what = name + " with kv_cache_dtype \"" + kv_cache_dtype + "\"";
  if (kv_cache_dtype == "fp8_e4m3" || kv_cache_dtype == "fp8_e5m2") {
    const ElementType type = kv_cache_dtype == "fp8_e4m3" ? ElementType::kFp8E4m3 : ElementType::kFp8E5m2;
    CheckFp8Codes(cache, what, type);
    return type;
  }
  if (kv_cache_dtype == "int8") {
    if (dtype != paddle::DataType::INT8) ThrowDtype(what, dtype, "int8");
    return ElementType::kInt8;
  }
  if (kv_cache_dtype == "paddle_uint8") {
    if (dtype != paddle::DataType::UINT8) ThrowDtype(what, dtype, "uint8");
    return ElementType::kPaddleUint8;
  }
  ThrowValueError("kv_cache_dtype = \"" + kv_cache_dtype +
                  "\" must be \"auto\", \"fp8_e4m3\", \"fp8_e5m2\", \"int8\" or \"paddle_uint8\"");
}

paddle::DataType Fp8Dtype(ElementType type) {
#if PADDLE_KV_PADDLE_MAJOR >= 3
  return type == ElementType::kFp8E4m3 ? kPaddleFp8E4m3 : kPaddleFp8E5m2;
#else
  (void)type;
  return paddle::DataType::UINT8;
#endif
}

paddle::DataType PlainDtypeNamed(const std::string& dtype, const std::string& argument) {
  switch (PlainTypeNamed(dtype, argument)) {
    case ElementType::kFloat16:
      return paddle::DataType::FLOAT16;
    case ElementType::kBFloat16:
      return paddle::DataType::BFLOAT16;
    default:
      return paddle::DataType::FLOAT32;
  }
}

ElementType PlainTypeNamed(const std::string& dtype, const std::string& argument) {
  if (dtype == "float16") return ElementType::kFloat16;
  if (dtype == "bfloat16") return ElementType::kBFloat16;
  if (dtype == "float32") return ElementType::kFloat32;
  ThrowValueError(argument + " = \"" + dtype + "\" must be \"float16\", \"bfloat16\" or \"float32\"");
}

}  // namespace paddle_kv
