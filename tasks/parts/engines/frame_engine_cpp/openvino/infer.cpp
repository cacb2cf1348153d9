// Runs the engine of this bundle with OpenVINO, one frame at a time; `infer --help` says how.
// Your own program needs all down to Engine: fill engine.frame.bytes, call infer(), read engine.answer.bytes.
#include <openvino/openvino.hpp>

#include "../bundle.hpp"

// Makes the tensor that the engine declares; returns the one of OpenVINO that has its bytes.
ov::Tensor bind(Tensor& tensor, const ov::Output<const ov::Node>& declared) {
    const ov::element::Type type = declared.get_element_type();
    const std::string kind = type.is_real() ? "f" : type.is_signed() ? "i" : "u";
    Shape shape;
    for (const auto& axis : declared.get_partial_shape())
        shape.push_back(axis.is_static() ? axis.get_length() : -1);
    tensor = make_tensor((type.size() == 1 ? "|" : "<") + kind + std::to_string(type.size()), shape);
    return {type, ov::Shape(tensor.shape.begin(), tensor.shape.end()), tensor.bytes.data()};
}

class Engine {
    ov::Core core_;
    ov::CompiledModel compiled_;
    ov::InferRequest request_;

  public:
    Tensor frame, answer;

    explicit Engine(Bundle bundle) {
        const std::string built = bundle.values["runtime_version"],
                          here = ov::get_openvino_version().buildNumber;
        if (here.rfind(built + "-", 0) != 0)
            throw Failure("the engine was built and measured with OpenVINO " + built + ", linked is " + here +
                          ". Build this program with -DOpenVINO_DIR of that version.");
        ov::AnyMap properties;
        for (const auto& [key, value] : bundle.values)
            if (key.rfind("property.", 0) == 0) properties[key.substr(9)] = value;
        std::istringstream blob(bundle.engine);
        try {
            compiled_ = core_.import_model(blob, "CPU", properties);
        } catch (const ov::Exception& error) {
            throw Failure("the engine was compiled on a CPU with " + bundle.values["isa"] +
                          ", OpenVINO cannot load it here. Build it again for this CPU. " + error.what());
        }
        request_ = compiled_.create_infer_request();
        request_.set_input_tensor(bind(frame, compiled_.input(0)));
        request_.set_output_tensor(bind(answer, compiled_.output(0)));
    }

    void infer() { request_.infer(); }
};

#include "../reading.hpp"
#include "../program.hpp"
