// Stands in for libcudart under the device plugin, so that Paddle's side of it can be tried without a GPU. "Device"
// memory is mapped twice: at the address that Paddle gets nothing may be read or written, the copies go through the
// other one. What touches device memory on the CPU (an operator that takes a GPU tensor for a host tensor) ends with
// SIGSEGV at once, as it would with a GPU.
//
//   python tools/device_plugin/build.py --guarded
//
// It proves that nothing reads or writes device memory on the CPU, and that what cannot run says so. Kernels, streams
// and their order are not there: each call is over when it returns.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

struct Block {
  char* open;
  size_t bytes;
};
std::mutex mutex;
std::map<char*, Block> blocks;

// The address behind which the bytes may be touched.
void* Open(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto* given = static_cast<char*>(const_cast<void*>(address));
  auto found = blocks.upper_bound(given);
  if (found == blocks.begin()) return given;
  --found;
  const auto offset = static_cast<size_t>(given - found->first);
  return offset < found->second.bytes ? found->second.open + offset : given;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused by the stand-in"; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = size_t{8} << 30;
  *total = size_t{16} << 30;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return *stream = static_cast<cudaStream_t>(std::malloc(1)), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return std::free(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { return function(data), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = static_cast<cudaEvent_t>(std::malloc(1)), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return std::free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaMalloc(void** address, size_t size) {
  constexpr size_t kPage = 4096;
  const size_t bytes = (size + kPage - 1) / kPage * kPage;
  const int file = memfd_create("device memory", 0);
  if (file < 0) return cudaErrorMemoryAllocation;
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) return close(file), cudaErrorMemoryAllocation;
  void* closed = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
  void* open = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (closed == MAP_FAILED || open == MAP_FAILED) return cudaErrorMemoryAllocation;
  const std::lock_guard<std::mutex> lock(mutex);
  blocks[static_cast<char*>(closed)] = {static_cast<char*>(open), bytes};
  return *address = closed, cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return cudaErrorInvalidValue;
  munmap(address, found->second.bytes);
  munmap(found->second.open, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) { return *address = std::malloc(size), cudaSuccess; }
cudaError_t cudaFreeHost(void* address) { return std::free(address), cudaSuccess; }
cudaError_t cudaMemset(void* address, int value, size_t size) {
  return std::memset(Open(address), value, size), cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  return std::memcpy(Open(target), Open(source), size), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(target, source, size, kind);
}
cudaError_t cudaMemcpyPeer(void* target, int, const void* source, int, size_t size) {
  return cudaMemcpy(target, source, size, cudaMemcpyDefault);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t) {
  return cudaMemcpy(target, source, size, cudaMemcpyDefault);
}
}
