// Transfers that one thread of this library submits, so that the caller is not held: a call enqueues, the thread feeds
// the streams and records the events, with a bounded number of bytes in flight on each stream.
//
// A C interface, called through ctypes, but for submit, mark, is_capturing, wait_stream and hear (queue_functions.h):
// an operator call of Paddle costs 10 to 40 us, and most of them are called for every layer of a model. Handles of CUDA
// streams and events are integers.
#pragma once

#include <cstdint>

extern "C" {

// One transfer or a part of it: consecutive groups of layers. All arrays are copied.
struct PaddleKvTransfer {
  std::int64_t plan;  // number of a registered transfer plan
  std::int64_t direction;
  std::int64_t engine;  // paddle_kv::EngineKind
  const std::int64_t* device_ids;
  const std::int64_t* host_ids;
  std::int64_t block_count;
  std::int64_t first_layer;
  std::int64_t end_layer;
  std::int64_t layers_per_event;
  const std::int64_t* wait_events;      // group g comes behind the next waits_per_group[g] of them
  const std::int64_t* waits_per_group;  // one a group
  std::int64_t start_event;             // recorded behind the waits of the first group
  const std::int64_t* record_events;    // one a group
  std::int64_t stream;
  std::int64_t token;  // the transfer's, chosen by the caller; several parts of one have the same
  std::int64_t watch;  // as by paddle_kv_queue_watch with the last record event; negative: nobody is told
};

// The pointers of a pair of caches that both lie on GPUs: one in this process, one of another process that was opened
// here. In order [layer][tensor]; strides and block bytes in bytes, one for each tensor of a layer.
struct PaddleKvDevicePlan {
  std::int64_t number;  // chosen by the caller; released by the operator release_transfer_plan
  std::int64_t device;  // on which the copies run
  std::int64_t device_blocks;
  std::int64_t other_blocks;
  std::int64_t layer_count;
  std::int64_t tensors_per_layer;
  std::int64_t on_other_gpu;  // whether the other cache lies on another GPU; 1 or 0
  const std::int64_t* device_pointers;
  const std::int64_t* other_pointers;
  const std::int64_t* device_strides;
  const std::int64_t* other_strides;
  const std::int64_t* block_bytes;
};

// Functions that return an int give 0, or -1 and the reason by paddle_kv_queue_error.

// What went wrong in the last call of this thread that failed. `code` and `name` are CUDA's. Other errors have code 0,
// and the name "cancelled", "out of host memory" or "".
const char* paddle_kv_queue_error(int* code, const char** name);

// An error where a block does not lie in memory of a GPU, or the parts do not fit each other.
int paddle_kv_queue_register_device_plan(const PaddleKvDevicePlan* plan);

// A stream that takes transfers. `urgent`: its work is submitted before that of other streams.
int paddle_kv_queue_open(int device, std::int64_t stream, int urgent);

// Waits until all of the stream's transfers are submitted and done, and frees what their engines hold.
int paddle_kv_queue_close(std::int64_t stream);

// The record events count as pending from here until they are recorded; a failure of theirs is forgotten. A wait for a
// pending event holds the group back, not the other streams; so a transfer may wait for any transfer that was enqueued
// before. When a group fails, those behind it are not copied; their events still come behind what they had to wait for.
// Whatever cannot be right of the transfer, as far as it can be seen, is an error; nothing is enqueued then.
int paddle_kv_queue_submit(const PaddleKvTransfer* transfer);

// A transfer whose groups are enqueued one by one, each when its layers have been marked; until then nothing waits for
// them, and their record events are not pending. `wait_events` has the event that the mark of each layer records,
// `start_events` one for each group; `waits_per_group`, `start_event` and `watch` count for nothing. The token is not
// that of another transfer by marks.
int paddle_kv_queue_submit_by_marks(const PaddleKvTransfer* transfer, const std::int64_t* start_events);

// Records the event of a layer's mark on a stream of the caller's, and enqueues the layer's group if it was the last
// one of the group. 0: done; 1: the layer was marked before, or another thread is about to; 2: no such transfer, or no
// such layer of it, or all of it was enqueued, or its marks have ended: nothing was recorded; 3: marked, but there was
// no memory to enqueue the group: the marks of the transfer have ended. -1: the event could not be recorded.
int paddle_kv_queue_mark(std::int64_t token, std::int64_t layer, std::int64_t compute_stream);

// Which groups marks have enqueued, in that order, but for the first `first` of them, and how many. `ends`: no later
// mark enqueues any. There is room for all groups of the transfer.
std::int64_t paddle_kv_queue_take_enqueued(std::int64_t token, std::int64_t first, int ends, std::int64_t* groups);

// Of what is queued on the stream under the token, everything that was not given to an engine is not copied any more.
// Its events are recorded as those of a transfer that failed, in the order of the stream, with the failure "cancelled".
// *first_dropped_layer: the first layer of which not everything was given to an engine, -1: nothing is dropped.
int paddle_kv_queue_cancel(std::int64_t stream, std::int64_t token, std::int64_t* first_dropped_layer);

// How many transfers were enqueued, and how many of the first of them are submitted. An event may be used anew when all
// that were enqueued while it was in use are: until then one of them may still have to wait for it.
std::int64_t paddle_kv_queue_enqueued();
std::int64_t paddle_kv_queue_submitted();

// Blocks until everything of the stream that was enqueued before is submitted; 1: not within the time. A negative time
// has no end.
int paddle_kv_queue_flush(std::int64_t stream, std::int64_t timeout_us);

// 1: the stream is being captured into a graph. 0: it is not.
int paddle_kv_queue_is_capturing(int device, std::int64_t stream);

// Records an event on a stream of the caller's.
int paddle_kv_queue_record(int device, std::int64_t event, std::int64_t stream);

// Work submitted to `stream` from now on comes behind the event; blocks while it is pending; 1: it still is.
int paddle_kv_queue_wait_stream(int device, std::int64_t stream, std::int64_t event, std::int64_t timeout_us);

// Asks for one event after the other. 0: all were passed, 1: the next one was not yet, -1: it was, and what was
// submitted before it has failed. Breaks no capture of other threads.
int paddle_kv_queue_query(int device, const std::int64_t* events, std::int64_t event_count);

// Makes a device current for this thread, and what was current before. No context is made on the latter.
int paddle_kv_queue_push_device(int device);
void paddle_kv_queue_pop_device();

// The failure of an event is forgotten; to be called before such an event is used again. 1: there was one.
int paddle_kv_queue_forget(std::int64_t event);

// Costs for engine "auto" on a device (EngineCosts of engine_choice.h): of copy_engine, kernel and staging, each device
// to host and host to device, each alone and beside compute, each the seven sizes.
int paddle_kv_queue_set_costs(int device, const std::int64_t* costs);

// The token is reported once all of the events are recorded and passed (with or without a failure, as query tells), or
// the device is lost. The events live until then.
int paddle_kv_queue_watch(int device, std::int64_t token, const std::int64_t* events, std::int64_t count);

// Waits until the token of a watch is reported, to this caller in place of take. 0: it was; 1: not within the time; 2:
// a signal's handler ran in this thread meanwhile; 3: not here, since another caller waits for it, it was reported
// before, nobody watches for it, or there is no descriptor to wait with. A negative time has no end. A thread that
// waits has a descriptor (eventfd) of its own until it ends.
int paddle_kv_queue_hear(std::int64_t token, std::int64_t timeout_us);

// To be called behind a 0. is_done: what there is to do was done. Otherwise, or if 10 ms pass before, take gives the
// token as well: a handler of a signal may keep the caller from it for any time.
int paddle_kv_queue_end_hearing(std::int64_t token, int is_done);

// A descriptor (eventfd, the same one each time) that is readable when tokens were reported; nobody but take reads it.
int paddle_kv_completions_open();

// Tokens reported since the last call, the oldest first, and how many; the descriptor stays readable if there are more.
std::int64_t paddle_kv_completions_take(std::int64_t* tokens, std::int64_t capacity);
}
