// Returns what stands behind the first 10 bytes of a .npy file of `count` such arrays.
std::string npy_header(const std::string& type, const Shape& shape, std::int64_t count) {
    std::string sizes = std::to_string(count) + (shape.empty() ? "," : "");
    for (const std::int64_t size : shape) sizes += ", " + std::to_string(size);
    return "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + sizes + "), }";
}

struct Frames {  // what a file holds
    std::string type;
    Size size;
    std::int64_t count;
};

// Reads the header of a .npy file of version 1.0, as numpy.save writes it.
Frames read_header(std::istream& file, const std::string& path, std::int64_t channels) {
    std::string text(10, '\0');
    const bool is_npy = file.read(text.data(), 10) && text.rfind("\x93NUMPY\x01", 0) == 0;
    text.resize(static_cast<std::uint8_t>(text[8]) + 256 * static_cast<std::uint8_t>(text[9]));
    if (!is_npy || !file.read(text.data(), static_cast<std::streamsize>(text.size())))
        throw Failure(path + ": not a complete .npy file. Write the frames with numpy.save.");
    text.erase(text.find_last_not_of(" \n") + 1);
    char type[4] = {};
    long long count = 0, height = 0, width = 0;
    std::sscanf(text.c_str(), "{'descr': '%3[^']', 'fortran_order': False, 'shape': (%lld, %lld, %lld", type,
                &count, &height, &width);
    const std::string kind = type;
    if ((kind != "|u1" && kind != "<u2" && kind != "<f4") || count < 1 || height < 1 || width < 1 ||
        text != npy_header(kind, {height, width, channels}, count))
        throw Failure(path + ": holds " + text + ", expected at least one frame [N, H, W, " +
                      std::to_string(channels) + "] of uint8, uint16 or float32, its channels in the " +
                      "order of engine.txt's 'reads'.");
    return {kind, {height, width}, count};
}

// Answers `count` frames, or those of a stream until it ends; tells times if that is wanted.
void answer_all(Engine& engine, Reading& reading, std::istream& frames, std::ostream& answers,
                std::int64_t count, int repeat, bool profile) {
    const bool is_plain = reading.is_plain();
    std::vector<char>& frame = is_plain ? engine.frame.bytes : reading.frame;
    std::vector<char>& answer = is_plain ? engine.answer.bytes : reading.answer;
    const auto infer = [&] { is_plain ? engine.infer() : reading.infer(engine); };
    std::vector<float> last_ms(65536);
    std::size_t num_inferences = 0;
    if (profile) infer();  // the first inference is slower
    const auto start = Clock::now();
    for (std::int64_t i = 0; i < count; ++i) {
        frames.read(frame.data(), static_cast<std::streamsize>(frame.size()));
        if (frames.gcount() == 0 && count == INT64_MAX && !frames.bad()) break;
        if (frames.gcount() < static_cast<std::streamsize>(frame.size()))
            throw Failure("a frame ends after " + std::to_string(frames.gcount()) + " of its " +
                          std::to_string(frame.size()) +
                          " bytes. Give whole frames, as numpy.save writes them.");
        for (int j = 0; j < repeat; ++j) {
            const auto begin = Clock::now();
            infer();
            const std::chrono::duration<float, std::milli> time = Clock::now() - begin;
            last_ms[num_inferences++ % last_ms.size()] = time.count();
        }
        answers.write(answer.data(), static_cast<std::streamsize>(answer.size()));
        if (!answers.flush()) throw std::system_error(errno, std::generic_category(), "the answers");
    }
    const std::chrono::duration<double> total = Clock::now() - start;
    if (!profile) return;
    last_ms.resize(std::clamp<std::size_t>(num_inferences, 1, last_ms.size()));
    std::sort(last_ms.begin(), last_ms.end());
    const auto quantile_ms = [&](double share) { return last_ms[std::lround(share * (last_ms.size() - 1))]; };
    std::fprintf(stderr, "{\"frames\": %zu, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"frames_per_s\": %.2f}\n",
                 num_inferences / repeat, quantile_ms(0.5), quantile_ms(0.99),
                 num_inferences / total.count());
}

constexpr const char* USAGE =
    "usage: infer FRAMES.npy MASKS.npy [--profile] [--repeat N] [--bundle FOLDER]\n"
    "       infer - - [--frame-size WxH] [--frame-type TYPE] ...\n"
    "                    raw frames on stdin, raw answers on stdout, one after the other\n\n"
    "FRAMES.npy    uint8, uint16 or float32 [N, H, W, C] of any size, RGB (or BGR, if the 'reads' of\n"
    "              engine.txt is bgr_frames); scaled to 8 bits and fitted or cut into windows as images of\n"
    "              the training were\n"
    "MASKS.npy     receives the class of each pixel of each frame, [N, H, W], or of each frame, [N]\n"
    "--frame-size  of raw frames; default: the engine's\n"
    "--frame-type  of raw frames: uint8 (default), uint16 or float32, little endian\n"
    "--profile     writes p50 and p99 of the last 65536 frames, each from frame to mask, and frames per\n"
    "              second to stderr, as JSON\n"
    "--repeat      infers each frame N times; it is answered once\n"
    "--bundle      folder of engine.txt and the engine; default: the folder of this program";

int main(int argc, char** argv) try {
    std::string bundle = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    std::vector<std::string> paths;
    int repeat = 1;
    bool profile = false;
    std::string type = "uint8";
    long long width = 0, height = 0;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        char end = 0;
        if (word == "--help") return std::puts(USAGE) < 0;
        if (word == "--profile") profile = true;
        else if (word == "--repeat" && i + 1 < argc) repeat = std::atoi(argv[++i]);
        else if (word == "--bundle" && i + 1 < argc) bundle = argv[++i];
        else if (word == "--frame-type" && i + 1 < argc) type = argv[++i];
        else if (word == "--frame-size" && i + 1 < argc) {
            if (std::sscanf(argv[++i], "%lldx%lld%c", &width, &height, &end) != 2 || width < 1 || height < 1)
                throw Failure(std::string("--frame-size is ") + argv[i] + ", expected WxH, as 1920x1080.");
        } else if (word == "-" || word.rfind('-', 0) != 0) paths.push_back(word);
        else throw Failure("no option " + word + ", or its value is missing. See --help.");
    }
    if (paths.size() != 2 || (paths[0] == "-") != (paths[1] == "-") || repeat < 1)
        throw Failure("expected two files, or - -, and --repeat of at least 1. See --help.");
    const std::map<std::string, std::string> types = {
        {"uint8", "|u1"}, {"uint16", "<u2"}, {"float32", "<f4"}};
    if (types.count(type) == 0)
        throw Failure("--frame-type is " + type + ", expected uint8, uint16 or float32. See --help.");
    if (paths[0] != "-" && (type != "uint8" || width))
        throw Failure("--frame-size and --frame-type are of raw frames; a .npy file names its own.");
    if (std::filesystem::exists(paths[1]) && !std::filesystem::is_regular_file(paths[1]))
        throw Failure(paths[1] + " is not a file. Name a .npy file, or - - to stream. See --help.");
    Bundle opened(bundle);
    const std::map<std::string, std::string> values = opened.values;
    Engine engine(std::move(opened));
    const Shape& read = engine.frame.shape;  // [1, H, W, C]
    if (paths[0] == "-") {
        std::ios::sync_with_stdio(false);
        const Size size = width ? Size{height, width} : Size{read.at(1), read.at(2)};
        Reading reading(values, engine.frame, engine.answer, types.at(type), size);
        answer_all(engine, reading, std::cin, std::cout, INT64_MAX, repeat, profile);
        return 0;
    }
    std::ifstream file(paths[0], std::ios::binary);
    if (!file) throw std::system_error(errno, std::generic_category(), paths[0]);
    const Frames frames = read_header(file, paths[0], read.at(3));
    Reading reading(values, engine.frame, engine.answer, frames.type, frames.size);
    Shape shape(engine.answer.shape.begin() + 1, engine.answer.shape.end());
    if (reading.has_mask()) shape = {frames.size.height, frames.size.width};
    std::string header = npy_header(engine.answer.type, shape, frames.count), part = paths[1] + ".part";
    header.resize(117, ' ');  // 128 bytes with those around it, as numpy.save writes
    std::ofstream answers(part, std::ios::binary);
    if (!answers) throw std::system_error(errno, std::generic_category(), part);
    const std::shared_ptr<void> removal(nullptr, [&](void*) { std::remove(part.c_str()); });
    answers << std::string("\x93NUMPY\x01\0\x76\0", 10) << header << '\n';
    answer_all(engine, reading, file, answers, frames.count, repeat, profile);
    answers.close();
    if (!answers) throw std::system_error(errno, std::generic_category(), part);
    std::filesystem::rename(part, paths[1]);
} catch (const std::exception& error) {
    std::string text = error.what();
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::fprintf(stderr, "infer: %s\n", text.c_str());
    return 1;
}
