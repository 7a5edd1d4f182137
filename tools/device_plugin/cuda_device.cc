// A device type "cuda_like" for the CPU wheel of PaddlePaddle 3.x: its tensors live in the memory of an NVIDIA GPU.
//
// Paddle loads each library in the folder CUSTOM_DEVICE_ROOT when it is imported and asks InitPlugin for a table of
// functions. These are memory, copies, streams and events, each a call or two of the CUDA runtime. There are
// hardly any kernels (cuda_device_kernels.cc): Paddle computes on the CPU what it has no kernel for, and copies inputs
// and results. Operators of one's own find addresses in GPU memory, and a stream of Paddle's whose raw handle is a
// cudaStream_t.
//
//   CUSTOM_DEVICE_ROOT=$(python tools/device_plugin/build.py) python ...
//
// Without a driver or without a GPU the library loads and says that there are no devices.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "paddle/phi/backends/device_ext.h"

namespace {

char kCudaLike[] = "cuda_like";
char* device_type = kCudaLike;
char kSubDeviceType[] = "runtime only";

// What Paddle throws names neither the function nor CUDA's error, hence the line on stderr. A process that ends
// unloads CUDA before Paddle frees its last memory: that is not an error.
C_Status Report(cudaError_t error, const char* call) {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return C_SUCCESS;
  std::fprintf(stderr, "%s: %s: %s (%d)\n", device_type, call, cudaGetErrorString(error), static_cast<int>(error));
  cudaGetLastError();
  return error == cudaErrorMemoryAllocation ? C_FAILED : C_ERROR;
}

// Runs the call on a device and leaves the thread there, as Paddle's own GPU build does.
#define RETURN_ON(device, call)                                                                 \
  do {                                                                                          \
    const cudaError_t selected = cudaSetDevice((device)->id);                                   \
    return selected != cudaSuccess ? Report(selected, "cudaSetDevice") : Report((call), #call); \
  } while (false)

cudaStream_t Cuda(C_Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Cuda(C_Event event) { return reinterpret_cast<cudaEvent_t>(event); }

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no driver, or one that is too old: there are no devices
  return 0;
}

size_t Attribute(C_Device device, cudaDeviceAttr attribute) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device->id) == cudaSuccess ? static_cast<size_t>(value) : 0;
}

// Devices.

C_Status GetDeviceCount(size_t* count) {
  *count = static_cast<size_t>(DeviceCount());
  return C_SUCCESS;
}

C_Status GetDeviceList(size_t* devices) {
  for (int i = 0, count = DeviceCount(); i < count; ++i) devices[i] = static_cast<size_t>(i);
  return C_SUCCESS;
}

C_Status SetDevice(C_Device device) { return Report(cudaSetDevice(device->id), "cudaSetDevice"); }

C_Status GetDevice(C_Device device) { return Report(cudaGetDevice(&device->id), "cudaGetDevice"); }

C_Status SynchronizeDevice(C_Device device) { RETURN_ON(device, cudaDeviceSynchronize()); }

C_Status MemoryStats(C_Device device, size_t* total, size_t* free) { RETURN_ON(device, cudaMemGetInfo(free, total)); }

C_Status MinChunkSize(C_Device, size_t* bytes) {
  *bytes = 256;
  return C_SUCCESS;
}

C_Status ComputeCapability(C_Device device, size_t* number) {
  *number =
      Attribute(device, cudaDevAttrComputeCapabilityMajor) * 10 + Attribute(device, cudaDevAttrComputeCapabilityMinor);
  return C_SUCCESS;
}

C_Status RuntimeVersion(C_Device, size_t* number) {
  int version = 0;
  const cudaError_t error = cudaRuntimeGetVersion(&version);
  *number = static_cast<size_t>(version);
  return Report(error, "cudaRuntimeGetVersion");
}

C_Status DriverVersion(C_Device, size_t* number) {
  int version = 0;
  const cudaError_t error = cudaDriverGetVersion(&version);
  *number = static_cast<size_t>(version);
  return Report(error, "cudaDriverGetVersion");
}

C_Status MultiProcessors(C_Device device, size_t* number) {
  *number = Attribute(device, cudaDevAttrMultiProcessorCount);
  return C_SUCCESS;
}

C_Status ThreadsPerMultiProcessor(C_Device device, size_t* number) {
  *number = Attribute(device, cudaDevAttrMaxThreadsPerMultiProcessor);
  return C_SUCCESS;
}

C_Status ThreadsPerBlock(C_Device device, size_t* number) {
  *number = Attribute(device, cudaDevAttrMaxThreadsPerBlock);
  return C_SUCCESS;
}

C_Status GridSize(C_Device device, std::array<unsigned int, 3>* sizes) {
  *sizes = {static_cast<unsigned>(Attribute(device, cudaDevAttrMaxGridDimX)),
            static_cast<unsigned>(Attribute(device, cudaDevAttrMaxGridDimY)),
            static_cast<unsigned>(Attribute(device, cudaDevAttrMaxGridDimZ))};
  return C_SUCCESS;
}

C_Status Supported(C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}

// Streams and events. A stream is a cudaStream_t, an event a cudaEvent_t. Streams wait for the legacy default stream,
// as the one that Paddle's GPU build computes on does: the copies below that name no stream are ordered against them.

C_Status CreateStream(C_Device device, C_Stream* stream) {
  RETURN_ON(device, cudaStreamCreate(reinterpret_cast<cudaStream_t*>(stream)));
}

C_Status DestroyStream(C_Device device, C_Stream stream) { RETURN_ON(device, cudaStreamDestroy(Cuda(stream))); }

C_Status SynchronizeStream(C_Device device, C_Stream stream) { RETURN_ON(device, cudaStreamSynchronize(Cuda(stream))); }

C_Status Answer(cudaError_t error, const char* call) {
  if (error != cudaErrorNotReady) return Report(error, call);
  cudaGetLastError();
  return C_WARNING;  // anything but C_SUCCESS is "not yet"
}

C_Status QueryStream(C_Device device, C_Stream stream) {
  const cudaError_t selected = cudaSetDevice(device->id);
  return selected != cudaSuccess ? Report(selected, "cudaSetDevice")
                                 : Answer(cudaStreamQuery(Cuda(stream)), "cudaStreamQuery");
}

struct Callback {
  C_Device_st device;
  C_Stream stream;
  C_Callback function;
  void* user_data;
};

void CUDART_CB RunCallback(void* given) {
  const std::unique_ptr<Callback> callback(static_cast<Callback*>(given));
  C_Status status = C_SUCCESS;
  callback->function(&callback->device, callback->stream, callback->user_data, &status);
}

C_Status AddCallback(C_Device device, C_Stream stream, C_Callback function, void* user_data) {
  auto callback = std::make_unique<Callback>(Callback{*device, stream, function, user_data});
  const C_Status status = SetDevice(device);
  if (status != C_SUCCESS) return status;
  const cudaError_t error = cudaLaunchHostFunc(Cuda(stream), RunCallback, callback.get());
  if (error == cudaSuccess) callback.release();  // RunCallback owns it now
  return Report(error, "cudaLaunchHostFunc");
}

C_Status StreamWaitEvent(C_Device device, C_Stream stream, C_Event event) {
  RETURN_ON(device, cudaStreamWaitEvent(Cuda(stream), Cuda(event), 0));
}

C_Status CreateEvent(C_Device device, C_Event* event) {
  RETURN_ON(device, cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}

C_Status DestroyEvent(C_Device device, C_Event event) { RETURN_ON(device, cudaEventDestroy(Cuda(event))); }

C_Status RecordEvent(C_Device device, C_Stream stream, C_Event event) {
  RETURN_ON(device, cudaEventRecord(Cuda(event), Cuda(stream)));
}

C_Status SynchronizeEvent(C_Device device, C_Event event) { RETURN_ON(device, cudaEventSynchronize(Cuda(event))); }

C_Status QueryEvent(C_Device device, C_Event event) {
  const cudaError_t selected = cudaSetDevice(device->id);
  return selected != cudaSuccess ? Report(selected, "cudaSetDevice")
                                 : Answer(cudaEventQuery(Cuda(event)), "cudaEventQuery");
}

// Memory and copies. Paddle waits for its own stream before it calls a copy that names none.

C_Status Allocate(C_Device device, void** address, size_t bytes) { RETURN_ON(device, cudaMalloc(address, bytes)); }

C_Status Free(C_Device device, void* address, size_t) { RETURN_ON(device, cudaFree(address)); }

C_Status AllocateHost(C_Device device, void** address, size_t bytes) {
  RETURN_ON(device, cudaHostAlloc(address, bytes, cudaHostAllocPortable));
}

C_Status FreeHost(C_Device device, void* address, size_t) { RETURN_ON(device, cudaFreeHost(address)); }

C_Status Fill(C_Device device, void* address, unsigned char value, size_t bytes) {
  RETURN_ON(device, cudaMemset(address, value, bytes));
}

template <cudaMemcpyKind kind>
C_Status Copy(C_Device device, void* target, const void* source, size_t bytes) {
  RETURN_ON(device, cudaMemcpy(target, source, bytes, kind));
}

template <cudaMemcpyKind kind>
C_Status CopyOnStream(C_Device device, C_Stream stream, void* target, const void* source, size_t bytes) {
  RETURN_ON(device, cudaMemcpyAsync(target, source, bytes, kind, Cuda(stream)));
}

C_Status CopyPeer(C_Device target_device, C_Device source_device, void* target, const void* source, size_t bytes) {
  RETURN_ON(source_device, cudaMemcpyPeer(target, target_device->id, source, source_device->id, bytes));
}

C_Status CopyPeerOnStream(C_Device target_device, C_Device source_device, C_Stream stream, void* target,
                          const void* source, size_t bytes) {
  RETURN_ON(source_device,
            cudaMemcpyPeerAsync(target, target_device->id, source, source_device->id, bytes, Cuda(stream)));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  if (char* other = std::getenv("CUDA_LIKE_NAME")) device_type = other;  // for tests: a device of another maker
  params->device_type = device_type;
  params->sub_device_type = kSubDeviceType;

  C_DeviceInterface* table = params->interface;
  const size_t size = table->size;
  std::memset(static_cast<void*>(table), 0, sizeof(*table));
  table->size = size;

  table->get_device_count = GetDeviceCount;
  table->get_device_list = GetDeviceList;
  table->init_device = SetDevice;
  table->set_device = SetDevice;
  table->get_device = GetDevice;
  table->synchronize_device = SynchronizeDevice;
  table->device_memory_stats = MemoryStats;
  table->device_min_chunk_size = MinChunkSize;
  table->get_compute_capability = ComputeCapability;
  table->get_runtime_version = RuntimeVersion;
  table->get_driver_version = DriverVersion;
  table->get_multi_process = MultiProcessors;
  table->get_max_threads_per_mp = ThreadsPerMultiProcessor;
  table->get_max_threads_per_block = ThreadsPerBlock;
  table->get_max_grid_dim_size = GridSize;
  table->is_float16_supported = Supported;
  table->is_bfloat16_supported = Supported;

  table->create_stream = CreateStream;
  table->destroy_stream = DestroyStream;
  table->query_stream = QueryStream;
  table->synchronize_stream = SynchronizeStream;
  table->stream_add_callback = AddCallback;
  table->stream_wait_event = StreamWaitEvent;
  table->create_event = CreateEvent;
  table->destroy_event = DestroyEvent;
  table->record_event = RecordEvent;
  table->query_event = QueryEvent;
  table->synchronize_event = SynchronizeEvent;

  table->device_memory_allocate = Allocate;
  table->device_memory_deallocate = Free;
  table->host_memory_allocate = AllocateHost;
  table->host_memory_deallocate = FreeHost;
  table->device_memory_set = Fill;
  table->memory_copy_h2d = Copy<cudaMemcpyHostToDevice>;
  table->memory_copy_d2h = Copy<cudaMemcpyDeviceToHost>;
  table->memory_copy_d2d = Copy<cudaMemcpyDeviceToDevice>;
  table->memory_copy_p2p = CopyPeer;
  table->async_memory_copy_h2d = CopyOnStream<cudaMemcpyHostToDevice>;
  table->async_memory_copy_d2h = CopyOnStream<cudaMemcpyDeviceToHost>;
  table->async_memory_copy_d2d = CopyOnStream<cudaMemcpyDeviceToDevice>;
  table->async_memory_copy_p2p = CopyPeerOnStream;
}
