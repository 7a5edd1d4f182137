// What the queue's thread does on one stream: gives steps of transfers to engines, and knows what is in flight.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/queued_transfer.h"

namespace paddle_kv {

// Used by one thread at a time, whose device is the stream's, and without the queue's lock: a call of CUDA may take as
// long as another thread's does.
class StreamFeeder {
 public:
  explicit StreamFeeder(const DeviceStream& where) : where_(where) {}
  StreamFeeder(const StreamFeeder&) = delete;
  StreamFeeder& operator=(const StreamFeeder&) = delete;

  const DeviceStream& where() const { return where_; }

  // Asks CUDA which calls have ended.
  void UpdateFlights();
  // Whether the next group has to wait for something that is still to come.
  static bool MustWait(const QueuedTransfer& transfer);
  // Whether one more call may be in flight, before which there are fewer than so many bytes.
  bool HasRoom(std::int64_t bytes_before) const;

  // Enqueues the step with its waits and events; may turn it into one of which nothing was submitted, for another
  // engine. `was_compute_busy`: something that it has to wait for is still to come. Throws std::bad_alloc.
  Status Submit(QueuedTransfer& transfer, Step* step, bool* was_compute_busy);
  // Copies nothing, but the events keep the order: they come behind what was submitted of the transfer, part of which
  // may run, and behind what the groups had to wait for. A later transfer of the same blocks waits for them alone.
  void PassOver(const QueuedTransfer& transfer, const Step& step);

  // Waits for all that was submitted and frees what was needed for it.
  Status Close();

 private:
  struct Flight {
    CudaEvent end;
    std::int64_t bytes;
  };

  Engine& EngineOf(EngineKind kind);
  Status Copy(QueuedTransfer& transfer, Step* step);

  const DeviceStream where_;
  std::array<std::unique_ptr<Engine>, kEngineKinds> engines_;
  std::deque<Flight> flights_;
  std::vector<CudaEvent> idle_events_;
  std::int64_t bytes_in_flight_ = 0;
};

}  // namespace paddle_kv
