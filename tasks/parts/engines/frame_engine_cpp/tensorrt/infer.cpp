// Runs the plan of this bundle with TensorRT, one frame at a time; `infer --help` says how.
// Your own program needs all down to Engine: fill engine.frame.bytes, call infer(), read engine.answer.bytes.
// Not run on real hardware.
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <iterator>

#include "../bundle.hpp"

extern "C" bool initLibNvInferPlugins(void* logger, const char* libNamespace);  // as in NvInferPlugin.h

class Logger : public nvinfer1::ILogger {
    void log(Severity severity, const char* text) noexcept override {
        if (severity <= Severity::kWARNING) std::fprintf(stderr, "TensorRT: %s\n", text);
    }
};

void require(bool is_accepted, const std::string& call) {
    if (!is_accepted)
        throw Failure("TensorRT refuses " + call + "; its error is above. Build the engine again here.");
}

void check(cudaError_t status, const char* call) {
    if (status != cudaSuccess)
        throw Failure(std::string(call) + " of CUDA fails: " + cudaGetErrorString(status) +
                      ". Check that nvidia-smi runs and that the GPU has memory left.");
}

using Memory = std::shared_ptr<void>;

Memory allocate_on_gpu(std::size_t size) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, size), "cudaMalloc");
    return {memory, cudaFree};
}

Memory allocate_page_locked(std::size_t size) {
    void* memory = nullptr;
    check(cudaMallocHost(&memory, size), "cudaMallocHost");
    return {memory, cudaFreeHost};
}

// What the plan writes, in as much memory of the GPU as TensorRT asks for.
class Output : public nvinfer1::IOutputAllocator {
    std::uint64_t size_ = 0;

  public:
    Memory memory;
    Shape shape;

    void* reallocateOutputAsync(const char*, void*, std::uint64_t size, std::uint64_t,
                                cudaStream_t) noexcept override {
        void* larger = nullptr;
        if (size <= size_) return memory.get();
        if (cudaMalloc(&larger, size) != cudaSuccess) return nullptr;
        memory = {larger, cudaFree};
        size_ = size;
        return larger;
    }

    void notifyShape(const char*, const nvinfer1::Dims& dims) noexcept override {
        shape.assign(dims.d, dims.d + dims.nbDims);
    }
};

// Refuses another TensorRT than the plan was measured with, and headers that do not fit the library.
void check_version(Bundle& bundle) {
    const int major = getInferLibMajorVersion();
    std::string here = std::to_string(major);
    for (const int part : {getInferLibMinorVersion(), getInferLibPatchVersion(), getInferLibBuildVersion()})
        here += "." + std::to_string(part);
    const std::string built = bundle.values["runtime_version"];
    const bool is_same = (built + ".").rfind(here + ".", 0) == 0;  // Python's may go on: 10.13.3.9.post1
    if (!is_same && bundle.values["version_compatible"] != "YES")
        throw Failure("the engine was built and measured with TensorRT " + built + ", linked is " + here +
                      ". Build this program with -DTENSORRT_LIBRARY_DIR of that version.");
    if (major != NV_TENSORRT_MAJOR)
        throw Failure("the headers are of TensorRT " + std::to_string(NV_TENSORRT_MAJOR) + ", linked is " +
                      here + ". Build this program with -DTENSORRT_INCLUDE_DIR of the same major version.");
}

// Refuses a GPU on which the plan does not run, or runs unlike it was measured.
void check_gpu(Bundle& bundle) {
    cudaDeviceProp gpu;
    check(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
    const std::string here = std::to_string(gpu.major) + "." + std::to_string(gpu.minor), name = gpu.name,
                      built = bundle.values["compute_capability"], built_on = bundle.values["gpu"],
                      compatibility = bundle.values["hardware_compatibility"];
    if ((compatibility == "none" && here == built && name == built_on) ||
        (compatibility == "same_compute_capability" && here == built) ||
        (compatibility == "ampere_plus" && gpu.major >= 8))
        return;
    throw Failure("the engine was built on " + built_on + " (" + built + ") with hardware_compatibility " +
                  compatibility + ", this GPU is " + name + " (" + here + "). Build it again here.");
}

// Loads the libraries of the bundle: `plugins.NUMBER SHA256 FILE` in engine.txt.
void load_plugins(const Bundle& bundle, nvinfer1::IPluginRegistry& registry) {
    for (const auto& [key, value] : bundle.values) {
        if (key.rfind("plugins.", 0) != 0) continue;
        std::istringstream words(value);
        std::string expected, file;
        std::getline(words >> expected >> std::ws, file);
        file = std::filesystem::absolute(bundle.folder + "/" + file);
        const std::string found = sha256_of(read_file(file));
        if (found != expected)
            throw Failure(file + " was changed and is not loaded, because that would run its code: its " +
                          "sha256 is " + found + ", engine.txt says " + expected +
                          ". Copy the bundle again.");
        require(registry.loadLibrary(file.c_str()) != nullptr, "the plugins in " + file);
    }
}

std::vector<float> read_floats(const std::string& text) {
    std::istringstream words(text);
    return {std::istream_iterator<float>(words), {}};
}

// Writes the class of the largest of the scores [K, pixels] of each pixel; the first of equal ones wins, and
// NaN is the largest, as in NumPy. `lead` is what the first score gets on top; `highest` is memory [pixels].
template <typename Class>
void choose(const float* scores, std::size_t num_classes, float lead, std::vector<float>& highest,
            Class* classes) {
    const std::size_t num_pixels = highest.size();
    for (std::size_t i = 0; i < num_pixels; ++i) highest[i] = scores[i] + lead, classes[i] = 0;
    for (std::size_t k = 1; k < num_classes; ++k)
        for (std::size_t i = 0; i < num_pixels; ++i)
            if (const float score = scores[k * num_pixels + i];
                !(score <= highest[i]) && highest[i] == highest[i])
                highest[i] = score, classes[i] = static_cast<Class>(k);
}

class Engine {
    Logger logger_;  // below are what uses it and is gone before it
    std::unique_ptr<nvinfer1::IRuntime> runtime_;
    std::unique_ptr<nvinfer1::ICudaEngine> plan_;
    Output output_;
    std::unique_ptr<nvinfer1::IExecutionContext> context_;
    Shape written_;  // by the plan, for one frame
    std::size_t read_bytes_ = 0, written_bytes_ = 0;
    Memory host_input_, host_output_, input_;
    std::shared_ptr<CUstream_st> stream_;
    std::shared_ptr<CUgraphExec_st> graph_;
    std::vector<float> scale_C_, shift_C_;  // empty where the plan reads frames
    std::vector<float> highest_;            // empty where the plan gives answers
    float lead_ = 0;

    // Returns a tensor of the type and the shape that the plan declares.
    Tensor declared(const std::string& name) const {
        using Type = nvinfer1::DataType;
        const std::map<Type, std::string> numpy_types = {{Type::kFLOAT, "<f4"}, {Type::kUINT8, "|u1"},
                                                         {Type::kINT8, "|i1"},  {Type::kINT32, "<i4"},
                                                         {Type::kINT64, "<i8"}};
        const auto type = numpy_types.find(plan_->getTensorDataType(name.c_str()));
        if (type == numpy_types.end())
            throw Failure("this program takes no tensor of the type that the engine's " + name + " has.");
        const nvinfer1::Dims dims = plan_->getTensorShape(name.c_str());
        return make_tensor(type->second, Shape(dims.d, dims.d + dims.nbDims));
    }

    // Queues an inference from page-locked memory to page-locked memory.
    void enqueue() {
        check(cudaMemcpyAsync(input_.get(), host_input_.get(), read_bytes_, cudaMemcpyHostToDevice,
                              stream_.get()), "cudaMemcpyAsync");
        require(context_->enqueueV3(stream_.get()), "to run the engine");
        if (output_.shape != written_)
            throw Failure("the engine writes another shape than it declares. Build it again here.");
        check(cudaMemcpyAsync(host_output_.get(), output_.memory.get(), written_bytes_,
                              cudaMemcpyDeviceToHost, stream_.get()), "cudaMemcpyAsync");
    }

    void synchronize() { check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

    // Records an inference, which a single call then launches.
    void capture() {
        cudaGraph_t recorded = nullptr;
        cudaGraphExec_t graph = nullptr;
        check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
              "cudaStreamBeginCapture");
        enqueue();
        check(cudaStreamEndCapture(stream_.get(), &recorded), "cudaStreamEndCapture");
        check(cudaGraphInstantiate(&graph, recorded, 0), "cudaGraphInstantiate");
        graph_ = {graph, cudaGraphExecDestroy};
        check(cudaGraphDestroy(recorded), "cudaGraphDestroy");
    }

    // Writes (value / 255 - mean) / std as [C, H, W], as two operations that are each rounded.
    void normalise() {
        const auto* const values = reinterpret_cast<const std::uint8_t*>(frame.bytes.data());
        float* image = static_cast<float*>(host_input_.get());
        const std::size_t channels = scale_C_.size();
        for (std::size_t c = 0; c < channels; ++c)
            for (std::size_t i = c; i < frame.bytes.size(); i += channels)
                *image++ = values[i] * scale_C_[c] + shift_C_[c];
    }

  public:
    Tensor frame, answer;

    explicit Engine(Bundle bundle) {
        check_version(bundle);
        check_gpu(bundle);
        require(initLibNvInferPlugins(&logger_, ""), "to load its own plugins");
        runtime_.reset(nvinfer1::createInferRuntime(logger_));
        require(runtime_ != nullptr, "to start");
        runtime_->setEngineHostCodeAllowed(bundle.values["version_compatible"] == "YES");
        load_plugins(bundle, runtime_->getPluginRegistry());
        plan_.reset(runtime_->deserializeCudaEngine(bundle.engine.data(), bundle.engine.size()));
        require(plan_ != nullptr, "the engine");
        context_.reset(plan_->createExecutionContext());
        if (!context_)
            throw Failure("TensorRT has too little GPU memory for the engine. End other processes on it.");

        std::string reads, writes;
        for (int i = 0; i < plan_->getNbIOTensors(); ++i) {
            const char* const name = plan_->getIOTensorName(i);
            const auto mode = plan_->getTensorIOMode(name);
            std::string& found = mode == nvinfer1::TensorIOMode::kINPUT ? reads : writes;
            if (!found.empty()) throw Failure("the engine has several inputs or outputs, expected one each.");
            found = name;
        }
        const Tensor read = declared(reads), written = declared(writes);
        read_bytes_ = read.bytes.size(), written_bytes_ = written.bytes.size(), written_ = written.shape;
        frame = read, answer = written;
        const bool is_normalised = bundle.values["reads"] == "normalised";
        const bool has_scores = bundle.values["gives"] == "logits" && bundle.values["task"] != "values";
        if (read.type != (is_normalised ? "<f4" : "|u1") || (has_scores && written.type != "<f4"))
            throw Failure("the engine reads " + read.type + " and gives " + written.type +
                          ", which is not what engine.txt says. Copy the bundle again.");
        if (is_normalised) {  // [1, C, H, W]
            frame = make_tensor("|u1", {1, read.shape.at(2), read.shape.at(3), read.shape.at(1)});
            scale_C_ = read_floats(bundle.values["scale"]), shift_C_ = read_floats(bundle.values["shift"]);
            scale_C_.resize(read.shape[1]), shift_C_.resize(read.shape[1]);
        }
        if (has_scores) {  // [1, K, H, W] or [1, K]
            Shape shape = written.shape;
            shape.erase(shape.begin() + 1);
            answer = make_tensor(written.shape.at(1) <= 256 ? "|u1" : "<u2", shape);
            highest_.resize(written.bytes.size() / sizeof(float) / written.shape[1]);
            lead_ = std::strtof(bundle.values["lead"].c_str(), nullptr);
        }

        cudaStream_t stream = nullptr;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        stream_ = {stream, cudaStreamDestroy};
        host_input_ = allocate_page_locked(read_bytes_), host_output_ = allocate_page_locked(written_bytes_);
        input_ = allocate_on_gpu(read_bytes_);
        const int profile = std::atoi(bundle.values["profile"].c_str());
        if (context_->getOptimizationProfile() != profile)
            require(context_->setOptimizationProfileAsync(profile, stream), "its optimization profile");
        nvinfer1::Dims dims{};
        dims.nbDims = static_cast<std::int32_t>(read.shape.size());
        std::copy(read.shape.begin(), read.shape.end(), dims.d);
        require(context_->setInputShape(reads.c_str(), dims), "the shape of one image");
        require(context_->setTensorAddress(reads.c_str(), input_.get()), "the memory of " + reads);
        require(context_->setOutputAllocator(writes.c_str(), &output_), "the memory of " + writes);
        std::memset(host_input_.get(), 0, read_bytes_);
        enqueue();  // lazily loaded kernels must be loaded before a capture
        synchronize();
        if (bundle.values["cuda_graph"] == "YES") capture();
    }

    void infer() {
        if (scale_C_.empty()) std::memcpy(host_input_.get(), frame.bytes.data(), read_bytes_);
        else normalise();
        if (graph_) check(cudaGraphLaunch(graph_.get(), stream_.get()), "cudaGraphLaunch");
        else enqueue();
        synchronize();
        char* const given = answer.bytes.data();
        if (highest_.empty()) std::memcpy(given, host_output_.get(), written_bytes_);
        else {
            const auto* const scores = static_cast<const float*>(host_output_.get());
            if (answer.type == "|u1")
                choose(scores, written_[1], lead_, highest_, reinterpret_cast<std::uint8_t*>(given));
            else choose(scores, written_[1], lead_, highest_, reinterpret_cast<std::uint16_t*>(given));
        }
    }
};

#include "../reading.hpp"
#include "../program.hpp"
