// The only place that includes Paddle: the light set of its headers, which compiles in a second, and the macro that
// registers an operator. Every glue file includes this first.
#pragma once

// Paddle's build adds PADDLE_WITH_CUDA to host files when a .cu file is listed; its headers then want cuBLAS and cuDNN.
#undef PADDLE_WITH_CUDA

#include "paddle/common/ddim.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/tensor.h"
#include "paddle/phi/core/enforce.h"

// As the serving projects of this field define it: "static_op_" keeps operators of plugins apart from Paddle's own.
#ifndef PD_BUILD_STATIC_OP
#define PD_BUILD_STATIC_OP(name) PD_BUILD_OP(static_op_##name)
#endif

namespace paddle_kv {
#if PADDLE_KV_PADDLE_MAJOR >= 3
using PaddleError = ::common::enforce::EnforceNotMet;
#else
using PaddleError = ::phi::enforce::EnforceNotMet;
#endif
}  // namespace paddle_kv
