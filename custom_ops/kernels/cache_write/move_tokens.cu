// Which kernel, of gather_rows.cu or of move_kernels.cuh, moves the tokens, and in what words. The instantiations that
// dequantise are in files of their own, one for each format of the rows: they take a compiler the longest.
#include "paddle_kv/cache_write/move_tokens.h"

#include "paddle_kv/cache_write/gather_rows.h"
#include "paddle_kv/cache_write/move_kernels.cuh"

namespace paddle_kv {
namespace {

template <bool kToCache, int kElementBytes>
Status LaunchTiles(const TokenMove& move, cudaStream_t stream) {
  return LaunchByTile(move, kElementBytes, [&](unsigned ctas, const MoveTileShape& shape) {
    if constexpr (kToCache) {
      ScatterTiles<kElementBytes><<<ctas, MoveTuning::kThreads, 0, stream>>>(move, shape);
    } else {
      GatherTiles<ElementsMoved<kElementBytes>><<<ctas, MoveTuning::kThreads, 0, stream>>>(move, shape, {});
    }
  });
}

template <bool kToCache>
Status LaunchCopy(const TokenMove& given, const DeviceStream& where) {
  const TokenMove move = WithJoinedHeads(given, given.element_bytes, true);
  RowGather gather;
  if (!kToCache && AsRowGather(move, &gather)) return GatherRows(gather, where);
  const cudaStream_t stream = StreamOf(where);
  if (IsPackedValue(move)) {
    if (move.element_bytes == 4) return LaunchTiles<kToCache, 4>(move, stream);
    if (move.element_bytes == 2) return LaunchTiles<kToCache, 2>(move, stream);
    return LaunchTiles<kToCache, 1>(move, stream);
  }
  const std::int64_t row_bytes = move.head_size * move.element_bytes;
  const std::uint64_t bits = AlignmentBits(move.rows, row_bytes) | AlignmentBits(move.cache, row_bytes);
  if (bits % 16 == 0) return LaunchByRow<Moved<16>, kToCache>(move, {}, stream);
  if (bits % 8 == 0) return LaunchByRow<Moved<8>, kToCache>(move, {}, stream);
  if (bits % 4 == 0) return LaunchByRow<Moved<4>, kToCache>(move, {}, stream);
  if (bits % 2 == 0) return LaunchByRow<Moved<2>, kToCache>(move, {}, stream);
  return LaunchByRow<Moved<1>, kToCache>(move, {}, stream);
}

}  // namespace

Status GatherDequantizedSingly(const TokenMove& move, const Dequantization& how, const DeviceStream& where) {
  const auto launch = [&](auto codec) {
    using Codec = decltype(codec);
    return how.DiffersByToken() ? LaunchByRow<ByToken<Codec>, false>(move, how, StreamOf(where))
                                : LaunchByRow<Codec, false>(move, how, StreamOf(where));
  };
  return ElementBytes(how.plain) == 4 ? launch(DequantizedSingly<4>{}) : launch(DequantizedSingly<2>{});
}

Status GatherTokensCuda(const TokenMove& move, const DeviceStream& where) {
  if (move.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  return LaunchCopy<false>(move, where);
}

Status ScatterTokensCuda(const TokenMove& move, const DeviceStream& where) {
  if (move.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  return LaunchCopy<true>(move, where);
}

Status DequantizeTokensCuda(const TokenMove& move, const Dequantization& how, const DeviceStream& where) {
  if (move.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  switch (how.plain) {
    case ElementType::kFloat16:
      return GatherDequantized<Float16>(move, how, where);
    case ElementType::kBFloat16:
      return GatherDequantized<BFloat16>(move, how, where);
    default:
      return GatherDequantized<Float32>(move, how, where);
  }
}

}  // namespace paddle_kv
