// A table that the kernels read which are enqueued while it lives. Its rows are made of 64-bit words.
//
// The words go through page-locked memory. Kernels that copy inside the device read them there, which costs them
// nothing. Kernels that use the link to the host themselves get them in device memory, where a kernel has fetched them;
// the copy engine would do that only behind whatever upload it is busy with, milliseconds later. A captured graph would
// read page-locked memory that has long been given to another table: while a graph is captured, and where too many
// tables are in flight, the words travel as parameters of kernels that store them in device memory.
// Device memory is taken and given back in stream order. Nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/table_ring.cuh"

namespace paddle_kv {

class KernelTable {
 public:
  KernelTable() = default;
  ~KernelTable() {
    if (region_ != nullptr) TableRing::Of(where_.device).GiveBack(region_, StreamOf(where_));
    if (on_device_ != nullptr) ToStatus(cudaFreeAsync(on_device_, StreamOf(where_)), "cudaFreeAsync");
  }
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;

  // `uses_host_link`: the kernels move data between host and device. The device must be current. The rows may be freed
  // on return.
  template <class Row>
  Status Store(const std::vector<Row>& rows, bool uses_host_link, const DeviceStream& where) {
    static_assert(sizeof(Row) % sizeof(std::int64_t) == 0, "a row is made of words");
    return Store(reinterpret_cast<const std::int64_t*>(rows.data()), rows.size() * sizeof(Row) / sizeof(std::int64_t),
                 uses_host_link, where);
  }

  template <class Row>
  const Row* rows() const {
    return reinterpret_cast<const Row*>(on_device_ != nullptr ? on_device_ : region_->words);
  }

 private:
  Status Store(const std::int64_t* words, std::size_t count, bool uses_host_link, const DeviceStream& where);
  Status StoreParameters(const std::int64_t* words, std::size_t count);

  DeviceStream where_;
  TableRegion* region_ = nullptr;
  std::int64_t* on_device_ = nullptr;
};

}  // namespace paddle_kv
