// Copies by the copy engine: it costs a model beside it 1 to 8 %, and reaches the link where pieces are large.
//
// It stays with a stream as long as that has copies: loads of many parts, one behind the other, would keep everybody
// else's copies in that direction waiting until their end. So a second stream takes turns with the first, by events;
// where one waits for the other, a third one's copies are let in.
//
// One thread describes a piece to the driver in 0.5 to 1 us, in which the link moves 27 to 55 KiB. Two threads take
// about half as long if each has a stream of its own: of a group of many pieces a helper submits one half, to the
// second stream.
//
// A run that is dense on both sides is one piece; the blocks of a long run whose rows lie apart on one side (a host
// pool in block-first order) are the rows of one strided copy; all pieces of a group go to the driver by few calls.
#include <algorithm>
#include <vector>

#include "paddle_kv/common/cuda_owners.cuh"
#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/helper_thread.h"
#include "paddle_kv/memcpy/memcpy_batch.h"
#include "paddle_kv/transfer/engine.h"
#include "paddle_kv/transfer/engine_events.cuh"
#include "paddle_kv/transfer/piece_calls.h"

namespace paddle_kv {
namespace {

constexpr std::int64_t kPiecesOfTwoThreads = 2 * kPiecesPerCall;  // for fewer the helper would wake too late

class CopyEngine : public Engine {
 public:
  explicit CopyEngine(int device) : device_(device) {}
  Status Copy(const EngineWork& work, const DeviceStream& where) override {
    const cudaStream_t stream = StreamOf(where);
    PADDLE_KV_RETURN_IF_ERROR(RecordStart(work, stream));
    const bool is_long = more_follows_ || work.more_follows;
    more_follows_ = work.more_follows;
    // A full GPU has no memory for a second stream; then there is one.
    if (!(is_long || HasManyPieces(work)) || !ProvideStream().ok()) return CopyOn(stream, stream, work);
    PADDLE_KV_RETURN_IF_ERROR(PutBehind(turning_.get(), stream, turns_[0]));
    is_turning_first_ = !is_turning_first_;
    const Status status =
        is_turning_first_ ? CopyOn(turning_.get(), stream, work) : CopyOn(stream, turning_.get(), work);
    const Status back = PutBehind(stream, turning_.get(), turns_[1]);
    return status.ok() ? back : status;
  }

  Status Join(const DeviceStream& where) override {
    more_follows_ = false;
    return !turns_[kTurns - 1] ? Status{} : PutBehind(StreamOf(where), turning_.get(), turns_[1]);
  }

 private:
  static constexpr int kTurns = 3;

  static bool HasManyPieces(const EngineWork& work) {
    const std::int64_t layers = std::min(work.layers_per_event, work.end_layer - work.first_layer);
    const std::int64_t rows = layers * work.plan->tensors_per_layer;
    return static_cast<std::int64_t>(work.runs->size()) >= (kPiecesOfTwoThreads + rows - 1) / rows;
  }

  // The last event is made last: if there is one, there is all.
  Status ProvideStream() {
    if (!turning_) PADDLE_KV_CUDA(cudaStreamCreateWithFlags(turning_.Receive(), cudaStreamNonBlocking));
    for (CudaEvent& turn : turns_) {
      if (!turn) PADDLE_KV_CUDA(MakeEvent(&turn));
    }
    return {};
  }

  static Status PutBehind(cudaStream_t stream, cudaStream_t other, const CudaEvent& event) {
    PADDLE_KV_CUDA(cudaEventRecord(event.get(), other));
    PADDLE_KV_CUDA(cudaStreamWaitEvent(stream, event.get(), 0));
    return {};
  }

  // All of it comes before the events, which are recorded on `stream`. The other one may be the same.
  Status CopyOn(cudaStream_t stream, cudaStream_t other, const EngineWork& work) {
    std::int64_t group = 0;
    for (std::int64_t first = work.first_layer; first < work.end_layer; first += work.layers_per_event, ++group) {
      const std::int64_t end = std::min(first + work.layers_per_event, work.end_layer);
      pieces_.clear();
      for (std::int64_t layer = first; layer < end; ++layer) {
        for (const BlockRows& rows : RowsOfLayer(*work.plan, layer, work.direction)) {
          for (const Run& run : *work.runs) PADDLE_KV_RETURN_IF_ERROR(Add(rows, run, stream));
        }
      }
      const auto count = static_cast<std::int64_t>(pieces_.size());
      if (stream != other && count >= kPiecesOfTwoThreads) {
        PADDLE_KV_RETURN_IF_ERROR(SubmitHalves(stream, other));
      } else {
        PADDLE_KV_RETURN_IF_ERROR(CopyPieces(pieces_.data(), count, device_, stream));
      }
      if (work.record_events == nullptr) continue;
      PADDLE_KV_CUDA(cudaEventRecord(EventOf(work.record_events[group]), stream));
    }
    return {};
  }

  Status Add(const BlockRows& rows, const Run& run, cudaStream_t stream) {
    const std::uint8_t* source = rows.source + run.source * rows.source_stride;
    std::uint8_t* target = rows.target + run.target * rows.target_stride;
    if (rows.block_bytes == 0) return {};
    if (rows.source_stride == rows.block_bytes && rows.target_stride == rows.block_bytes) {
      pieces_.push_back({source, target, run.length * rows.block_bytes});
    } else if (IsForStridedCopy(run.length, std::max(rows.source_stride, rows.target_stride))) {
      PADDLE_KV_CUDA(cudaMemcpy2DAsync(target, rows.target_stride, source, rows.source_stride, rows.block_bytes,
                                       run.length, cudaMemcpyDefault, stream));
    } else {
      for (std::int64_t i = 0; i < run.length; ++i) {
        pieces_.push_back({source + i * rows.source_stride, target + i * rows.target_stride, rows.block_bytes});
      }
    }
    return {};
  }

  // The helper's half goes to the other stream, which the first one then waits for.
  Status SubmitHalves(cudaStream_t stream, cudaStream_t other) {
    const auto count = static_cast<std::int64_t>(pieces_.size());
    const std::int64_t half = count / 2;
    PADDLE_KV_RETURN_IF_ERROR(ByTwoThreads(
        &helper_, device_, [&] { return CopyPieces(pieces_.data(), half, device_, stream); },
        [&] { return CopyPieces(&pieces_[half], count - half, device_, other); }));
    return PutBehind(stream, other, turns_[2]);
  }

  const int device_;
  std::vector<CopyPair> pieces_;
  CudaStream turning_;  // takes turns with the transfer stream
  CudaEvent turns_[kTurns];
  bool is_turning_first_ = true;  // the last time
  bool more_follows_ = false;
  HelperThread helper_;
};

}  // namespace

std::unique_ptr<Engine> MakeCopyEngine(int device) { return std::make_unique<CopyEngine>(device); }

}  // namespace paddle_kv
