// Runs the engine of this bundle with OpenVINO, one frame at a time; `infer --help` says how.

#include <openvino/openvino.hpp>

#include "program.hpp"

using frames::Failure;

namespace {

std::string numpy_type(const ov::element::Type& type) {
    if (type == ov::element::boolean) return "|b1";
    const char* kind = type.is_real() ? "f" : type.is_signed() ? "i" : "u";
    if (type.bitwidth() % 8 != 0 || type == ov::element::bf16 || type.bitwidth() < (type.is_real() ? 16 : 8))
        throw Failure("the engine's answers are " + type.get_type_name() +
                      ", which NumPy has not. Give classes.");
    return (type.size() == 1 ? "|" : "<") + std::string(kind) + std::to_string(type.size());
}

class Engine {
  public:
    Engine(const frames::Description& description, const std::string& content)
        : frame_shape_{1, description.height, description.width, description.channels} {
        const std::string built = description.at("runtime_version"),
                          here = ov::get_openvino_version().buildNumber;
        if (here.rfind(built + "-", 0) != 0)
            throw Failure("the engine was built and measured with OpenVINO " + built +
                          ", this program is linked to " + here +
                          ". Build it with -DOpenVINO_DIR of that version.");
        std::istringstream blob(content);
        const ov::AnyMap properties(description.options.begin(), description.options.end());
        try {
            compiled_ = core_.import_model(blob, "CPU", properties);
        } catch (const ov::Exception& error) {
            throw Failure("OpenVINO cannot load the engine, which was compiled on a CPU with " +
                          description.at("isa") + " and runs only there. Build it again for this machine. " +
                          error.what());
        }
        check_input();
        const auto output = compiled_.output(0).get_partial_shape();
        std::vector<std::int64_t> sizes;
        for (const auto& size : output) sizes.push_back(size.is_static() ? size.get_length() : -1);
        const auto type = compiled_.output(0).get_element_type();
        answer = frames::make_answer(numpy_type(type), frames::shape_of_one(sizes));
        ov::Shape shape(answer.shape.begin(), answer.shape.end());
        shape.insert(shape.begin(), 1);
        request_ = compiled_.create_infer_request();
        request_.set_output_tensor(ov::Tensor(type, shape, answer.bytes.data()));
    }

    void infer(const std::uint8_t* frame) {
        if (frame != last_)
            request_.set_input_tensor(
                ov::Tensor(ov::element::u8, frame_shape_, const_cast<std::uint8_t*>(frame)));
        last_ = frame;
        request_.infer();
    }

    frames::Answer answer;

  private:
    void check_input() const {
        const auto input = compiled_.input(0);
        if (input.get_element_type() != ov::element::u8 ||
            !input.get_partial_shape().compatible(frame_shape_))
            throw Failure("the engine takes " + input.get_element_type().get_type_name() + " " +
                          input.get_partial_shape().to_string() + ", engine.txt says uint8 [1, " +
                          frames::text_of({frame_shape_.begin() + 1, frame_shape_.end()}) +
                          "]. Copy the bundle again.");
    }

    ov::Core core_;
    ov::CompiledModel compiled_;
    ov::InferRequest request_;
    ov::Shape frame_shape_;
    const std::uint8_t* last_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
    return frames::run_program<Engine>(argc, argv);
}
