// convert_fp8: whole tensors between plain formats and 8-bit floats.
#include "paddle_kv/cache_write/convert_fp8.h"

#include "../common/allocate.h"
#include "../common/element_type.h"
#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "../common/validate.h"
#include "scale_argument.h"

namespace paddle_kv {
namespace {

ElementType Fp8Named(const std::string& fp8_format) {
  if (fp8_format == "e4m3") return ElementType::kFp8E4m3;
  if (fp8_format == "e5m2") return ElementType::kFp8E5m2;
  ThrowValueError("fp8_format = \"" + fp8_format + "\" must be \"e4m3\" or \"e5m2\"");
}

paddle::DataType TargetDtype(const std::string& to, ElementType format) {
  if (to == "fp8") return Fp8Dtype(format);
  if (to == "float16" || to == "bfloat16" || to == "float32") return PlainDtypeNamed(to, "to");
  ThrowValueError("to = \"" + to + "\" must be \"fp8\", \"float16\", \"bfloat16\" or \"float32\"");
}

}  // namespace

std::vector<paddle::Tensor> ConvertFp8(const paddle::Tensor& source, const paddle::optional<paddle::Tensor>& scale,
                                       const std::string& to, const std::string& fp8_format, float scale_value,
                                       int64_t stream) {
  const ElementType format = Fp8Named(fp8_format);
  const paddle::DataType dtype = TargetDtype(to, format);
  const bool encodes = to == "fp8";
  const ElementType plain = encodes ? PlainTypeOf(source, "source") : PlainTypeNamed(to, "to");
  if (!encodes) CheckFp8Codes(source, "source", format);
  CheckAligned(BytesOf(source), static_cast<int64_t>(phi::SizeOf(source.dtype())), "source");
  const Scale by{CheckScale(scale, "scale", 0, source, "source"), scale_value};

  paddle::Tensor target = NewTensor(source.shape(), dtype, source);
  const int64_t count = source.numel();
  const std::uint8_t* from = BytesOf(source);
  std::uint8_t* const out = BytesOf(target);
  if (OnGpu(source)) {
    const DeviceStream where = WhereOf(source, stream);
    if (encodes) {
      LAUNCH_CUDA(where.device, EncodeFp8Cuda(from, out, count, plain, format, by, where));
    } else {
      LAUNCH_CUDA(where.device, DecodeFp8Cuda(from, out, count, format, plain, by, where));
    }
  } else if (encodes) {
    EncodeFp8Cpu(from, out, count, plain, format, by);
  } else {
    DecodeFp8Cpu(from, out, count, format, plain, by);
  }
  return {target};
}

std::vector<std::vector<int64_t>> ConvertFp8Shape(const std::vector<int64_t>& source,
                                                  const paddle::optional<std::vector<int64_t>>&) {
  return {source};
}

std::vector<paddle::DataType> ConvertFp8Dtype(const paddle::DataType&, const paddle::optional<paddle::DataType>&,
                                              const std::string& to, const std::string& fp8_format) {
  return {TargetDtype(to, Fp8Named(fp8_format))};
}

}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_convert_fp8)
    .Inputs({"source", paddle::Optional("scale")})
    .Outputs({"target"})
    .Attrs({"to: std::string", "fp8_format: std::string", "scale_value: float", "stream: int64_t"})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::ConvertFp8))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_kv::ConvertFp8Shape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_kv::ConvertFp8Dtype));
