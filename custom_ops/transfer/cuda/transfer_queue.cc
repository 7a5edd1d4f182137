#include "paddle_kv/transfer/transfer_queue.h"

#include <sys/prctl.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <thread>
#include <tuple>
#include <utility>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/transfer/engine_events.cuh"
#include "paddle_kv/transfer/thread_cores.h"

namespace paddle_kv {
namespace {

constexpr std::chrono::microseconds kPoll{50};                // for the end of what is in flight
constexpr unsigned long kTimerSlackNs = 1000;                 // else the system makes twice as much of that
constexpr std::chrono::milliseconds kLate{10};                // for a hearer to do what there is to do
constexpr std::chrono::milliseconds kComputeSeen{20};         // how long a busy compute stream counts as busy
constexpr std::chrono::microseconds kComputeAsked{500};       // how long an idle one counts as idle
constexpr std::chrono::milliseconds kMarksSeen{2};            // how long another mark is expected behind one
constexpr std::chrono::microseconds kLongestWait{1LL << 45};  // a year; more would overflow the clock

Status Prepare(QueuedTransfer& transfer) {
  try {
    transfer.Prepare();
  } catch (const std::bad_alloc&) {
    return OutOfHostMemory();
  }
  return {};
}

}  // namespace

TransferQueue& TransferQueue::Get() {
  static TransferQueue* const queue = new TransferQueue;
  return *queue;
}

TransferQueue::TransferQueue() { std::thread(&TransferQueue::SubmitForever, this).detach(); }

void TransferQueue::Open(const DeviceStream& where, bool urgent) {
  auto stream = std::make_shared<Stream>(where, urgent);
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_[where.device];  // made where an exception may be thrown
  stream->turn = ++turns_;
  streams_[where.stream] = std::move(stream);
}

Status TransferQueue::Close(std::int64_t handle) {
  std::shared_ptr<Stream> stream;
  {
    Lock lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return {};
    stream = found->second;
    changed_.wait(lock, [&] { return stream->transfers.empty(); });
    const auto left = streams_.find(handle);
    if (left == streams_.end() || left->second != stream) return {};  // another thread has closed it meanwhile
    streams_.erase(left);
    for (auto entry = by_marks_.begin(); entry != by_marks_.end();) {
      const bool is_of_stream = entry->second->stream() == handle;
      if (is_of_stream) entry->second->is_ended = true;  // for whoever is marking a layer
      entry = is_of_stream ? by_marks_.erase(entry) : std::next(entry);
    }
  }
  return stream->feeder.Close();
}

bool TransferQueue::Submit(std::int64_t handle, QueuedTransfer transfer, std::int64_t watch_token) {
  EventStates::Entries entries = EventStates::EntriesOf(transfer.record_events);
  std::list<Watch> watch;
  Completions::Hearers nobody;
  if (watch_token >= 0) {
    watch.push_back({transfer.plan->device, watch_token, {transfer.record_events.back()}});
    nobody = {{watch_token, nullptr}};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream* const stream = OpenStream(handle, transfer.plan->device);
  if (stream == nullptr) return false;
  Append(*stream, std::move(transfer), std::move(entries));
  completions_.Add(std::move(watch), std::move(nobody));
  work_.notify_one();
  return true;
}

TransferQueue::Stream* TransferQueue::OpenStream(std::int64_t handle, int device) const {
  const auto found = streams_.find(handle);
  return found == streams_.end() || found->second->feeder.where().device != device ? nullptr : found->second.get();
}

void TransferQueue::Append(Stream& stream, QueuedTransfer transfer, EventStates::Entries entries) {
  transfer.number = enqueued_;
  stream.transfers.push_back(std::move(transfer));
  // Nothing is thrown from here on: an event that is pending without a transfer would stay so.
  ++enqueued_;
  events_.Add(std::move(entries));
}

bool TransferQueue::Cancel(std::int64_t handle, std::int64_t token, std::int64_t* first_dropped_layer) {
  *first_dropped_layer = -1;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return false;
  for (QueuedTransfer& transfer : found->second->transfers) {
    const std::int64_t layer = transfer.token == token ? transfer.Drop() : -1;
    if (layer >= 0 && (*first_dropped_layer < 0 || layer < *first_dropped_layer)) *first_dropped_layer = layer;
  }
  work_.notify_one();
  return true;
}

std::int64_t TransferQueue::Enqueued() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

std::int64_t TransferQueue::Submitted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::int64_t submitted = enqueued_;
  for (const auto& entry : streams_) {
    const auto& transfers = entry.second->transfers;
    if (!transfers.empty()) submitted = std::min(submitted, transfers.front().number);
  }
  for (const auto& entry : gates_) submitted = std::min(submitted, entry.second->OldestNumber(submitted));
  return submitted;
}

bool TransferQueue::Flush(std::int64_t handle, std::int64_t timeout_us) {
  Lock lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return true;
  const std::shared_ptr<Stream> stream = found->second;
  const std::int64_t end = enqueued_;  // others may go on enqueuing
  return WaitFor(lock, timeout_us,
                 [&] { return stream->transfers.empty() || stream->transfers.front().number >= end; });
}

bool TransferQueue::WaitRecorded(std::int64_t event, std::int64_t timeout_us) {
  Lock lock(mutex_);
  return WaitFor(lock, timeout_us, [&] { return !events_.IsPending(event); });
}

bool TransferQueue::IsPending(std::int64_t event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return events_.IsPending(event);
}

bool TransferQueue::Failure(std::int64_t event, Status* status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Status* const failure = events_.Failure(event);
  if (failure != nullptr) *status = *failure;
  return failure != nullptr;
}

bool TransferQueue::Forget(std::int64_t event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return events_.Forget(event);
}

void TransferQueue::SetCosts(int device, const EngineCosts& costs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_[device].costs = costs;
}

void TransferQueue::ComputeIsBusy(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_[device].compute_seen = Clock::now();
}

bool TransferQueue::AsksForCompute(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Device& of = devices_[device];
  const Clock::time_point now = Clock::now();
  if (now - of.compute_seen < kComputeSeen / 4 || now - of.compute_asked < kComputeAsked) return false;
  of.compute_asked = now;
  return true;
}

void TransferQueue::OpenGates(GateWords* words) {
  auto work = std::make_shared<GateWork>(words);
  const std::lock_guard<std::mutex> lock(mutex_);
  gates_[words] = std::move(work);
}

void TransferQueue::CloseGates(GateWords* words) {
  Lock lock(mutex_);
  const std::shared_ptr<GateWork> work = gates_.at(words);
  changed_.wait(lock, [&] { return !work->HasWork() && !work->is_at_work(); });
  gates_.erase(words);
}

void TransferQueue::AddToGates(GateWords* words, LetThrough work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work.number = enqueued_;
  gates_.at(words)->Add(std::move(work));
  ++enqueued_;
  work_.notify_one();
}

void TransferQueue::AddToGates(GateWords* words, MarkWait work) {
  EventStates::Entries entries = EventStates::EntriesOf(work.events);
  const std::lock_guard<std::mutex> lock(mutex_);
  gates_.at(words)->Add(std::move(work));
  events_.Add(std::move(entries));
  work_.notify_one();
}

void TransferQueue::AddWatch(int device, std::int64_t token, const std::int64_t* events, std::int64_t event_count) {
  std::list<Watch> watch;
  watch.push_back({device, token, {events, events + event_count}});
  Completions::Hearers nobody = {{token, nullptr}};
  const std::lock_guard<std::mutex> lock(mutex_);
  completions_.Add(std::move(watch), std::move(nobody));
  work_.notify_one();
}

Heard TransferQueue::Hear(std::int64_t token, std::int64_t timeout_us) {
  thread_local ThreadSignal signal;
  Hearer hearer{signal.Open()};
  if (hearer.descriptor < 0) return Heard::kElsewhere;
  Lock lock(mutex_);
  if (!completions_.Divert(token, &hearer)) return Heard::kElsewhere;
  lock.unlock();
  const Heard heard = signal.Wait(timeout_us);
  lock.lock();
  if (!hearer.is_told) {
    completions_.Divert(token, nullptr);
    return heard == Heard::kTold ? Heard::kElsewhere : heard;  // somebody has taken the descriptor away
  }
  signal.Clear();
  return Heard::kTold;
}

void TransferQueue::EndHearing(std::int64_t token, bool is_done) {
  Lock lock(mutex_);
  if (is_done) {
    completions_.Confirm(token);
    return;
  }
  const bool is_passed_on = completions_.PassOn(token);
  lock.unlock();
  if (is_passed_on) completions_.Signal();
}

int TransferQueue::OpenCompletions() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completions_.Open();
}

std::int64_t TransferQueue::TakeCompletions(std::int64_t* tokens, std::int64_t capacity) {
  completions_.ClearSignal();
  Lock lock(mutex_);
  const std::int64_t count = completions_.Take(tokens, capacity);
  const bool is_more_left = completions_.HasReported();
  lock.unlock();
  if (is_more_left) completions_.Signal();
  return count;
}

template <class Condition>
bool TransferQueue::WaitFor(Lock& lock, std::int64_t timeout_us, Condition condition) {
  if (timeout_us < 0) {
    changed_.wait(lock, condition);
    return true;
  }
  return changed_.wait_for(lock, std::min(std::chrono::microseconds(timeout_us), kLongestWait), condition);
}

void TransferQueue::SubmitForever() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  Lock lock(mutex_);
  Clock::time_point next_poll{};
  for (;;) {
    const bool asks = Clock::now() >= next_poll;
    if (asks && completions_.HasPolled()) AskForWatched(lock);
    if (asks && completions_.HasTold()) PassOnLateOnes(lock);
    const bool has_advanced = AdvanceGates(lock, asks);
    if (asks) next_poll = Clock::now() + kPoll;
    ++pass_;
    bool is_held_back = false;  // by what is in flight: nobody tells when that ends
    Fed fed = Fed::kNothing;
    while (const std::shared_ptr<Stream> stream = NextInPass()) {
      stream->pass = pass_;
      fed = Feed(lock, *stream);
      if (fed == Fed::kStep) break;  // an urgent one may have come meanwhile
      is_held_back |= fed == Fed::kHeldBack;
    }
    if (fed == Fed::kStep || has_advanced) continue;
    const bool expects_marks = !by_marks_.empty() && Clock::now() - mark_seen_ < kMarksSeen;
    if (is_held_back || expects_marks || completions_.HasPolled() || completions_.HasTold() || GatesHaveWork()) {
      looks_soon_ = true;
      work_.wait_for(lock, kPoll);
      looks_soon_ = false;
    } else {
      work_.wait(lock);
    }
  }
}

// Urgent ones first, then the one that was served longest ago: small transfers that come as fast as they are submitted
// must not hold up the others for ever.
std::shared_ptr<TransferQueue::Stream> TransferQueue::NextInPass() const {
  std::shared_ptr<Stream> next;
  for (const auto& entry : streams_) {
    const Stream& stream = *entry.second;
    if (stream.pass == pass_ || stream.transfers.empty()) continue;
    if (next == nullptr || std::make_tuple(!stream.urgent, stream.turn) < std::make_tuple(!next->urgent, next->turn)) {
      next = entry.second;
    }
  }
  return next;
}

TransferQueue::Fed TransferQueue::Feed(Lock& lock, Stream& stream) {
  QueuedTransfer& transfer = stream.transfers.front();
  if (transfer.IsCopied() && !transfer.is_prepared()) {
    lock.unlock();
    const Status prepared = Prepare(transfer);
    lock.lock();
    if (!prepared.ok()) transfer.failure = prepared;
    return Fed::kStep;  // nothing is held back, but an urgent one may have come meanwhile
  }
  for (std::int64_t w = transfer.first_wait[transfer.next_group]; w < transfer.first_wait[transfer.next_group + 1];
       ++w) {
    if (events_.IsPending(transfer.wait_events[w])) return Fed::kNothing;
  }
  const bool between_caches = transfer.plan->inside_device;
  bool must_wait = false;
  if (transfer.IsCopied()) {
    lock.unlock();
    stream.feeder.UpdateFlights();
    if (between_caches) must_wait = StreamFeeder::MustWait(transfer);
    lock.lock();
  }
  if (!transfer.IsCopied()) {  // perhaps because it was cancelled meanwhile
    SubmitStep(lock, stream, transfer.PassedOverStep());
    return Fed::kStep;
  }
  const Device& device = devices_.find(stream.feeder.where().device)->second;
  // Between caches the slow ways are for layers that are not computed yet, but for the last one: whoever is behind the
  // model has to catch up, and behind the last layer it has nothing left of this prompt to be slowed in.
  const bool beside_compute =
      between_caches ? must_wait && !transfer.IsAtLastLayer() : Clock::now() - device.compute_seen < kComputeSeen;
  const EngineKind engine = transfer.NextEngine(beside_compute, device.costs);
  if (!stream.feeder.HasRoom(transfer.BytesBefore(engine))) return Fed::kHeldBack;
  SubmitStep(lock, stream, transfer.NextStep(engine, beside_compute));
  return Fed::kStep;
}

void TransferQueue::SubmitStep(Lock& lock, Stream& stream, Step step) {
  QueuedTransfer& transfer = stream.transfers.front();
  stream.turn = ++turns_;
  Status status = transfer.failure;
  if (transfer.IsCopied()) {
    transfer.Begin(step);
  } else if (status.ok()) {
    status = CancelledStatus();
  }
  lock.unlock();
  if (status.ok()) status = MakeCurrent(stream.feeder.where().device);
  bool was_compute_busy = false;
  try {
    if (status.ok()) status = stream.feeder.Submit(transfer, &step, &was_compute_busy);
  } catch (const std::bad_alloc&) {
    status = OutOfHostMemory();
  }
  if (!status.ok()) stream.feeder.PassOver(transfer, step);
  lock.lock();
  if (was_compute_busy) devices_.find(stream.feeder.where().device)->second.compute_seen = Clock::now();
  for (std::int64_t g = step.first_group; g < step.RecordedEnd(); ++g) {
    events_.Record(transfer.record_events[g], status);
    completions_.OnRecorded(transfer.record_events[g]);
  }
  transfer.failure = status;
  transfer.Advance(step);
  if (transfer.next_group == transfer.group_count()) stream.transfers.pop_front();
  changed_.notify_all();
}

bool TransferQueue::GatesHaveWork() const {
  return std::any_of(gates_.begin(), gates_.end(), [](const auto& entry) { return entry.second->HasWork(); });
}

bool TransferQueue::AdvanceGates(Lock& lock, bool asks) {
  const auto make_current = [this](int device) { return MakeCurrent(device); };
  const auto recorded = [this](std::int64_t event, const Status& status) {
    events_.Record(event, status);
    completions_.OnRecorded(event);
  };
  bool any = false;
  for (auto entry = gates_.begin(); entry != gates_.end();) {
    GateWords* const words = entry->first;
    const std::shared_ptr<GateWork> work = entry->second;
    if (work->HasWork()) any |= work->Advance(lock, events_, asks, make_current, recorded);
    entry = gates_.upper_bound(words);  // others may have come and gone while the lock was given up
  }
  if (any) changed_.notify_all();
  return any;
}

void TransferQueue::AskForWatched(Lock& lock) {
  std::list<Watch> asked = completions_.TakePolled();
  lock.unlock();
  for (Watch& watch : asked) {
    const bool is_lost = !MakeCurrent(watch.device).ok();
    while (watch.next < watch.end_recorded) {
      const cudaError_t result = is_lost ? cudaErrorUnknown : cudaEventQuery(EventOf(watch.events[watch.next]));
      if (result != cudaSuccess && IsNotReady(result)) break;
      // Behind an error of the device nothing ends any more: whoever is told asks, and is given the error.
      watch.next = result == cudaSuccess ? watch.next + 1 : watch.events.size();
    }
  }
  lock.lock();
  if (!completions_.GiveBack(std::move(asked))) return;
  lock.unlock();
  completions_.Signal();
  lock.lock();
}

void TransferQueue::PassOnLateOnes(Lock& lock) {
  if (!completions_.PassOnBefore(Clock::now() - kLate)) return;
  lock.unlock();
  completions_.Signal();
  lock.lock();
}

// The thread's device is never put back, and nothing is asked of CUDA before the first one is made current: a thread
// begins on device 0, and any call there would make a context, half a gigabyte that a process which works on another
// GPU has no use for.
Status TransferQueue::MakeCurrent(int device) {
  if (device == current_device_) return {};
  PADDLE_KV_CUDA(cudaSetDevice(device));
  current_device_ = device;
  if (!tolerance_) tolerance_.emplace();
  RunNear(device);
  return {};
}

// A thread that serves several devices may run near any of them.
void TransferQueue::RunNear(int device) {
  try {
    if (!served_.insert(device).second) return;
    char address[32];
    if (cudaDeviceGetPCIBusId(address, sizeof(address), device) == cudaSuccess) {
      pci_addresses_.emplace_back(address);
    } else {
      cudaGetLastError();
    }
    paddle_kv::RunNear(pci_addresses_);
  } catch (const std::exception&) {
    // The thread stays where it is.
  }
}

}  // namespace paddle_kv
