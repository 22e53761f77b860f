// A library with AOTInductor's C interface that computes nothing and writes its arguments, a line each, to the file
// RECORDING_LIBRARY. It includes torch's own header, so a function with another signature does not compile.
#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <cstdlib>
#include <fstream>
#include <iostream>

static std::ofstream& record() {
  static std::ofstream file(std::getenv("RECORDING_LIBRARY"));
  return file;
}

extern "C" {

AOTIRuntimeError AOTInductorModelContainerCreateWithDevice(
    AOTInductorModelContainerHandle* container_handle,
    size_t num_models,
    const char* device_str,
    const char* cubin_dir) {
  *container_handle = reinterpret_cast<AOTInductorModelContainerHandle>(0x123456789abc);
  record() << "create " << num_models << " " << device_str << " " << (cubin_dir == nullptr) << std::endl;
  return AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorModelContainerRunSingleThreaded(
    AOTInductorModelContainerHandle container_handle,
    AtenTensorHandle* input_handles,
    size_t num_inputs,
    AtenTensorHandle* output_handles,
    size_t num_outputs,
    AOTInductorStreamHandle stream_handle,
    AOTIProxyExecutorHandle proxy_executor_handle) {
  record() << "run " << container_handle << " " << (output_handles == nullptr) << " " << num_outputs << " "
           << stream_handle << " " << (proxy_executor_handle == nullptr);
  for (size_t index = 0; index < num_inputs; ++index) {
    void* data = nullptr;
    int64_t elements = 0;
    aoti_torch_get_data_ptr(input_handles[index], &data);
    aoti_torch_get_numel(input_handles[index], &elements);
    record() << " " << data << ":" << elements;
    aoti_torch_delete_tensor_object(input_handles[index]);
  }
  record() << std::endl;
  if (std::getenv("RECORDING_LIBRARY_FAILS")) {
    std::cerr << "Error: a C++ backtrace" << std::endl;
    return AOTI_RUNTIME_FAILURE;
  }
  return AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorGetLastError(const char** error_msg) {
  *error_msg = "out of memory\nframe #0: a C++ backtrace";
  return AOTI_RUNTIME_SUCCESS;
}

}
