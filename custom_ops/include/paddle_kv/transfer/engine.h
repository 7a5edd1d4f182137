// A way of moving the blocks of consecutive layers. Each engine moves any blocks; they differ in speed and in what they
// cost the model beside them. See engine_choice.h for who gets what.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "paddle_kv/common/device_stream.h"
#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/runs.h"
#include "paddle_kv/transfer/transfer_plan.h"

namespace paddle_kv {

// Groups of layers of one transfer with nothing to wait for in between.
struct EngineWork {
  const TransferPlan* plan;
  Direction direction;
  const std::vector<Run>* runs;  // sorted, neighbours merged; for all of these layers
  std::int64_t first_layer;
  std::int64_t end_layer;
  std::int64_t layers_per_event;
  std::int64_t layers_per_band;       // that staging moves together: a multiple of the above
  const std::int64_t* record_events;  // cudaEvent_t as integers, one a group; null: more blocks of the groups follow
  // The next thing on the stream is another Copy of this engine, of other blocks or layers of the transfer, with
  // nothing in between but the recording of events. Then the stream need not come behind all of this copy, and the two
  // can overlap; the events of their groups are as without.
  bool more_follows = false;
  bool beside_compute = false;   // the model runs on this GPU, and should hardly notice
  std::int64_t start_event = 0;  // cudaEvent_t as an integer, recorded in front of the first copy; 0: none
};

// Belongs to one transfer stream; called by one thread at a time, and destroyed, with its device current.
class Engine {
 public:
  virtual ~Engine() = default;

  // Enqueues. Work that was on the stream before comes first; later work on it comes behind all of this, unless more
  // follows. Event g is recorded (on whatever stream) such that it completes when group g is copied. All arguments may
  // go away on return; memory of the plan must live until the last event is done. After an error an unknown part has
  // been enqueued, and the stream is ordered behind it all the same.
  virtual Status Copy(const EngineWork& work, const DeviceStream& where) = 0;

  // Later work on the stream comes behind all that was enqueued, though more was said to follow.
  virtual Status Join(const DeviceStream&) { return {}; }
};

// Merged runs, strided rows and batched copies by the copy engine. This one and staging are given parts of the blocks
// of a group or a band.
std::unique_ptr<Engine> MakeCopyEngine(int device);
// One kernel of few CTAs for all layers of a call.
std::unique_ptr<Engine> MakeKernelEngine(int device);
// Bulk copies of host runs, and a kernel of few CTAs that scatters or gathers on the device.
std::unique_ptr<Engine> MakeStagingEngine(int device);

}  // namespace paddle_kv
