#include "paddle_kv/transfer/c_call.h"

#include <algorithm>

#include "paddle_kv/common/missing_architecture.h"
#include "paddle_kv/transfer/queue_api.h"

namespace paddle_kv {
namespace {

thread_local Status last_error;
thread_local std::string last_error_text;

}  // namespace

int Fail(const Status& status, int device) {
  last_error = status;
  last_error_text = MissingArchitecture(status, device);
  if (!last_error_text.empty()) return -1;
  last_error_text = status.code < 0 ? status.text
                                    : std::string("CUDA error ") + status.name + " (" + std::to_string(status.code) +
                                          ") in " + status.call + ": " + status.text;
  return -1;
}

int Fail(const std::string& text) {
  last_error = {};
  last_error_text = text;
  return -1;
}

}  // namespace paddle_kv

const char* paddle_kv_queue_error(int* code, const char** name) {
  using paddle_kv::last_error;
  *code = std::max(0, last_error.code);
  *name = last_error.ok() ? "" : last_error.name;
  return paddle_kv::last_error_text.c_str();
}
