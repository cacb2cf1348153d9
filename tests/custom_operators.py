"""A library with a custom operator for ONNX Runtime, compiled as a user would, and graphs that need it."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tasks.parts.custom_operators import CustomOperators
from tests.cpp_programs import onnxruntime_headers

DOMAIN, OPERATOR = "test.lab", "Swish2"

SOURCE = r"""
#include <cmath>
#include "onnxruntime_c_api.h"

static const OrtApi* api;

// y = x / (1 + exp(-2 x)), for float tensors of any shape.
static OrtStatusPtr ORT_API_CALL compute(void*, OrtKernelContext* context) {
  const OrtValue* input = nullptr;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  size_t rank = 0, count = 0;
  if (OrtStatusPtr status = api->KernelContext_GetInput(context, 0, &input)) return status;
  if (OrtStatusPtr status = api->GetTensorTypeAndShape(input, &info)) return status;
  int64_t sizes[8] = {};
  OrtStatusPtr status = api->GetDimensionsCount(info, &rank);
  if (status == nullptr) status = api->GetDimensions(info, sizes, rank);
  if (status == nullptr) status = api->GetTensorShapeElementCount(info, &count);
  api->ReleaseTensorTypeAndShapeInfo(info);
  if (status != nullptr) return status;
  OrtValue* output = nullptr;
  void *from = nullptr, *to = nullptr;
  if ((status = api->KernelContext_GetOutput(context, 0, sizes, rank, &output)) != nullptr) return status;
  if ((status = api->GetTensorMutableData(const_cast<OrtValue*>(input), &from)) != nullptr) return status;
  if ((status = api->GetTensorMutableData(output, &to)) != nullptr) return status;
  const float* x = static_cast<const float*>(from);
  float* y = static_cast<float*>(to);
  for (size_t i = 0; i < count; ++i) y[i] = x[i] / (1 + std::exp(-2 * x[i]));
  return nullptr;
}

static OrtCustomOp make_operator() {
  OrtCustomOp op = {};
  op.version = ORT_API_VERSION;
  op.GetName = [](const OrtCustomOp*) { return "Swish2"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel) -> OrtStatusPtr {
    static int nothing;
    *kernel = &nothing;
    return nullptr;
  };
  op.KernelDestroy = [](void*) {};
  op.KernelComputeV2 = compute;
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  return op;
}

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  static const OrtCustomOp op = make_operator();
  api = base->GetApi(ORT_API_VERSION);
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = api->CreateCustomOpDomain("test.lab", &domain)) return status;
  if (OrtStatus* status = api->CustomOpDomain_Add(domain, &op)) return status;
  return api->AddCustomOpDomain(options, domain);
}
"""


def compile_library(folder: Path) -> CustomOperators:
    """Compile SOURCE to a shared library in a folder, and declare it by its absolute path."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    source, library = folder / "swish.cpp", folder / "libswish.so"
    source.write_text(SOURCE)
    options = ["-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-I", onnxruntime_headers()]
    done = subprocess.run(
        ["g++", *options, source, "-o", library], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return CustomOperators(str(library), hashlib.sha256(library.read_bytes()).hexdigest(), [DOMAIN])
