#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "paddle_kv/common/device_context.cuh"

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
  std::thread thread;
};

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local std::vector<int> devices_below;  // of the one that was pushed last
std::atomic<int> events_alive{0};
constexpr int kDevices = 4;
std::atomic<int> times_made_current[kDevices];
std::atomic<int> calls_of_threads[kDevices];
const std::thread::id main_thread = std::this_thread::get_id();

// The runtime makes a context on the current device for nearly every call.
void NeedContext() {
  if (std::this_thread::get_id() != main_thread) ++calls_of_threads[current_device];
}

cudaError_t Leave(cudaError_t error) {
  last_error = error;
  return error;
}

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
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return !stream->tasks.empty() || stream->ending; });
    if (stream->tasks.empty()) return;
    const std::function<void()> task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->running = true;
    lock.unlock();
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

int CallsOfThreads(int device) { return calls_of_threads[device]; }

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
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return Leave(cudaErrorInvalidValue);
  ++times_made_current[device];
  current_device = device;
  return cudaSuccess;
}

cudaError_t paddle_kv::PushDevice(int device) {
  const int below = current_device;
  const cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) devices_below.push_back(below);
  return error;
}

void paddle_kv::PopDevice() {
  current_device = devices_below.back();
  devices_below.pop_back();
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  NeedContext();
  thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
  std::swap(own, *mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  NeedContext();
  *event = new FakeEvent;
  ++events_alive;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  NeedContext();
  --events_alive;
  LetGo(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  NeedContext();
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
  NeedContext();
  const std::lock_guard<std::mutex> lock(event->mutex);
  return event->last_passed >= event->recordings ? cudaSuccess : Leave(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  NeedContext();
  std::int64_t recording = 0;
  Hold(event);
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    recording = event->recordings;
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
  NeedContext();
  const std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->tasks.empty() && !stream->running ? cudaSuccess : Leave(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  NeedContext();
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->changed.wait(lock, [&] { return stream->tasks.empty() && !stream->running; });
  return cudaSuccess;
}
