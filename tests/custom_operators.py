"""Libraries with a custom operator, for ONNX Runtime and for OpenVINO, compiled as a user would."""

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import openvino
import pytest

from tasks.parts.custom_operators import CustomOperators
from tests.cpp_programs import onnxruntime_headers

DOMAIN, OPERATOR = "test.lab", "Swish2"

FOR_ONNXRUNTIME = r"""
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


FOR_OPENVINO = r"""
#include <cmath>
#include "openvino/core/op_extension.hpp"
#include "openvino/frontend/onnx/extension/conversion.hpp"
#include "openvino/op/op.hpp"

class Swish2 : public ov::op::Op {
 public:
  OPENVINO_OP("Swish2", "test.lab");
  Swish2() = default;
  explicit Swish2(const ov::OutputVector& inputs) : Op(inputs) { constructor_validate_and_infer_types(); }
  void validate_and_infer_types() override {
    set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
  }
  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    return std::make_shared<Swish2>(inputs);
  }
  bool visit_attributes(ov::AttributeVisitor&) override { return true; }
  bool has_evaluate() const override { return true; }
  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    outputs[0].set_shape(inputs[0].get_shape());
    const float* x = inputs[0].data<float>();
    float* y = outputs[0].data<float>();
    for (size_t i = 0; i < inputs[0].get_size(); ++i) y[i] = x[i] / (1 + std::exp(-2 * x[i]));
    return true;
  }
};

static ov::OutputVector convert(const ov::frontend::NodeContext& node) {
  return std::make_shared<Swish2>(ov::OutputVector{node.get_input(0)})->outputs();
}

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>(
    {std::make_shared<ov::OpExtension<Swish2>>(),
     std::make_shared<ov::frontend::onnx::ConversionExtension>("Swish2", "test.lab", convert)}));
"""


def compile_library(folder: Path) -> CustomOperators:
    """Compile the operator for ONNX Runtime, and declare the library by its absolute path."""
    return _compile(folder / "libswish.so", FOR_ONNXRUNTIME, ["-Wall", "-I", onnxruntime_headers()])


def compile_extension(folder: Path) -> CustomOperators:
    """Compile the operator for the installed OpenVINO."""
    package = Path(openvino.__path__[0])
    libraries = [
        path for name in ("", "_onnx_frontend") for path in package.glob(f"libs/libopenvino{name}.so.*")
    ]
    return _compile(folder / "libswish_openvino.so", FOR_OPENVINO, ["-I", package / "include", *libraries])


def _compile(library: Path, source: str, options: Sequence[str | Path]) -> CustomOperators:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    file = library.with_suffix(".cpp")
    file.write_text(source)
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", file, *options, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return CustomOperators(str(library), hashlib.sha256(library.read_bytes()).hexdigest(), [DOMAIN])
