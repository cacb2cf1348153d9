// Runs the engine of this bundle with ONNX Runtime, one frame at a time; `infer --help` says how.
// Your own program needs all down to Engine: fill engine.frame.bytes, call infer(), read engine.answer.bytes.
#include <onnxruntime_cxx_api.h>

#include "../bundle.hpp"

// Makes the tensor that the engine declares; returns the value that has its bytes.
Ort::Value bind(Tensor& tensor, const Ort::TypeInfo& declared) {
    const char* const numpy_types[] = {"", "<f4", "|u1", "|i1", "<u2", "<i2", "<i4", "<i8"};
    const auto info = declared.GetTensorTypeAndShapeInfo();
    const auto type = info.GetElementType();
    if (type < ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || type > ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
        throw Failure("the engine gives ONNX type " + std::to_string(type) + ", use target.gives=classes.");
    tensor = make_tensor(numpy_types[type], info.GetShape());
    return Ort::Value::CreateTensor(Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault),
                                    tensor.bytes.data(), tensor.bytes.size(), tensor.shape.data(),
                                    tensor.shape.size(), type);
}

class Engine {
    Ort::Env env_{ORT_LOGGING_LEVEL_WARNING, "infer"};
    Ort::Session session_{nullptr};
    Ort::IoBinding binding_{nullptr};

  public:
    Tensor frame, answer;

    explicit Engine(Bundle bundle) {
        const std::string built = bundle.values["runtime_version"], here = Ort::GetVersionString();
        if (here != built)
            throw Failure("the engine was built and measured with ONNX Runtime " + built + ", linked is " +
                          here + ". Build this program with -DONNXRUNTIME_LIBRARY of that version.");
        const std::string cpu = read_file("/proc/cpuinfo");
        const bool has_vnni = cpu.find("avx_vnni") != cpu.npos || cpu.find("avx512_vnni") != cpu.npos;
        if (bundle.values["needs_vnni"] == "YES" && !has_vnni)
            throw Failure("the engine's INT8 sums can saturate without VNNI. Build it again for this CPU.");
        Ort::SessionOptions options;
        options.SetIntraOpNumThreads(std::atoi(bundle.values["num_threads"].c_str()));
        options.SetInterOpNumThreads(1);
        session_ = Ort::Session(env_, bundle.engine.data(), bundle.engine.size(), options);
        binding_ = Ort::IoBinding(session_);
        binding_.BindInput(session_.GetInputNames()[0].c_str(), bind(frame, session_.GetInputTypeInfo(0)));
        binding_.BindOutput(session_.GetOutputNames()[0].c_str(),
                            bind(answer, session_.GetOutputTypeInfo(0)));
    }

    void infer() { session_.Run(Ort::RunOptions{nullptr}, binding_); }
};

#include "../reading.hpp"
#include "../program.hpp"
