// What the kernel uses of torch's header of this name, which takes three times as long to compile.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using at::Tensor;
}
