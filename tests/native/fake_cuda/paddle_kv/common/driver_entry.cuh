// In place of the library's own, which asks the runtime.
#pragma once

namespace paddle_kv {

void* DriverEntry(const char* name, unsigned version);

}  // namespace paddle_kv
