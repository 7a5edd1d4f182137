#include "device_of.h"

#include <cstdlib>
#include <set>
#include <sstream>
#include <string>

#include "errors.h"

namespace paddle_kv {
namespace {

std::set<std::string> CudaDeviceTypes() {
  std::set<std::string> types{"cuda_like", "metax_gpu", "iluvatar_gpu"};
  const char* more = std::getenv("PADDLE_KV_CUDA_DEVICES");
  std::istringstream names(more == nullptr ? "" : more);
  for (std::string name; std::getline(names, name, ',');) types.insert(name);
  return types;
}

[[noreturn]] void Refuse(const phi::Place& place) {
  const std::string device = place.DebugString();
  ThrowNotImplementedError(
      "a tensor is on " + device.substr(device.find('(') + 1, device.rfind(')') - device.find('(') - 1) +
      ", whose memory is not known to be CUDA's; if it is, name its device type in PADDLE_KV_CUDA_DEVICES before "
      "paddle_kv is imported");
}

// Asking for the name of the device type copies a string, once for each cache of a call.
bool IsOfCudaPlugin(const phi::Place& place) {
  static const std::set<std::string> types = CudaDeviceTypes();
  thread_local phi::Place last;
  if (place == last) return true;
  if (types.count(place.GetDeviceType()) == 0) return false;
  last = place;
  return true;
}

}  // namespace

int DeviceOf(const paddle::Tensor& tensor) {
  const phi::Place& place = tensor.place();
  switch (place.GetType()) {
    case phi::AllocationType::CPU:
      return kCpu;
    case phi::AllocationType::GPUPINNED:
      return kPinned;
    case phi::AllocationType::GPU:
      return place.GetDeviceId();
    case phi::AllocationType::CUSTOM:
      if (IsOfCudaPlugin(place)) return place.GetDeviceId();
      Refuse(place);
    default:
      Refuse(place);
  }
}

}  // namespace paddle_kv
