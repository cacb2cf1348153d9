// Stands in for libnvinfer, libnvinfer_plugin and libcudart where there is no GPU, so that the C++ program of a plan,
// compiled with NVIDIA's own headers, runs on a CPU. It says nothing of TensorRT itself: its plans are the lines that
// tests/tensorrt_stand_in.py writes, and compute what that file computes.
//
// It is stricter than a GPU: work is done when a stream is waited for and not before, copies need page-locked memory,
// and a program that leaves memory behind ends with 70.
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

using namespace nvinfer1;

using Work = std::vector<std::function<void()>>;

// ---- CUDA's runtime

struct CUgraph_st {
    Work work;
};
struct CUgraphExec_st {
    Work work;
};
struct CUstream_st {
    Work queued;
    CUgraph_st* recorded = nullptr;

    void queue(std::function<void()> one) { (recorded ? recorded->work : queued).push_back(std::move(one)); }
};

namespace {

struct Memory {
    std::set<void*> on_gpu, page_locked;
    int num_others = 0;  // streams, graphs and objects of TensorRT

    ~Memory() {
        if (on_gpu.empty() && page_locked.empty() && num_others == 0) return;
        std::fprintf(stderr, "stand-in: the program leaves %zu + %zu blocks of memory and %d objects\n",
                     on_gpu.size(), page_locked.size(), num_others);
        _exit(70);
    }
} memory;

cudaError_t allocate(void** place, std::size_t size, std::set<void*>& kept) {
    *place = std::malloc(size);
    std::memset(*place, 0xa5, size);
    kept.insert(*place);
    return cudaSuccess;
}

cudaError_t release(void* place, std::set<void*>& kept) {
    if (kept.erase(place) == 0) return cudaErrorInvalidValue;
    std::free(place);
    return cudaSuccess;
}

template <typename Object, typename... Values> Object* make(Values&&... values) {
    ++memory.num_others;
    return new Object{std::forward<Values>(values)...};
}

template <typename Object> cudaError_t destroy(Object* object) {
    --memory.num_others;
    delete object;
    return cudaSuccess;
}

}  // namespace

extern "C" {
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    *properties = {};
    std::strcpy(properties->name, "NVIDIA H200");
    properties->major = 9;
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
cudaError_t cudaMalloc(void** place, std::size_t size) { return allocate(place, size, memory.on_gpu); }
cudaError_t cudaMallocHost(void** place, std::size_t size) { return allocate(place, size, memory.page_locked); }
cudaError_t cudaFree(void* place) { return release(place, memory.on_gpu); }
cudaError_t cudaFreeHost(void* place) { return release(place, memory.page_locked); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    *stream = make<CUstream_st>();
    return flags == cudaStreamNonBlocking ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return destroy(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream->recorded) return cudaErrorStreamCaptureUnsupported;
    for (const auto& one : std::exchange(stream->queued, {})) one();
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    void* const source = const_cast<void*>(from);
    const bool is_upload = kind == cudaMemcpyHostToDevice;
    if (memory.on_gpu.count(is_upload ? to : source) == 0) return cudaErrorInvalidDevicePointer;
    if (memory.page_locked.count(is_upload ? source : to) == 0) return cudaErrorInvalidHostPointer;
    stream->queue([=] { std::memcpy(to, from, size); });
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream->queued.empty()) return cudaErrorStreamCaptureInvalidated;
    stream->recorded = make<CUgraph_st>();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = std::exchange(stream->recorded, nullptr);
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = make<CUgraphExec_st>(graph->work);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    for (const auto& one : executable->work) stream->queue(one);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return destroy(executable); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroy(graph); }
}

// ---- TensorRT

namespace {

// What a library of TensorRT gives for an interface of NvInferImpl.h: a pointer to a pointer to a table of functions. The
// interfaces have other functions in each version; a table here has those that the program calls, each in the place that
// the headers give it (Itanium C++ ABI, 2.3: a pointer to a virtual function holds its offset).
template <typename Interface> class Table {
    std::array<void*, 256> functions_;

    static void miss() {
        std::fputs("stand-in: the program calls a function that the stand-in lacks\n", stderr);
        std::abort();
    }

  public:
    Table() { functions_.fill(reinterpret_cast<void*>(miss)); }

    // `function` takes the object that has the table in front of the function's own arguments.
    template <typename Method, typename Function> void set(Method method, Function function) {
        std::ptrdiff_t offset = 0;
        std::memcpy(&offset, &method, sizeof offset);
        functions_.at((offset & ~std::ptrdiff_t{1}) / sizeof(void*)) = reinterpret_cast<void*>(+function);
    }

    void* const* address() const { return functions_.data(); }
};

template <typename Interface, typename State> struct Object {  // what an Interface* points to
    void* const* table;
    State* state;

    Interface* get() { return reinterpret_cast<Interface*>(this); }
};

struct Tensor {
    std::string name, type;
    std::vector<std::int64_t> shape;

    std::size_t size_of(std::int64_t batch) const {
        std::size_t size = std::stoul(type.substr(2));
        for (const std::int64_t axis : shape) size *= axis < 0 ? batch : axis;
        return size;
    }
};

struct PlanText {
    Tensor input, output;
    std::vector<std::pair<std::int64_t, std::int64_t>> batches;
    std::int64_t num_classes = 0;
    std::string plugins;
    bool has_host_code = false, is_half = false, writes_more = false;

    explicit PlanText(const std::string& text) {
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            std::string key;
            words >> key;
            if (key == "input" || key == "output") {
                Tensor& tensor = key == "input" ? input : output;
                words >> tensor.name >> tensor.type;
                for (std::int64_t axis; words >> axis;) tensor.shape.push_back(axis);
            } else if (key == "batches")
                for (std::int64_t low, high; words >> low >> high;) batches.push_back({low, high});
            else if (key == "classes") words >> num_classes;
            else if (key == "plugins") std::getline(words >> std::ws, plugins);
            has_host_code |= key == "host_code", is_half |= key == "half", writes_more |= key == "writes_more";
        }
    }
};

ILogger* logger = nullptr;
bool has_own_plugins = false, is_host_code_allowed = false;
std::string loaded_plugins;

bool refuse(const char* text) {
    logger->log(ILogger::Severity::kERROR, text);
    return false;
}

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.npos, end) == 0;
}

// Reads a value of a batch: channel c of pixel i of the one image, in either layout.
float value_of(const PlanText& plan, const void* input, std::int64_t channels, std::int64_t pixels, std::int64_t c,
               std::int64_t i) {
    return plan.input.type == "|u1" ? static_cast<const unsigned char*>(input)[i * channels + c]
                                    : static_cast<const float*>(input)[c * pixels + i];
}

template <typename Class>
void write_classes(const PlanText& plan, const unsigned char* frame, std::int64_t pixels, Class* classes) {
    const std::int64_t channels = plan.input.shape[3];
    const bool is_mask = plan.output.shape.size() > 1;
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < pixels; ++i) {
        if (is_mask) sum = 0;
        for (std::int64_t c = 0; c < channels; ++c) sum += (c + 1) * frame[i * channels + c];
        classes[is_mask ? i : 0] = static_cast<Class>(sum % plan.num_classes);
    }
}

void write_scores(const PlanText& plan, const void* input, std::int64_t channels, std::int64_t pixels, float* scores) {
    const std::int64_t num_scores = plan.output.shape[1];
    const bool is_mask = plan.output.shape.size() > 2;
    for (std::int64_t k = 0; k < num_scores; ++k)
        for (std::int64_t i = 0; i < (is_mask ? pixels : 1); ++i) {
            const std::int64_t pixel = is_mask ? i : 97 * k % pixels;
            float score = value_of(plan, input, channels, pixels, k % channels, pixel) * (1 + (k / (2 * channels)) / 64.0f);
            if (k == 3 && is_mask && i % 7 == 0) score = std::numeric_limits<float>::quiet_NaN();
            scores[is_mask ? k * pixels + i : k] = score;
        }
}

void compute(const PlanText& plan, const void* input, void* output) {
    const auto& shape = plan.input.shape;
    const bool is_frame = plan.input.type == "|u1";
    const std::int64_t channels = is_frame ? shape[3] : shape[1];
    const std::int64_t pixels = is_frame ? shape[1] * shape[2] : shape[2] * shape[3];
    const auto* const frame = static_cast<const unsigned char*>(input);
    if (plan.output.type == "<f4") write_scores(plan, input, channels, pixels, static_cast<float*>(output));
    else if (plan.output.type == "<i8") write_classes(plan, frame, pixels, static_cast<std::int64_t*>(output));
    else write_classes(plan, frame, pixels, static_cast<unsigned char*>(output));
}

struct ContextState {
    PlanText plan;
    int profile = 0;
    bool has_shape = false;
    void* input = nullptr;
    IOutputAllocator* output = nullptr;

    bool enqueue(cudaStream_t stream) {
        if (!has_shape || !input || !output) return refuse("no shape, or no memory");
        Dims shape{};
        for (const std::int64_t axis : plan.output.shape) shape.d[shape.nbDims++] = axis < 0 ? 1 : axis;
        if (plan.writes_more) ++shape.d[1];
        void* const memory_of_it = output->reallocateOutputAsync(plan.output.name.c_str(), nullptr,
                                                                 plan.output.size_of(1), 256, stream);
        if (!memory_of_it) return refuse("no memory for the output");
        output->notifyShape(plan.output.name.c_str(), shape);
        stream->queue([this, memory_of_it] { compute(plan, input, memory_of_it); });
        return true;
    }
};

using ContextObject = Object<apiv::VExecutionContext, ContextState>;

struct Context : IExecutionContext {
    ContextState state;
    ContextObject object;

    explicit Context(const PlanText& plan) : state{plan} {
        static const Table<apiv::VExecutionContext> table = [] {
            using V = apiv::VExecutionContext;
            using Self = ContextObject*;
            Table<V> made;
            made.set(&V::getOptimizationProfile, [](Self self) { return std::int32_t{self->state->profile}; });
            made.set(&V::setOptimizationProfileAsync, [](Self self, std::int32_t index, cudaStream_t) {
                self->state->profile = index;
                self->state->has_shape = false;
                const auto count = static_cast<std::int32_t>(self->state->plan.batches.size());
                return index >= 0 && index < count ? true : refuse("no such profile");
            });
            made.set(&V::setInputShape, [](Self self, const char* name, const Dims& dims) {
                const Tensor& input = self->state->plan.input;
                const auto [low, high] = self->state->plan.batches.at(self->state->profile);
                bool fits = name == input.name && dims.nbDims == static_cast<int>(input.shape.size()) &&
                            low <= dims.d[0] && dims.d[0] <= high;
                for (int i = 1; fits && i < dims.nbDims; ++i) fits = dims.d[i] == input.shape[i];
                self->state->has_shape = fits;
                return fits ? true : refuse("a shape outside the profile");
            });
            made.set(&V::setTensorAddress, [](Self self, const char* name, void* place) {
                self->state->input = place;
                return name == self->state->plan.input.name ? true : refuse("no such input");
            });
            made.set(&V::setOutputAllocator, [](Self self, const char* name, IOutputAllocator* allocator) {
                self->state->output = allocator;
                return name == self->state->plan.output.name ? true : refuse("no such output");
            });
            made.set(&V::enqueueV3, [](Self self, cudaStream_t stream) { return self->state->enqueue(stream); });
            return made;
        }();
        object = {table.address(), &state};
        mImpl = object.get();
    }
    ~Context() noexcept override { --memory.num_others; }
};

using EngineObject = Object<apiv::VCudaEngine, PlanText>;

struct Plan : ICudaEngine {
    PlanText state;
    EngineObject object;

    explicit Plan(const PlanText& plan) : state(plan) {
        static const Table<apiv::VCudaEngine> table = [] {
            using V = apiv::VCudaEngine;
            using Self = EngineObject*;
            Table<V> made;
            made.set(&V::getNbIOTensors, [](Self) { return std::int32_t{2}; });
            made.set(&V::getIOTensorName, [](Self self, std::int32_t index) {
                return (index == 0 ? self->state->input : self->state->output).name.c_str();
            });
            made.set(&V::getTensorIOMode, [](Self self, const char* name) {
                return name == self->state->input.name ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
            });
            made.set(&V::getTensorShape, [](Self self, const char* name) {
                Dims shape{};
                const bool is_input = name == self->state->input.name;
                for (const std::int64_t axis : (is_input ? self->state->input : self->state->output).shape)
                    shape.d[shape.nbDims++] = axis;
                return shape;
            });
            made.set(&V::getTensorDataType, [](Self self, const char* name) {
                const std::map<std::string, DataType> types = {
                    {"|u1", DataType::kUINT8}, {"<f4", DataType::kFLOAT}, {"<i8", DataType::kINT64}};
                if (self->state->is_half) return DataType::kHALF;
                const bool is_input = name == self->state->input.name;
                return types.at((is_input ? self->state->input : self->state->output).type);
            });
            made.set(&V::createExecutionContext, [](Self self, ExecutionContextAllocationStrategy) {
                return static_cast<IExecutionContext*>(make<Context>(*self->state));
            });
            return made;
        }();
        object = {table.address(), &state};
        mImpl = object.get();
    }
    ~Plan() noexcept override { --memory.num_others; }
};

struct Nothing {};
using RegistryObject = Object<IPluginRegistry, Nothing>;
using RuntimeObject = Object<apiv::VRuntime, Nothing>;

IPluginRegistry& registry() {
    static const Table<IPluginRegistry> table = [] {
        Table<IPluginRegistry> made;
        made.set(&IPluginRegistry::loadLibrary, [](RegistryObject*, const char* file) -> void* {
            loaded_plugins = file;
            return file[0] == '/' ? &loaded_plugins : nullptr;
        });
        return made;
    }();
    static RegistryObject object{table.address(), nullptr};
    return *object.get();
}

struct Runtime : IRuntime {
    RuntimeObject object;

    Runtime() {
        static const Table<apiv::VRuntime> table = [] {
            using V = apiv::VRuntime;
            Table<V> made;
            made.set(&V::setEngineHostCodeAllowed,
                     [](RuntimeObject*, bool is_allowed) { is_host_code_allowed = is_allowed; });
            made.set(&V::getPluginRegistry, [](RuntimeObject*) { return &registry(); });
            const auto deserialize = [](RuntimeObject*, const void* content, std::size_t size) -> ICudaEngine* {
                const std::string text(static_cast<const char*>(content), size);
                const PlanText plan(text);
                if (text.rfind("stand-in plan\n", 0) != 0) refuse("not a plan");
                else if (!has_own_plugins || !ends_with(loaded_plugins, plan.plugins)) refuse("no such plugin");
                else if (plan.has_host_code && !is_host_code_allowed) refuse("host code is not allowed");
                else return make<Plan>(plan);
                return nullptr;
            };
            using OfMemory = ICudaEngine* (V::*)(const void*, std::size_t) noexcept;
            made.set(OfMemory(&V::deserializeCudaEngine), deserialize);
            return made;
        }();
        object = {table.address(), nullptr};
        mImpl = object.get();
    }
    ~Runtime() noexcept override { --memory.num_others; }
};

}  // namespace

extern "C" {
std::int32_t getInferLibMajorVersion() noexcept {
    const char* const wanted = std::getenv("STAND_IN_MAJOR");
    return wanted ? std::atoi(wanted) : NV_TENSORRT_MAJOR;
}
std::int32_t getInferLibMinorVersion() noexcept { return 4; }
std::int32_t getInferLibPatchVersion() noexcept { return 0; }
std::int32_t getInferLibBuildVersion() noexcept { return 106; }

void* createInferRuntime_INTERNAL(void* log, std::int32_t) noexcept {
    logger = static_cast<ILogger*>(log);
    return static_cast<IRuntime*>(make<Runtime>());
}

bool initLibNvInferPlugins(void* log, const char*) {
    logger = static_cast<ILogger*>(log);
    logger->log(ILogger::Severity::kINFO, "what no one should read");
    return has_own_plugins = true;
}
}
