// What tests do with the fake CUDA runtime beyond its own calls.
#pragma once

#include <functional>

#include "cuda_runtime.h"

cudaStream_t MakeFakeStream();
void DestroyFakeStream(cudaStream_t stream);  // waits for its work

// Work in the order of the stream.
void Enqueue(cudaStream_t stream, std::function<void()> work);

// The same as a call of the library: it may fail.
cudaError_t Launch(cudaStream_t stream, std::function<void()> work);

// Blocks until the event has been passed.
void WaitFor(cudaEvent_t event);

// Events that were made and not destroyed.
int EventsAlive();

// How often a thread has made the device current.
int TimesMadeCurrent(int device);

// Whether the device has a context, and how often it was asked for as the driver's.
bool HasContext(int device);
int TimesRetained(int device);

// Memory that CUDA knows; whether the driver tells how far an allocation reaches.
void AddMemory(std::uintptr_t address, std::size_t bytes, const cudaPointerAttributes& attributes);
void SetDriverTellsRanges(bool tells);

// Calls of threads other than the first while the device was current.
int CallsOfThreads(int device);

// Streams and bytes that the library has and has not given back.
int StreamsAlive();
std::int64_t BytesAlive();

// Each work of a stream begins up to so much later.
void SetLongestDelay(int microseconds);
// Each work of this stream, or of those that the library makes from now on, begins so much later.
void SetDelay(cudaStream_t stream, int microseconds);
void SetDelayOfMade(int microseconds);

// The nth call of threads other than the first fails with this error, and does nothing; -1: none. And how many calls
// there were since.
void FailCall(int nth, cudaError_t error);
int CallsSinceFailCall();
// Questions for events, of threads other than the first, take so long; of all threads they fail with this error.
void SetQueryTime(int microseconds);
void SetQueriesFail(cudaError_t error);
// Kernels were compiled from PTX of one architecture, to machine code of another. Of the device: 90, and its memory.
void SetKernelArchitectures(int ptx, int binary);
void SetSharedMemory(int bytes);
// All calls that make a stream fail.
void SetStreamsFail(bool fail);
// Calls of the driver that copy many pieces.
int BatchesMade();
// Copies of rows at equal distances.
int StridedCopiesMade();
// How often a stream was asked whether it is idle.
int StreamQueries();
// Waits of streams that the library made for events that were not passed yet.
int HeldWaits();

// CTAs of the last kernel that copies segments; 0: as many as it likes.
int CtasOfLastKernel();

// No stream can wait for a counter in memory.
void SetCounterWaitsFail(bool fail);

// While one lives, its thread is inside of the fake runtime: what that allocates is not the library's.
struct InsideFakeCuda {
  static thread_local int depth;
  InsideFakeCuda() { ++depth; }
  ~InsideFakeCuda() { --depth; }
};

// A stream is captured in the global mode. Until the end of that, calls which CUDA counts among the unsafe ones are
// refused to threads of the default mode, and break the capture; true: none has.
void BeginFakeCapture();
bool EndFakeCapture();
