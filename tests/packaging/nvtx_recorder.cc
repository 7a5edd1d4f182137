// What a profiler puts into a process that uses NVTX: writes the ranges of all domains into the file NVTX_RECORD.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

std::FILE* record = nullptr;

nvtxDomainHandle_t Create(const char* name) { return reinterpret_cast<nvtxDomainHandle_t>(new std::string(name)); }

nvtxStringHandle_t Register(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(new std::string(text));
}

int Push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  std::fprintf(record, "%s push %s\n", reinterpret_cast<std::string*>(domain)->c_str(),
               reinterpret_cast<std::string*>(event->message.registered)->c_str());
  std::fflush(record);
  return 0;
}

int Pop(nvtxDomainHandle_t domain) {
  std::fprintf(record, "%s pop\n", reinterpret_cast<std::string*>(domain)->c_str());
  std::fflush(record);
  return 0;
}

template <class Function>
void Replace(NvtxFunctionTable table, int position, Function function) {
  *table[position] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  record = std::fopen(std::getenv("NVTX_RECORD"), "a");
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned count = 0;
  if (record == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &count) == 0) return 0;
  Replace(table, NVTX_CBID_CORE2_DomainCreateA, Create);
  Replace(table, NVTX_CBID_CORE2_DomainRegisterStringA, Register);
  Replace(table, NVTX_CBID_CORE2_DomainRangePushEx, Push);
  Replace(table, NVTX_CBID_CORE2_DomainRangePop, Pop);
  return 1;
}
