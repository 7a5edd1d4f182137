// As much of the driver as the library looks up, see driver_entry.cuh beside this.
#pragma once

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUpointer_attribute { CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11, CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12 };
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct FakeContext*;
using CUstream = struct FakeStream*;
