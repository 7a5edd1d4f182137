// Gates: waits and marks inside a captured CUDA graph, one of each a layer. A C interface, called through ctypes.
//
// A gate is a word in device memory. In front of a layer the graph has a kernel that waits until the word has reached
// the turn of its replay; behind a layer one that writes the turn of the replay to a word in host memory, at which the
// queue's thread looks: no stream waits for a graph that is perhaps never launched. A turn is a number that is written,
// in the order of the stream, before the graph is launched: a replay that nobody has given a new turn finds its gates
// open. Turns only grow (their comparison is cyclic), so nothing has to be closed again.
//
// The kernel that waits gives up after its time: whatever the host does, a replay ends. No other gate of that turn
// waits then, and the host can ask which turns were given up.
#pragma once

#include <cstdint>

extern "C" {

// Functions that return an int give 0, or -1 and the reason by paddle_kv_queue_error. `gates` is what open has given.

// All gates are open, the kernels are loaded. `timeout_us`: how long one gate waits.
int paddle_kv_gates_open(int device, std::int64_t num_layers, std::int64_t timeout_us, std::int64_t* gates);

// Waits until all that was let through and marked is done, and for the device, and frees them. No graph that has them
// is launched any more.
int paddle_kv_gates_close(std::int64_t gates);

// A launch on the stream, captured or not: waits in front of a layer; marks it as written.
int paddle_kv_gates_wait(std::int64_t gates, std::int64_t layer, std::int64_t stream);
int paddle_kv_gates_mark(std::int64_t gates, std::int64_t layer, std::int64_t stream);
// Marks a layer as written and waits in front of the one behind it, by one kernel.
int paddle_kv_gates_mark_and_wait(std::int64_t gates, std::int64_t layer, std::int64_t stream);

// What is launched on the stream from now on waits for `load_turn`, and marks with `save_turn`.
int paddle_kv_gates_arm(std::int64_t gates, std::int64_t stream, std::uint32_t load_turn, std::uint32_t save_turn);

// Layer `first_layer` + l has come to the turn behind the next waits_per_layer[l] events, which may be pending. By the
// queue's thread, one layer and one call after the other.
int paddle_kv_gates_let_through(std::int64_t gates, std::int64_t first_layer, std::int64_t layer_count,
                                std::uint32_t turn, const std::int64_t* wait_events,
                                const std::int64_t* waits_per_layer);

// Records the next `events_per_layer` events behind the mark of each layer, from the first layer on; they are pending
// until then. By the queue's thread, one layer and one call after the other.
int paddle_kv_gates_record_marks(std::int64_t gates, std::uint32_t turn, const std::int64_t* events,
                                 std::int64_t events_per_layer);

// As if replays up to that turn had marked every layer: for a graph that was never launched.
int paddle_kv_gates_pass_marks(std::int64_t gates, std::uint32_t turn);

// The layer whose gate has given up a turn, -1: none. Of the last 64 that were given up.
std::int64_t paddle_kv_gates_given_up(std::int64_t gates, std::uint32_t turn);
}
