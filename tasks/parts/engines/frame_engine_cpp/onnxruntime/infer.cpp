// Runs the engine of this bundle with ONNX Runtime, one frame at a time; `infer --help` says how.

#include <onnxruntime_cxx_api.h>

#include "program.hpp"

using frames::Failure;

namespace {

std::string numpy_type(ONNXTensorElementDataType type) {
    static const std::map<ONNXTensorElementDataType, std::string> names = {
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, "|b1"},  {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "|u1"},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "|i1"},  {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, "<u2"},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, "<i2"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "<i4"},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, "<i8"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "<f2"},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "<f4"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, "<f8"}};
    const auto found = names.find(type);
    if (found == names.end())
        throw Failure("the engine's answers are of ONNX type " + std::to_string(type) +
                      ", which this program cannot write. Give classes.");
    return found->second;
}

void check_vnni() {
    const std::string cpu = frames::read_file("/proc/cpuinfo");
    if (cpu.find("avx_vnni") == std::string::npos && cpu.find("avx512_vnni") == std::string::npos)
        throw Failure(
            "the engine was built on a CPU with VNNI; this one lacks it, so that INT8 sums can saturate. "
            "Build "
            "the engine again for this machine.");
}

class Engine {
  public:
    Engine(const frames::Description& description, const std::string& content)
        : frame_shape_{1, static_cast<std::int64_t>(description.height),
                       static_cast<std::int64_t>(description.width),
                       static_cast<std::int64_t>(description.channels)},
          frame_bytes_(description.frame_bytes()) {
        const std::string built = description.at("runtime_version"), here = Ort::GetVersionString();
        if (here != built)
            throw Failure("the engine was built and measured with ONNX Runtime " + built +
                          ", this program is linked to " + here +
                          ". Build it with -DONNXRUNTIME_LIBRARY of that version.");
        if (description.options.at("needs_vnni") == "YES") check_vnni();
        Ort::SessionOptions options;
        options.SetIntraOpNumThreads(std::stoi(description.options.at("num_threads")));
        options.SetInterOpNumThreads(1);
        session_ = Ort::Session(env_, content.data(), content.size(), options);
        check_input();
        const auto output = session_.GetOutputTypeInfo(0);
        const auto info = output.GetTensorTypeAndShapeInfo();
        answer =
            frames::make_answer(numpy_type(info.GetElementType()), frames::shape_of_one(info.GetShape()));
        std::vector<std::int64_t> shape(answer.shape.begin(), answer.shape.end());
        shape.insert(shape.begin(), 1);
        output_ = Ort::Value::CreateTensor(memory_, answer.bytes.data(), answer.bytes.size(), shape.data(),
                                           shape.size(), info.GetElementType());
        input_name_ = session_.GetInputNames()[0];
        output_name_ = session_.GetOutputNames()[0];
    }

    void infer(const std::uint8_t* frame) {
        const char *input_name = input_name_.c_str(), *output_name = output_name_.c_str();
        const auto input =
            Ort::Value::CreateTensor<std::uint8_t>(memory_, const_cast<std::uint8_t*>(frame), frame_bytes_,
                                                   frame_shape_.data(), frame_shape_.size());
        session_.Run(Ort::RunOptions{nullptr}, &input_name, &input, 1, &output_name, &output_, 1);
    }

    frames::Answer answer;

  private:
    void check_input() const {
        const auto input = session_.GetInputTypeInfo(0);
        const auto info = input.GetTensorTypeAndShapeInfo();
        const auto shape = info.GetShape();
        bool fits = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 && shape.size() == 4;
        for (std::size_t axis = 0; fits && axis < 4; ++axis)
            fits = shape[axis] < 0 || shape[axis] == frame_shape_[axis];
        if (!fits)
            throw Failure(
                "the engine does not take the uint8 [1, H, W, C] of engine.txt. Copy the bundle again.");
    }

    Ort::Env env_{ORT_LOGGING_LEVEL_WARNING, "infer"};
    Ort::Session session_{nullptr};
    Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    Ort::Value output_{nullptr};
    std::string input_name_, output_name_;
    std::vector<std::int64_t> frame_shape_;
    std::size_t frame_bytes_;
};

}  // namespace

int main(int argc, char** argv) {
    return frames::run_program<Engine>(argc, argv);
}
