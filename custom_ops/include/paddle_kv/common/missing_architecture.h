#pragma once

#include <string>

#include "paddle_kv/common/status.h"

namespace paddle_kv {

// What to do where a kernel failed because the build has none for the GPU; empty: it failed for another reason.
std::string MissingArchitecture(const Status& status, int device);

}  // namespace paddle_kv
