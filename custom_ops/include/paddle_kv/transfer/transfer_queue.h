// The queue of transfers and its one thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "paddle_kv/common/capture_tolerance.cuh"
#include "paddle_kv/common/status.h"
#include "paddle_kv/transfer/completions.h"
#include "paddle_kv/transfer/engine_choice.h"
#include "paddle_kv/transfer/event_states.h"
#include "paddle_kv/transfer/gate_work.h"
#include "paddle_kv/transfer/queued_transfer.h"
#include "paddle_kv/transfer/stream_feeder.h"
#include "paddle_kv/transfer/thread_signal.h"
#include "paddle_kv/transfer/transfer_by_marks.h"

namespace paddle_kv {

enum class Marked { kHere, kBefore, kNotKnown, kNotEnqueued };  // as paddle_kv_queue_mark gives it

// What the functions of queue_api.h do. The lock is never held across a call of CUDA, which may take as long as another
// thread's does.
class TransferQueue {
 public:
  // Lives to the end of the process, as its thread does.
  static TransferQueue& Get();

  void Open(const DeviceStream& where, bool urgent);
  Status Close(std::int64_t handle);
  // False: the stream is not open on the device of the transfer's plan. The token is reported at its end, unless it is
  // negative.
  bool Submit(std::int64_t handle, QueuedTransfer transfer, std::int64_t watch_token);
  // False: the stream is not open on the device of the transfer's plan. The token is not in use.
  bool SubmitByMarks(std::int64_t token, std::shared_ptr<TransferByMarks> transfer);
  Marked Mark(std::int64_t token, std::int64_t layer, std::int64_t compute_stream, Status* status);
  std::int64_t TakeEnqueued(std::int64_t token, std::int64_t first, bool ends, std::int64_t* groups);
  // False: the stream is not open.
  bool Cancel(std::int64_t handle, std::int64_t token, std::int64_t* first_dropped_layer);
  std::int64_t Enqueued();
  std::int64_t Submitted();
  bool Flush(std::int64_t handle, std::int64_t timeout_us);
  bool WaitRecorded(std::int64_t event, std::int64_t timeout_us);
  bool IsPending(std::int64_t event);
  bool Failure(std::int64_t event, Status* status);
  bool Forget(std::int64_t event);
  void SetCosts(int device, const EngineCosts& costs);
  void ComputeIsBusy(int device);
  // Whether a compute stream of the device is to be asked now: not if that was done just before.
  bool AsksForCompute(int device);

  void OpenGates(GateWords* words);
  // Waits until all that was added has been done.
  void CloseGates(GateWords* words);
  void AddToGates(GateWords* words, LetThrough work);
  // The events count as pending from here on.
  void AddToGates(GateWords* words, MarkWait work);

  void AddWatch(int device, std::int64_t token, const std::int64_t* events, std::int64_t event_count);
  // Waits for the token's report in this thread, which hears of it in place of whoever reads the descriptor.
  Heard Hear(std::int64_t token, std::int64_t timeout_us);
  // What was heard of is done, or, if not, whoever reads the descriptor hears of it too.
  void EndHearing(std::int64_t token, bool is_done);
  int OpenCompletions();
  std::int64_t TakeCompletions(std::int64_t* tokens, std::int64_t capacity);

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  struct Stream {
    Stream(const DeviceStream& where, bool is_urgent) : feeder(where), urgent(is_urgent) {}
    StreamFeeder feeder;  // the thread's, until the stream is closed
    const bool urgent;
    std::deque<QueuedTransfer> transfers;  // others append, the thread alone removes
    std::int64_t turn = 0;                 // of all that the streams had
    std::int64_t pass = 0;                 // of the thread: looked at in this one
  };

  struct Device {
    EngineCosts costs;
    Clock::time_point compute_seen{};
    Clock::time_point compute_asked{};
  };

  enum class Fed { kNothing, kHeldBack, kStep };

  TransferQueue();
  // Null: it is not open on that device. Under the lock, as Append, which throws nothing but where the list of the
  // stream grows: the entries are those of the transfer's record events. The thread is not woken.
  Stream* OpenStream(std::int64_t handle, int device) const;
  void Append(Stream& stream, QueuedTransfer transfer, EventStates::Entries entries);
  template <class Condition>
  bool WaitFor(Lock& lock, std::int64_t timeout_us, Condition condition);

  // Of the thread; they give up the lock where they call CUDA.
  void SubmitForever();
  std::shared_ptr<Stream> NextInPass() const;
  Fed Feed(Lock& lock, Stream& stream);
  void SubmitStep(Lock& lock, Stream& stream, Step step);
  void AskForWatched(Lock& lock);
  void PassOnLateOnes(Lock& lock);
  bool AdvanceGates(Lock& lock, bool asks);
  bool GatesHaveWork() const;
  Status MakeCurrent(int device);
  void RunNear(int device);

  std::mutex mutex_;
  std::condition_variable work_;     // for the thread: there is more to submit
  std::condition_variable changed_;  // for callers: something was submitted
  std::int64_t enqueued_ = 0;
  std::int64_t turns_ = 0;
  std::int64_t pass_ = 0;
  std::map<std::int64_t, std::shared_ptr<Stream>> streams_;
  std::map<std::int64_t, std::shared_ptr<TransferByMarks>> by_marks_;  // by token
  Clock::time_point mark_seen_{};                                      // the last one that enqueued something
  bool looks_soon_ = false;                                            // the thread, without being woken
  std::map<int, Device> devices_;
  std::map<GateWords*, std::shared_ptr<GateWork>> gates_;
  EventStates events_;
  Completions completions_{events_};
  int current_device_ = -1;                    // of the thread
  std::set<int> served_;                       // of the thread: devices that were current
  std::vector<std::string> pci_addresses_;     // of the thread: theirs
  std::optional<CaptureTolerance> tolerance_;  // of the thread
};

}  // namespace paddle_kv
