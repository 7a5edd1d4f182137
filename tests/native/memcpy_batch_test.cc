// Which calls a list of copies becomes, on a CUDA runtime of threads (fake_cuda).
#include "paddle_kv/memcpy/memcpy_batch.h"

#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "fake_cuda.h"

namespace paddle_kv {
namespace {

constexpr int kPieces = 7;

// Copies pieces of memory in reverse order, as the copy engine does with what the driver has.
void Copy() {
  std::vector<int> from(kPieces);
  std::vector<int> to(kPieces, -1);
  std::iota(from.begin(), from.end(), 1);
  std::vector<CopyPair> pairs;
  for (int i = 0; i < kPieces; ++i) {
    pairs.push_back({reinterpret_cast<std::uint8_t*>(&from[i]), reinterpret_cast<std::uint8_t*>(&to[kPieces - 1 - i]),
                     sizeof(int)});
  }
  const cudaStream_t stream = MakeFakeStream();
  CHECK(
      MemcpyBatchCuda(pairs.data(), kPieces, HasMemcpyBatchAsync(), {0, reinterpret_cast<std::int64_t>(stream)}).ok());
  DestroyFakeStream(stream);
  for (int i = 0; i < kPieces; ++i) CHECK(to[kPieces - 1 - i] == from[i]);
}

void PiecesGoInABatch() {
  unsetenv("PADDLE_KV_BATCHED_COPIES");
  CHECK(HasMemcpyBatchAsync());
  Copy();
  CHECK(BatchesMade() == 1);
}

void BatchesCanBeTurnedOff() {
  setenv("PADDLE_KV_BATCHED_COPIES", "0", 1);
  CHECK(!HasMemcpyBatchAsync());
  Copy();
  CHECK(BatchesMade() == 0);
}

// A process asks once.
const Test kTests[] = {
    {"pieces_go_in_a_batch", PiecesGoInABatch},
    {"batches_can_be_turned_off", BatchesCanBeTurnedOff},
};

}  // namespace
}  // namespace paddle_kv

int main(int argc, char** argv) { return RunTests(paddle_kv::kTests, argc, argv); }
