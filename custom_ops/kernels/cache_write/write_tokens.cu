// Which kernel, of write_rows.cu or of write_kernels.cuh, writes the tokens, and in what words. The instantiations that
// quantise are in files of their own, one for each format of the tokens: they take a compiler the longest.
#include "paddle_kv/cache_write/write_tokens.h"

#include "paddle_kv/cache_write/write_kernels.cuh"
#include "paddle_kv/cache_write/write_rows.h"

namespace paddle_kv {
namespace {

// Heads that lie side by side on both sides are one long row. Strides of dimensions of size 1 mean nothing: they must
// not decide about alignment.
void JoinHeads(const TokenWrite& write, TokenPart* part) {
  if (write.tokens == 1) part->source.token_stride = 0;
  if (part->heads == 1) part->source.head_stride = part->cache.head_stride = 0;
  const std::int64_t source_bytes = part->head_size * ElementBytes(write.plain);
  const std::int64_t stored_bytes = part->head_size * ElementBytes(write.stored);
  const bool one_scale = part->scale.pointer == nullptr || part->scale.stride_per_head == 0;
  const bool one_row = IsOneRow(write, *part);
  const std::int64_t next_head =
      one_row ? stored_bytes : stored_bytes / part->cache.group_bytes * part->cache.group_stride;
  if (part->source.element_stride != ElementBytes(write.plain) || part->source.head_stride != source_bytes ||
      part->cache.head_stride != next_head || !one_scale) {
    return;
  }
  if (one_row) part->cache.group_bytes = stored_bytes * part->heads;
  part->head_size *= part->heads;
  part->heads = 1;
  part->source.head_stride = part->cache.head_stride = 0;
}

Status WriteCopied(const TokenWrite& write, bool dependent, const DeviceStream& where) {
  WholeRows rows;
  if (AsWholeRows(write, &rows)) return WriteWholeRows(rows, dependent, where);
  const WordBits bits = WordBitsOf(write);
  const std::uint64_t all = bits.source | bits.stored | bits.cache;
  if (ElementBytes(write.plain) == 4) {
    return bits.dense && all % 16 == 0 ? Launch<Copied<16>, 4>(write, where) : Launch<Copied<4>, 4>(write, where);
  }
  if (bits.dense && all % 16 == 0) return Launch<Copied<16>, 2>(write, where);
  if (bits.dense && all % 4 == 0) return Launch<Copied<4>, 2>(write, where);
  return Launch<Copied<2>, 2>(write, where);
}

}  // namespace

Status WriteQuantizedSingly(const TokenWrite& write, const DeviceStream& where) {
  return ElementBytes(write.plain) == 4 ? Launch<QuantizedSingly<4>, 1>(write, where)
                                        : Launch<QuantizedSingly<2>, 1>(write, where);
}

Status WriteTokensCuda(const TokenWrite& write, bool dependent, const DeviceStream& where) {
  if (write.tokens == 0) return {};
  DeviceGuard guard(where.device);
  PADDLE_KV_RETURN_IF_ERROR(guard.status());
  TokenWrite joined = write;
  for (int p = 0; p < joined.part_count; ++p) JoinHeads(write, &joined.parts[p]);
  if (write.plain == write.stored) return WriteCopied(joined, dependent, where);
  switch (write.plain) {
    case ElementType::kFloat16:
      return WriteQuantized<Float16>(joined, where);
    case ElementType::kBFloat16:
      return WriteQuantized<BFloat16>(joined, where);
    default:
      return WriteQuantized<Float32>(joined, where);
  }
}

}  // namespace paddle_kv
