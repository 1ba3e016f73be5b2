// The checks of host code: a failed one is a C++ exception, which the stable ABI turns into a Python RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace vsa {

// Text of any printable values, put together.
template <typename... Values>
std::string text(const Values&... values) {
  std::ostringstream stream;
  (stream << ... << values);
  return stream.str();
}

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// The words of every refusal of an argument, as ArgumentError has them in Python.
[[noreturn]] inline void refuse(const char* argument, const std::string& given, const std::string& allowed) {
  fail(text(argument, ": got ", given, "; allowed: ", allowed));
}

inline void check_cuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) fail(text(call, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error)));
}

}  // namespace vsa

// A call of the CUDA runtime that must succeed. A macro only to print the call.
#define VSA_CHECK_CUDA(call) ::vsa::check_cuda((call), #call)
