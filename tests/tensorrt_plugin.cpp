// A library of plugins of TensorRT, for its registry: it has a creator of Swish2.
#include <NvInfer.h>

using namespace nvinfer1;

class Creator final : public IPluginCreatorV3One {
    const PluginFieldCollection fields_{0, nullptr};

  public:
    IPluginV3* createPlugin(const char*, const PluginFieldCollection*, TensorRTPhase) noexcept override {
        return nullptr;  // the registry asks for none
    }
    const PluginFieldCollection* getFieldNames() noexcept override { return &fields_; }
    const char* getPluginName() const noexcept override { return "Swish2"; }
    const char* getPluginVersion() const noexcept override { return "1"; }
    const char* getPluginNamespace() const noexcept override { return ""; }
};

extern "C" void setLoggerFinder(ILoggerFinder*) {}

extern "C" IPluginCreatorInterface* const* getCreators(std::int32_t& count) {
    static Creator creator;
    static IPluginCreatorInterface* const creators[] = {&creator};
    count = 1;
    return creators;
}
