// What Python calls of the queue with its own objects, where ctypes would take longer than the call.
#pragma once

extern "C" {

// A new dictionary, of type PyObject*. The caller holds the GIL.
//
//   submit(function, few_blocks, plan, direction, engine, device_ids, host_ids, first_layer, end_layer,
//          layers_per_event, waits, start_event, record_events, stream, token, watch) -> int
//       What `function`, the address of paddle_kv_queue_submit, gives for a transfer. Ids are arrays of int64 without
//       gaps; waits is a list of lists or tuples of events, one for each group; record_events is a list. The GIL is
//       given up for more than few_blocks blocks.
//   hear(hear, report, token, timeout_us, told) -> int
//       What `hear`, the address of paddle_kv_queue_hear, gives, without the GIL; signals are handled meanwhile. If the
//       token was reported, `told` is called; if that raises, `report`, the address of paddle_kv_queue_report, is.
void* paddle_kv_queue_functions();
}
