// What the operators of the permute family share: their checks, and the way to the launchers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/launch.h"
#include "../common/validate.h"
#include "paddle_kv/permute/permute_chunks.h"

namespace paddle_kv {

struct TensorList {
  const std::vector<paddle::Tensor>& tensors;
  std::string name;

  std::string NameOf(std::size_t i) const;
};

// Where an operator on these tensors runs.
struct Placement {
  bool on_gpu = false;
  bool touches_host = false;  // on a GPU, with a part of the data in page-locked memory
  DeviceStream where;
};

// Tensors are all on the CPU, or on one GPU and in memory that it can reach.
Placement PlaceTensors(const std::vector<TensorList>& lists, int64_t stream);

// ValueError unless all tensors have memory, one shape and one dtype. Returns the bytes of one tensor.
int64_t CheckAlike(const TensorList& list);

// Chunks as the caller gave them: tensors, or addresses of memory on `device` (-1: in RAM) or that it can reach.
struct GivenChunks {
  const std::vector<paddle::Tensor>* tensors;  // null: addresses
  Ids addresses;
  int64_t device;
};

// The dense tensor has the bytes of all chunks, in order [block][chunk] if heads and tokens are left aside.
// ValueError if memory to be written overlaps other memory of the call.
void PermuteGivenChunks(const PermuteShape& shape, ChunkSide chunk_side, const DenseSide& dense_side,
                        const GivenChunks& chunks, const paddle::Tensor& dense, const std::string& dense_name,
                        PermuteDirection direction, int64_t stream);

// universal_from_block and block_from_universal.
void PermuteUniversal(const GivenChunks& chunks, const paddle::Tensor& universal, const std::string& universal_name,
                      int64_t num_layers, int64_t num_outer, bool heads_first, PermuteDirection direction,
                      int64_t stream);

// operational_from_block and block_from_operational.
void PermuteOperational(const GivenChunks& chunks, const paddle::Tensor& operational,
                        const std::string& operational_name, int64_t num_layers, int64_t num_outer,
                        PermuteDirection direction, int64_t stream);

// universal_from_cache and cache_from_universal. Caches: all keys, then all values (or none). Ids are in the tensor, or
// where it is absent in the list.
void PermuteCaches(const std::vector<paddle::Tensor>& caches, int64_t key_count,
                   const paddle::optional<paddle::Tensor>& id_tensor, const Ids& id_list,
                   const paddle::Tensor& universal, const std::string& universal_name, bool heads_first,
                   PermuteDirection direction, int64_t stream);

}  // namespace paddle_kv
