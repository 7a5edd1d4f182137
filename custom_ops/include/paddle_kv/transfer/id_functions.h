// What is asked of each list of block ids that a user passes, in one call.
#pragma once

extern "C" {

// A new dictionary, of type PyObject*. The caller holds the GIL.
//
//   plain_ids(ids, num_blocks, distinct) -> bytearray or None
//       The ids, int64 in the order of the machine. None where there is anything to object to, or they are of a kind
//       that is rare: then Python looks itself, and finds the words. Ids are a list or tuple of nothing but ints, a
//       range, or an array of one dimension and of int64 without gaps; each is in [0, num_blocks), and, if `distinct`
//       is true, occurs once.
void* paddle_kv_id_functions();
}
