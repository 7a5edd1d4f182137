#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cuda.h"
#include "paddle_kv/common/driver_entry.cuh"

struct FakeEvent {
  std::mutex mutex;
  std::condition_variable passed;
  std::int64_t recordings = 0;
  std::int64_t last_passed = 0;
  int holders = 1;  // the handle, and what streams still have to do with it
};

struct FakeStream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool running = false;
  bool ending = false;
  bool made = false;  // by the library
  std::atomic<int> delay_us{0};
  std::thread thread;
};

thread_local int InsideFakeCuda::depth = 0;

namespace {

std::atomic<int> stream_queries{0};

thread_local cudaError_t last_error = cudaSuccess;
thread_local int set_device = 0;
thread_local bool has_set_device = false;  // or the runtime has done it: its context is the thread's
thread_local std::vector<int> pushed;      // devices whose contexts are before that
std::atomic<int> events_alive{0};
constexpr int kDevices = 4;
std::atomic<int> times_made_current[kDevices];
std::atomic<bool> has_context[kDevices];
std::atomic<int> times_retained[kDevices];
std::atomic<int> calls_of_threads[kDevices];
const std::thread::id main_thread = std::this_thread::get_id();

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<bool> capturing{false};
std::atomic<bool> capture_broken{false};
std::atomic<int> calls_since{0};
std::atomic<int> failing_call{-1};
std::atomic<cudaError_t> failing_error{cudaSuccess};
std::atomic<int> query_us{0};
std::atomic<cudaError_t> query_error{cudaSuccess};
std::atomic<int> ptx_architecture{90}, binary_architecture{90}, shared_bytes{227 << 10};
std::atomic<bool> streams_fail{false};
std::atomic<int> streams_alive{0};
std::atomic<int> strided_copies{0};
std::atomic<int> held_waits{0};
std::atomic<int> longest_delay_us{0};
std::atomic<int> delay_of_made_us{0};
std::mutex memory_mutex;
std::map<void*, std::size_t> memory_alive;

struct KnownMemory {
  std::size_t bytes;
  cudaPointerAttributes attributes;
};
std::map<std::uintptr_t, KnownMemory> known_memory;
std::atomic<bool> driver_tells_ranges{true};

// The allocation that the address lies in, or the end.
auto FindMemory(std::uintptr_t address) {
  auto found = known_memory.upper_bound(address);
  if (found == known_memory.begin()) return known_memory.end();
  --found;
  return address - found->first < found->second.bytes ? found : known_memory.end();
}

cudaError_t Leave(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

int CurrentDevice() { return pushed.empty() ? set_device : pushed.back(); }

// What nearly every call begins with: the runtime makes a context on the current device. An error: nothing is done.
cudaError_t Enter() {
  if (pushed.empty()) has_set_device = true;
  has_context[CurrentDevice()] = true;
  if (std::this_thread::get_id() == main_thread) return cudaSuccess;
  ++calls_of_threads[CurrentDevice()];
  return Leave(calls_since++ == failing_call ? failing_error.load() : cudaSuccess);
}

// The same of a call that another thread's capture may forbid.
cudaError_t EnterUnsafe() {
  if (capturing && capture_mode == cudaStreamCaptureModeGlobal) {
    capture_broken = true;
    return Leave(cudaErrorStreamCaptureUnsupported);
  }
  return Enter();
}

#define ENTER(enter)           \
  const InsideFakeCuda inside; \
  if (const cudaError_t error_ = (enter); error_ != cudaSuccess) return error_

void Hold(FakeEvent* event) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  ++event->holders;
}

void LetGo(FakeEvent* event) {
  bool last = false;
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    last = --event->holders == 0;
  }
  if (last) delete event;
}

void Run(FakeStream* stream) {
  const InsideFakeCuda inside;
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return !stream->tasks.empty() || stream->ending; });
    if (stream->tasks.empty()) return;
    const std::function<void()> task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->running = true;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(stream->delay_us));
    if (const int longest_us = longest_delay_us) {
      thread_local std::mt19937 random(std::hash<std::thread::id>()(std::this_thread::get_id()));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % longest_us));
    }
    task();
    lock.lock();
    stream->running = false;
    stream->changed.notify_all();
  }
}

}  // namespace

cudaStream_t MakeFakeStream() {
  auto* stream = new FakeStream;
  stream->thread = std::thread(Run, stream);
  return stream;
}

void DestroyFakeStream(cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> lock(stream->mutex);
    stream->ending = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
  delete stream;
}

void Enqueue(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(stream->mutex);
  stream->tasks.push_back(std::move(work));
  stream->changed.notify_all();
}

void WaitFor(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(event->mutex);
  event->passed.wait(lock, [&] { return event->last_passed >= event->recordings; });
}

int EventsAlive() { return events_alive; }

int TimesMadeCurrent(int device) { return times_made_current[device]; }

bool HasContext(int device) { return has_context[device]; }

int TimesRetained(int device) { return times_retained[device]; }

void SetDriverTellsRanges(bool tells) { driver_tells_ranges = tells; }

void AddMemory(std::uintptr_t address, std::size_t bytes, const cudaPointerAttributes& attributes) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  known_memory[address] = {bytes, attributes};
}

int CallsOfThreads(int device) { return calls_of_threads[device]; }

int StreamsAlive() { return streams_alive; }

std::int64_t BytesAlive() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  std::int64_t bytes = 0;
  for (const auto& entry : memory_alive) bytes += static_cast<std::int64_t>(entry.second);
  return bytes;
}

void SetLongestDelay(int microseconds) { longest_delay_us = microseconds; }

void SetDelay(cudaStream_t stream, int microseconds) { stream->delay_us = microseconds; }

void SetDelayOfMade(int microseconds) { delay_of_made_us = microseconds; }

void FailCall(int nth, cudaError_t error) {
  failing_error = error;
  calls_since = 0;
  failing_call = nth;
}

int CallsSinceFailCall() { return calls_since; }

cudaError_t Launch(cudaStream_t stream, std::function<void()> work) {
  ENTER(Enter());
  Enqueue(stream, std::move(work));
  return cudaSuccess;
}

void SetQueryTime(int microseconds) { query_us = microseconds; }

void SetQueriesFail(cudaError_t error) { query_error = error; }

void SetKernelArchitectures(int ptx, int binary) {
  ptx_architecture = ptx;
  binary_architecture = binary;
}

void SetSharedMemory(int bytes) { shared_bytes = bytes; }

void SetStreamsFail(bool fail) { streams_fail = fail; }

void BeginFakeCapture() {
  capture_broken = false;
  capturing = true;
}

bool EndFakeCapture() {
  capturing = false;
  return !capture_broken;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    default:
      return "cudaErrorInvalidValue";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaGetDevice(int* device) {
  *device = CurrentDevice();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return Leave(cudaErrorInvalidValue);
  ++times_made_current[device];
  has_context[device] = true;
  has_set_device = true;
  (pushed.empty() ? set_device : pushed.back()) = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* address, int size, int device) {
  std::snprintf(address, static_cast<std::size_t>(size), "0000:%02X:00.0", device);  // no such device is there
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER(Enter());
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER(Enter());
  *event = new FakeEvent;
  ++events_alive;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER(Enter());
  --events_alive;
  LetGo(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER(Enter());
  std::int64_t recording = 0;
  Hold(event);
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    recording = ++event->recordings;
  }
  Enqueue(stream, [event, recording] {
    {
      const std::lock_guard<std::mutex> lock(event->mutex);
      event->last_passed = std::max(event->last_passed, recording);
      event->passed.notify_all();
    }
    LetGo(event);
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER(EnterUnsafe());
  if (query_us > 0 && std::this_thread::get_id() != main_thread) {
    std::this_thread::sleep_for(std::chrono::microseconds(query_us));
  }
  if (query_error != cudaSuccess) return Leave(query_error);
  const std::lock_guard<std::mutex> lock(event->mutex);
  return event->last_passed >= event->recordings ? cudaSuccess : Leave(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER(Enter());
  std::int64_t recording = 0;
  Hold(event);
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    recording = event->recordings;
    if (stream->made && event->last_passed < recording) ++held_waits;
  }
  Enqueue(stream, [event, recording] {
    {
      std::unique_lock<std::mutex> lock(event->mutex);
      event->passed.wait(lock, [&] { return event->last_passed >= recording; });
    }
    LetGo(event);
  });
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER(EnterUnsafe());
  ++stream_queries;
  const std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->tasks.empty() && !stream->running ? cudaSuccess : Leave(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER(EnterUnsafe());
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->changed.wait(lock, [&] { return stream->tasks.empty() && !stream->running; });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER(EnterUnsafe());
  WaitFor(event);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  ENTER(Enter());
  if (streams_fail) return Leave(cudaErrorMemoryAllocation);
  *stream = MakeFakeStream();
  SetDelay(*stream, delay_of_made_us);
  (*stream)->made = true;
  ++streams_alive;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER(Enter());
  DestroyFakeStream(stream);
  --streams_alive;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  ENTER(Enter());
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  ENTER(Enter());
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 100;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_bytes;
      break;
    default:
      *value = 0x7fffffff;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  ENTER(Enter());
  if (kernel == nullptr) return Leave(cudaErrorInvalidValue);
  *attributes = {ptx_architecture, binary_architecture};
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  ENTER(EnterUnsafe());
  *memory = std::malloc(bytes);
  const std::lock_guard<std::mutex> lock(memory_mutex);
  memory_alive[*memory] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  ENTER(EnterUnsafe());
  const std::lock_guard<std::mutex> lock(memory_mutex);
  memory_alive.erase(memory);
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return cudaMalloc(memory, bytes); }

cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  ENTER(EnterUnsafe());
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const bool added = flags == cudaHostRegisterPortable && memory_alive.emplace(memory, bytes).second;
  return added ? cudaSuccess : Leave(cudaErrorInvalidValue);
}

cudaError_t cudaHostUnregister(void* memory) {
  ENTER(EnterUnsafe());
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return memory_alive.erase(memory) == 1 ? cudaSuccess : Leave(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(Enter());
  Enqueue(stream, [=] { std::memcpy(target, source, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(Enter());
  ++strided_copies;
  Enqueue(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(target) + row * target_pitch,
                  static_cast<const char*>(source) + row * source_pitch, width);
    }
  });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  ENTER(Enter());
  Enqueue(stream, [=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  ENTER(Enter());
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  ENTER(Enter());
  *attributes = {};
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = FindMemory(reinterpret_cast<std::uintptr_t>(address));
  if (found == known_memory.end()) return cudaSuccess;
  *attributes = found->second.attributes;
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(address) - found->first;
  if (attributes->devicePointer != nullptr) {
    attributes->devicePointer = static_cast<char*>(attributes->devicePointer) + offset;
  }
  return cudaSuccess;
}

// ---- the driver ----
namespace {

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device + 1)); }

CUresult Retain(CUcontext* context, CUdevice device) {
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  has_context[device] = true;
  ++times_retained[device];
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}

CUresult GetState(CUdevice device, unsigned* flags, int* active) {
  if (device < 0 || device >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = has_context[device];
  return CUDA_SUCCESS;
}

CUresult Push(CUcontext context) {
  pushed.push_back(static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1);
  ++times_made_current[pushed.back()];
  return CUDA_SUCCESS;
}

CUresult GetCurrent(CUcontext* context) {
  *context = pushed.empty() && !has_set_device ? nullptr : ContextOf(CurrentDevice());
  return CUDA_SUCCESS;
}

CUresult Pop(CUcontext* context) {
  GetCurrent(context);
  if (pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  pushed.pop_back();
  return CUDA_SUCCESS;
}

CUresult GetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  CUcontext current = nullptr;
  GetCurrent(&current);
  if (current == nullptr || !driver_tells_ranges) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = FindMemory(address);
  if (found == known_memory.end()) return CUDA_SUCCESS;
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
      *static_cast<std::size_t*>(values[i]) = found->second.bytes;
    } else {
      *static_cast<CUdeviceptr*>(values[i]) = found->first;
    }
  }
  return CUDA_SUCCESS;
}

std::atomic<int> batches{0};

// As the driver of CUDA 13 has it.
CUresult Batch(CUdeviceptr* targets, CUdeviceptr* sources, std::size_t* sizes, std::size_t count, void*, std::size_t*,
               std::size_t, cudaStream_t stream) {
  ++batches;
  for (std::size_t i = 0; i < count; ++i) {
    cudaMemcpyAsync(reinterpret_cast<void*>(targets[i]), reinterpret_cast<void*>(sources[i]), sizes[i],
                    cudaMemcpyDefault, stream);
  }
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

int BatchesMade() { return batches; }

int StreamQueries() { return stream_queries; }

int StridedCopiesMade() { return strided_copies; }

int HeldWaits() { return held_waits; }

void* paddle_kv::DriverEntry(const char* name, unsigned) {
  const std::pair<const char*, void*> functions[] = {
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(Retain)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(GetState)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(Push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(Pop)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(GetCurrent)},
      {"cuPointerGetAttributes", reinterpret_cast<void*>(GetAttributes)},
      {"cuMemcpyBatchAsync", reinterpret_cast<void*>(Batch)},
  };
  for (const auto& function : functions) {
    if (std::strcmp(function.first, name) == 0) return function.second;
  }
  return nullptr;
}
