#include "paddle_kv/swap/engine.h"
namespace paddle_kv {
std::unique_ptr<Engine> MakeKernelEngine(int d) { return MakeCopyEngine(d); }
std::unique_ptr<Engine> MakeStagingEngine(int d) { return MakeCopyEngine(d); }
}  // namespace paddle_kv
