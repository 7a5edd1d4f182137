// Ranges of the domain "paddle_kv" for profilers that read NVTX, such as `nsys profile --trace=cuda,nvtx`. While none
// is attached a range costs a few nanoseconds; a build without CUDA has none.
#pragma once

#include <cstdint>

#if defined(PADDLE_KV_WITH_CUDA) || defined(__CUDACC__)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define PADDLE_KV_WITH_NVTX
#endif
#endif

namespace paddle_kv {

#ifdef PADDLE_KV_WITH_NVTX

inline nvtxDomainHandle_t NvtxDomain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("paddle_kv");
  return domain;
}

// Made once for each name: static const NvtxName name("copy_blocks");
class NvtxName {
 public:
  explicit NvtxName(const char* text) : handle_(nvtxDomainRegisterStringA(NvtxDomain(), text)) {}
  nvtxStringHandle_t handle() const { return handle_; }

 private:
  nvtxStringHandle_t handle_;
};

// From construction to destruction, on one thread. `number` is shown beside the name: a layer, for example.
class NvtxRange {
 public:
  explicit NvtxRange(const NvtxName& name, std::int64_t number = 0) {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    attributes.message.registered = name.handle();
    attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
    attributes.payload.llValue = number;
    nvtxDomainRangePushEx(NvtxDomain(), &attributes);
  }
  ~NvtxRange() { nvtxDomainRangePop(NvtxDomain()); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

#else

class NvtxName {
 public:
  explicit NvtxName(const char*) {}
};

class NvtxRange {
 public:
  explicit NvtxRange(const NvtxName&, std::int64_t = 0) {}
  ~NvtxRange() {}  // not trivial: a range that only lives is not an unused variable
};

#endif

}  // namespace paddle_kv
