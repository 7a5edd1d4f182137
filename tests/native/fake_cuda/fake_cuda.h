// What tests do with the fake CUDA runtime beyond its own calls.
#pragma once

#include <functional>

#include "cuda_runtime.h"

cudaStream_t MakeFakeStream();
void DestroyFakeStream(cudaStream_t stream);  // waits for its work

// Work in the order of the stream.
void Enqueue(cudaStream_t stream, std::function<void()> work);

// Blocks until the event has been passed.
void WaitFor(cudaEvent_t event);

// Events that were made and not destroyed.
int EventsAlive();

// How often a thread has made the device current.
int TimesMadeCurrent(int device);

// Calls of threads other than the first while the device was current.
int CallsOfThreads(int device);
