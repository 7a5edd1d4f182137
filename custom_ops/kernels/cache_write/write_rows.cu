// A thread takes one word of a token in each part. The place of the thread in its CTA is the place of the word: x in
// the row of a head, y the head, z the token; so nothing is divided. Slot and words are read side by side, and only the
// stores wait for the slot.
#include "paddle_kv/cache_write/write_rows.h"

#include <algorithm>

#include "paddle_kv/common/cuda_status.cuh"
#include "paddle_kv/common/dependent_launch.cuh"
#include "paddle_kv/common/word_access.cuh"

namespace paddle_kv {
namespace {

struct Tuning {
  static constexpr unsigned kThreads = 128;  // of a CTA, unless a token has more words
  static constexpr unsigned kMostThreads = 1024;
  static constexpr unsigned kMostTokens = 64;  // of a CTA, which has at most so many places in z
};

constexpr std::uint32_t kWordBytes = 16;

__device__ inline std::uint64_t Product(std::uint32_t a, std::uint32_t b) { return std::uint64_t{a} * b; }

enum class Form {
  kAlone,     // one token a CTA, rows of one length, no gap between the slots or between the rows of the cache
  kTogether,  // some tokens a CTA, or rows of two lengths
  kApart,     // also heads of a row, or blocks, that do not follow each other without a gap
};

template <class Slot, Form kForm, bool kDependent>
__global__ void __launch_bounds__(Tuning::kMostThreads) WriteRowsOfTokens(const __grid_constant__ WholeRows rows) {
  constexpr bool kAlone = kForm == Form::kAlone;
  constexpr bool kApart = kForm == Form::kApart;
  std::uint32_t token = blockIdx.x;
  if (!kAlone) {
    // Behind the end the last token once more: a branch would come before all that is read.
    token = min(token * blockDim.z + threadIdx.z, rows.tokens - 1);
  }
  const Slot* const slot_of_token =
      static_cast<const Slot*>(rows.slots) + (kAlone ? token : Product(token, rows.slot_stride));
  const std::uint32_t byte = threadIdx.x * kWordBytes;
  const std::uint8_t* sources[kMostParts];
#pragma unroll
  for (int p = 0; p < kMostParts; ++p) {
    const WholeRowPart& part = rows.parts[p];
    sources[p] = part.source + Product(token, part.source_token_stride) + byte;
    if (kApart) sources[p] += Product(threadIdx.y, part.source_head_stride);
  }
  if (kDependent) {
    WaitForKernelBefore();
    LetKernelBehindBegin();
  }
  const auto slot = static_cast<std::uint64_t>(std::int64_t{*slot_of_token});
  uint4 held[kMostParts];
#pragma unroll
  for (int p = 0; p < kMostParts; ++p) {
    if (kAlone || threadIdx.x < rows.parts[p].words) held[p] = LoadNow(sources[p]);
  }
  const bool written = slot < rows.slot_limit;  // not a negative one either
  const auto narrow = static_cast<std::uint32_t>(slot);
#pragma unroll
  for (int p = 0; p < kMostParts; ++p) {
    const WholeRowPart& part = rows.parts[p];
    std::uint8_t* target = part.cache + byte;
    if (kApart) {
      const std::uint32_t block = narrow >> rows.block_shift;
      target += Product(threadIdx.y, part.cache_head_stride) + Product(block, part.cache_block_stride) +
                Product(narrow - (block << rows.block_shift), part.cache_token_stride);
    } else {
      target += Product(narrow, part.cache_token_stride);
    }
    StoreIf(written && (kAlone || threadIdx.x < part.words), target, held[p]);
  }
}

using Kernel = void (*)(WholeRows);

template <class Slot, bool kDependent>
Kernel KernelOf(Form form) {
  return form == Form::kAlone      ? WriteRowsOfTokens<Slot, Form::kAlone, kDependent>
         : form == Form::kTogether ? WriteRowsOfTokens<Slot, Form::kTogether, kDependent>
                                   : WriteRowsOfTokens<Slot, Form::kApart, kDependent>;
}

bool IsNarrow(std::int64_t number) { return number >= 0 && number < std::int64_t{1} << 32; }

}  // namespace

bool AsWholeRows(const TokenWrite& write, WholeRows* rows) {
  const std::int64_t element_bytes = ElementBytes(write.plain);
  const std::int64_t block_size = write.parts[0].cache.block_size;
  bool apart = false;
  std::uint64_t bits = 0;
  for (int p = 0; p < kMostParts; ++p) {
    const TokenPart& part = write.parts[p];
    const RowPlace& cache = part.cache;
    const std::int64_t row_bytes = part.head_size * element_bytes;
    if (p >= write.part_count || part.source.element_stride != element_bytes || cache.group_bytes < row_bytes ||
        part.heads != write.parts[0].heads) {
      return false;
    }
    for (const std::int64_t stride : {part.source.token_stride, part.source.head_stride, cache.block_stride,
                                      cache.token_stride, cache.head_stride, row_bytes}) {
      if (!IsNarrow(stride)) return false;
      bits |= static_cast<std::uint64_t>(stride);
    }
    bits |= reinterpret_cast<std::uintptr_t>(part.source.data) | reinterpret_cast<std::uintptr_t>(cache.data);
    apart = apart || part.heads > 1 || cache.block_stride != block_size * cache.token_stride;
    rows->parts[p] = {part.source.data,
                      cache.data,
                      static_cast<std::uint32_t>(part.source.token_stride),
                      static_cast<std::uint32_t>(part.source.head_stride),
                      static_cast<std::uint32_t>(cache.block_stride),
                      static_cast<std::uint32_t>(cache.token_stride),
                      static_cast<std::uint32_t>(cache.head_stride),
                      static_cast<std::uint32_t>(row_bytes / kWordBytes)};
  }
  const std::int64_t heads = write.parts[0].heads;
  const std::int64_t words = std::max(rows->parts[0].words, rows->parts[1].words);
  if (bits % kWordBytes != 0 || words == 0 || heads == 0 || words * heads > Tuning::kMostThreads ||
      !IsNarrow(write.tokens) || !IsNarrow(write.slots.stride) || !IsNarrow(write.slots.limit)) {
    return false;
  }
  rows->block_shift = -1;
  if (apart) {
    int shift = 0;
    while (std::int64_t{1} << shift < block_size) ++shift;
    if (std::int64_t{1} << shift != block_size) return false;
    rows->block_shift = shift;
  }
  rows->slots = write.slots.slots;
  rows->slot_limit = static_cast<std::uint64_t>(write.slots.limit);
  rows->slot_stride = static_cast<std::uint32_t>(write.slots.stride);
  rows->tokens = static_cast<std::uint32_t>(write.tokens);
  rows->heads = static_cast<std::uint32_t>(heads);
  rows->slots_are_int64 = write.slots.is_int64;
  return true;
}

Status WriteWholeRows(const WholeRows& rows, bool dependent, const DeviceStream& where) {
  const unsigned words = std::max(rows.parts[0].words, rows.parts[1].words);
  const unsigned fitting = std::max(1u, Tuning::kThreads / (words * rows.heads));
  const unsigned tokens_of_cta = std::min(fitting, Tuning::kMostTokens);
  const std::int64_t ctas = (std::int64_t{rows.tokens} + tokens_of_cta - 1) / tokens_of_cta;
  if (ctas > kLargestGrid) return ToStatus(cudaErrorInvalidConfiguration, "WriteRowsOfTokens");
  const bool alone = tokens_of_cta == 1 && rows.parts[0].words == rows.parts[1].words && rows.slot_stride == 1;
  const Form form = rows.block_shift >= 0 ? Form::kApart : alone ? Form::kAlone : Form::kTogether;
  const dim3 block(words, rows.heads, tokens_of_cta);
  const auto launch = [&](Kernel kernel) {
    return LaunchKernel(kernel, dim3(static_cast<unsigned>(ctas)), block, dependent, StreamOf(where),
                        "WriteRowsOfTokens", rows);
  };
  if (dependent)
    return launch(rows.slots_are_int64 ? KernelOf<std::int64_t, true>(form) : KernelOf<std::int32_t, true>(form));
  return launch(rows.slots_are_int64 ? KernelOf<std::int64_t, false>(form) : KernelOf<std::int32_t, false>(form));
}

}  // namespace paddle_kv
