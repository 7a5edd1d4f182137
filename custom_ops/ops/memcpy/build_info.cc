// build_info, cuda_version, has_memcpy_batch_async, device_of_pointers: questions. Answers are written into a tensor of
// the caller, on the CPU: allocating one here would need the heavy part of Paddle's headers.
#include <cstring>
#include <string>

#include "../common/guarded_kernel.h"
#include "../common/launch.h"
#include "paddle_kv/memcpy/memcpy_batch.h"
#include "paddle_kv_commit.h"  // written by setup_ops.py
#include "pointer_ranges.h"

#ifndef PADDLE_KV_BUILT_CUDA_ARCHS
#define PADDLE_KV_BUILT_CUDA_ARCHS ""
#endif

namespace paddle_kv {
namespace answers {  // named after the operators; what they ask has the same names outside

// Lines "name=value"; the rest of the tensor is zero.
void BuildInfo(paddle::Tensor& text) {
  const std::string lines =
      "architectures=" PADDLE_KV_BUILT_CUDA_ARCHS "\ncommit=" PADDLE_KV_BUILT_COMMIT "\ncompiler=" __VERSION__ "\n";
  if (static_cast<int64_t>(lines.size()) > text.numel()) ThrowValueError("text has too few bytes");
  std::memset(text.data(), 0, text.numel());
  std::memcpy(text.data(), lines.data(), lines.size());
}

void CudaVersion(paddle::Tensor& answer) {
  int version = 0;
  LAUNCH_CUDA(0, (version = BuiltCudaVersion(), Status{}));
  *answer.data<int64_t>() = version;
}

void HasMemcpyBatchAsync(paddle::Tensor& answer) {
  bool has = false;
  LAUNCH_CUDA(0, (has = ::paddle_kv::HasMemcpyBatchAsync(), Status{}));
  *answer.data<int64_t>() = has ? 1 : 0;
}

void DeviceOfPointers(paddle::Tensor& answer, const std::vector<int64_t>& pointer_list) {
  *answer.data<int64_t>() = ::paddle_kv::DeviceOfPointers(IdsAt(pointer_list));
}

}  // namespace answers
}  // namespace paddle_kv

PD_BUILD_STATIC_OP(paddle_kv_build_info)
    .Inputs({"text"})
    .Outputs({"text_out"})
    .SetInplaceMap({{"text", "text_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::answers::BuildInfo));

PD_BUILD_STATIC_OP(paddle_kv_cuda_version)
    .Inputs({"answer"})
    .Outputs({"answer_out"})
    .SetInplaceMap({{"answer", "answer_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::answers::CudaVersion));

PD_BUILD_STATIC_OP(paddle_kv_has_memcpy_batch_async)
    .Inputs({"answer"})
    .Outputs({"answer_out"})
    .SetInplaceMap({{"answer", "answer_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::answers::HasMemcpyBatchAsync));

PD_BUILD_STATIC_OP(paddle_kv_device_of_pointers)
    .Inputs({"answer"})
    .Outputs({"answer_out"})
    .Attrs({"pointer_list: std::vector<int64_t>"})
    .SetInplaceMap({{"answer", "answer_out"}})
    .SetKernelFn(GUARDED_KERNEL(paddle_kv::answers::DeviceOfPointers));
