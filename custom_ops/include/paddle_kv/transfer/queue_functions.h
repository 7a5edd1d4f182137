// What Python calls of the queue with its own objects, where ctypes would take longer than the call.
#pragma once

extern "C" {

// A new dictionary, of type PyObject*. The caller holds the GIL.
//
//   submit(function, few_blocks, plan, direction, engine, device_ids, host_ids, first_layer, end_layer,
//          layers_per_event, waits, start_events, record_events, stream, token, watch) -> int
//       What `function`, the address of paddle_kv_queue_submit, gives for a transfer. Ids are arrays of int64 without
//       gaps; waits is a list with the events of each group; start_events (of one) and record_events, as those of a
//       group, are a list, a tuple or an array of int64. The GIL is given up for more than few_blocks blocks.
//   submit_by_marks(function, plan ... watch) -> int
//       The same for paddle_kv_queue_submit_by_marks: waits has the events of the marks, and there is a start event for
//       each group.
//   ask(function) -> int
//       What `function`, the address of paddle_kv_queue_enqueued or paddle_kv_queue_submitted, gives.
//   mark(function, token, layer, compute_stream) -> int
//       What `function`, the address of paddle_kv_queue_mark, gives.
//   is_capturing(function, device, stream) -> int
//       What `function`, the address of paddle_kv_queue_is_capturing, gives.
//   record(function, device, event, stream) -> int
//       What `function`, the address of paddle_kv_queue_record, gives.
//   wait_stream(function, device, stream, event, timeout_us) -> int
//       What `function`, the address of paddle_kv_queue_wait_stream, gives. The GIL is given up while the event is
//       pending.
//   hear(hear, end_hearing, reports, token, timeout_us, told, report) -> int
//       What `hear`, the address of paddle_kv_queue_hear, gives, without the GIL; signals are handled meanwhile. If it
//       was 0, `told` is called, with `report` in the dictionary `reports` under the token meanwhile, for whoever takes
//       it if `told` raises or takes long; then `end_hearing`, the address of the function of that name.
void* paddle_kv_queue_functions();
}
