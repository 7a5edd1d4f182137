// Copies by the copy engine: it costs a model beside it 1 to 8 %, and reaches the link where pieces are large.
//
// It stays with a stream as long as that has copies: loads of many parts, one behind the other, would keep everybody
// else's copies in that direction waiting until their end. So every second part goes to another stream, which takes
// turns with the first by events; where one waits for the other, a third one's copies are let in.
//
// A run that is dense on both sides is one piece; the blocks of a run whose rows lie apart on one side (a host pool in
// block-first order) are the rows of one strided copy; all pieces of a group go to the driver by few calls.
#include <algorithm>
#include <vector>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/memcpy/memcpy_batch.h"
#include "paddle_kv/swap/engine.h"

namespace paddle_kv {
namespace {

// The driver's lock is held for the time of a call, and the model's launches wait for it.
constexpr std::int64_t kPiecesPerCall = 128;
constexpr std::int64_t kRowsOfStridedCopy = 4;  // fewer are not worth a call of their own
constexpr std::int64_t kLargestPitch = 0x7fffffff;

class CopyEngine : public Engine {
 public:
  ~CopyEngine() override {
    if (aside_ != nullptr) cudaStreamDestroy(aside_);
    for (const cudaEvent_t turn : turns_) {
      if (turn != nullptr) cudaEventDestroy(turn);
    }
  }

  Status Copy(const EngineWork& work, const DeviceStream& where) override {
    // A full GPU has no memory for a second stream; then there is one.
    is_aside_ = more_follows_ && !is_aside_ && ProvideStream().ok();
    more_follows_ = work.more_follows;
    if (!is_aside_) return CopyOn(work, where);
    PADDLE_KV_RETURN_IF_ERROR(PutBehind(aside_, StreamOf(where), turns_[0]));
    const Status status = CopyOn(work, {where.device, reinterpret_cast<std::int64_t>(aside_)});
    const Status back = PutBehind(StreamOf(where), aside_, turns_[1]);
    return status.ok() ? back : status;
  }

  Status Join(const DeviceStream& where) override {
    is_aside_ = more_follows_ = false;
    return turns_[1] == nullptr ? Status{} : PutBehind(StreamOf(where), aside_, turns_[1]);
  }

 private:
  // The last event is made last: if there is one, there is all.
  Status ProvideStream() {
    if (aside_ == nullptr) PADDLE_KV_CUDA(cudaStreamCreateWithFlags(&aside_, cudaStreamNonBlocking));
    for (cudaEvent_t& turn : turns_) {
      if (turn == nullptr) PADDLE_KV_CUDA(cudaEventCreateWithFlags(&turn, cudaEventDisableTiming));
    }
    return {};
  }

  static Status PutBehind(cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
    PADDLE_KV_CUDA(cudaEventRecord(event, other));
    PADDLE_KV_CUDA(cudaStreamWaitEvent(stream, event, 0));
    return {};
  }

  Status CopyOn(const EngineWork& work, const DeviceStream& where) {
    const auto event = [](std::int64_t handle) { return reinterpret_cast<cudaEvent_t>(handle); };
    std::int64_t group = 0;
    for (std::int64_t first = work.first_layer; first < work.end_layer; first += work.layers_per_event, ++group) {
      const std::int64_t end = std::min(first + work.layers_per_event, work.end_layer);
      pieces_.clear();
      for (std::int64_t layer = first; layer < end; ++layer) {
        for (const BlockRows& rows : RowsOfLayer(*work.plan, layer, work.direction)) {
          for (const Run& run : *work.runs) PADDLE_KV_RETURN_IF_ERROR(Add(rows, run, where));
        }
      }
      PADDLE_KV_RETURN_IF_ERROR(SubmitPieces(where));
      if (work.record_events == nullptr) continue;
      PADDLE_KV_CUDA(cudaEventRecord(event(work.record_events[group]), StreamOf(where)));
    }
    return {};
  }

  Status Add(const BlockRows& rows, const Run& run, const DeviceStream& where) {
    const std::uint8_t* source = rows.source + run.source * rows.source_stride;
    std::uint8_t* target = rows.target + run.target * rows.target_stride;
    if (rows.block_bytes == 0) return {};
    if (rows.source_stride == rows.block_bytes && rows.target_stride == rows.block_bytes) {
      pieces_.push_back({source, target, run.length * rows.block_bytes});
    } else if (run.length >= kRowsOfStridedCopy && std::max(rows.source_stride, rows.target_stride) <= kLargestPitch) {
      PADDLE_KV_CUDA(cudaMemcpy2DAsync(target, rows.target_stride, source, rows.source_stride, rows.block_bytes,
                                       run.length, cudaMemcpyDefault, StreamOf(where)));
    } else {
      for (std::int64_t i = 0; i < run.length; ++i) {
        pieces_.push_back({source + i * rows.source_stride, target + i * rows.target_stride, rows.block_bytes});
      }
    }
    return {};
  }

  Status SubmitPieces(const DeviceStream& where) {
    const auto count = static_cast<std::int64_t>(pieces_.size());
    for (std::int64_t first = 0; first < count; first += kPiecesPerCall) {
      const std::int64_t part = std::min(kPiecesPerCall, count - first);
      PADDLE_KV_RETURN_IF_ERROR(MemcpyBatchCuda(&pieces_[first], part, part > 1 && HasMemcpyBatchAsync(), where));
    }
    return {};
  }

  std::vector<CopyPair> pieces_;
  cudaStream_t aside_ = nullptr;
  cudaEvent_t turns_[2] = {};
  bool is_aside_ = false;
  bool more_follows_ = false;
};

}  // namespace

std::unique_ptr<Engine> MakeCopyEngine(int) { return std::make_unique<CopyEngine>(); }

}  // namespace paddle_kv
