// Returns what stands behind the first 10 bytes of a .npy file of `count` such tensors.
std::string npy_header(const Tensor& one, std::int64_t count) {
    std::string sizes = std::to_string(count) + (one.shape.size() == 1 ? "," : "");
    for (std::size_t i = 1; i < one.shape.size(); ++i) sizes += ", " + std::to_string(one.shape[i]);
    return "{'descr': '" + one.type + "', 'fortran_order': False, 'shape': (" + sizes + "), }";
}

// Returns the number of frames in a .npy file of version 1.0, as numpy.save writes it.
std::int64_t read_count(std::istream& file, const std::string& path, const Tensor& frame) {
    std::string text(10, '\0');
    const bool is_npy = file.read(text.data(), 10) && text.rfind("\x93NUMPY\x01", 0) == 0;
    text.resize(static_cast<std::uint8_t>(text[8]) + 256 * static_cast<std::uint8_t>(text[9]));
    if (!is_npy || !file.read(text.data(), static_cast<std::streamsize>(text.size())))
        throw Failure(path + ": not a complete .npy file. Write the frames with numpy.save.");
    text.erase(text.find_last_not_of(" \n") + 1);
    const std::int64_t count = std::atoll(text.c_str() + text.find('(') + 1);
    if (count < 1 || text != npy_header(frame, count))
        throw Failure(path + ": holds " + text + ", expected at least one frame: " + npy_header(frame, 1) +
                      ", its channels in the order of engine.txt's 'reads'.");
    return count;
}

// Answers `count` frames, or those of a stream until it ends; tells times if that is wanted.
void answer_all(Engine& engine, std::istream& frames, std::ostream& answers, std::int64_t count, int repeat,
                bool profile) {
    const auto size = static_cast<std::streamsize>(engine.frame.bytes.size());
    std::vector<float> last_ms(65536);
    std::size_t num_inferences = 0;
    if (profile) engine.infer();  // the first inference is slower
    const auto start = Clock::now();
    for (std::int64_t i = 0; i < count; ++i) {
        frames.read(engine.frame.bytes.data(), size);
        if (frames.gcount() == 0 && count == INT64_MAX && !frames.bad()) break;
        if (frames.gcount() < size)
            throw Failure("a frame ends after " + std::to_string(frames.gcount()) + " of its " +
                          std::to_string(size) + " bytes. Give whole frames, as numpy.save writes them.");
        for (int j = 0; j < repeat; ++j) {
            const auto begin = Clock::now();
            engine.infer();
            const std::chrono::duration<float, std::milli> time = Clock::now() - begin;
            last_ms[num_inferences++ % last_ms.size()] = time.count();
        }
        answers.write(engine.answer.bytes.data(), static_cast<std::streamsize>(engine.answer.bytes.size()));
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
    "       infer - -    raw frames on stdin, raw answers on stdout, one after the other\n\n"
    "FRAMES.npy  uint8 [N, H, W, C] of the engine's size, RGB or BGR as engine.txt's 'reads' says\n"
    "MASKS.npy   receives the class of each pixel, [N, H, W], or of each frame, [N]\n"
    "--profile   writes p50 and p99 of the last 65536 inferences and frames per second to stderr, as JSON\n"
    "--repeat    infers each frame N times; it is answered once\n"
    "--bundle    folder of engine.txt and the engine; default: the folder of this program";

int main(int argc, char** argv) try {
    std::string bundle = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    std::vector<std::string> paths;
    int repeat = 1;
    bool profile = false;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--help") return std::puts(USAGE) < 0;
        if (word == "--profile") profile = true;
        else if (word == "--repeat" && i + 1 < argc) repeat = std::atoi(argv[++i]);
        else if (word == "--bundle" && i + 1 < argc) bundle = argv[++i];
        else if (word == "-" || word.rfind('-', 0) != 0) paths.push_back(word);
        else throw Failure("no option " + word + ", or its value is missing. See --help.");
    }
    if (paths.size() != 2 || (paths[0] == "-") != (paths[1] == "-") || repeat < 1)
        throw Failure("expected two files, or - -, and --repeat of at least 1. See --help.");
    if (std::filesystem::exists(paths[1]) && !std::filesystem::is_regular_file(paths[1]))
        throw Failure(paths[1] + " is not a file. Name a .npy file, or - - to stream. See --help.");
    Engine engine{Bundle(bundle)};
    if (paths[0] == "-") {
        std::ios::sync_with_stdio(false);
        answer_all(engine, std::cin, std::cout, INT64_MAX, repeat, profile);
        return 0;
    }
    std::ifstream frames(paths[0], std::ios::binary);
    if (!frames) throw std::system_error(errno, std::generic_category(), paths[0]);
    const std::int64_t count = read_count(frames, paths[0], engine.frame);
    std::string header = npy_header(engine.answer, count), part = paths[1] + ".part";
    header.resize(117, ' ');  // 128 bytes with those around it, as numpy.save writes
    std::ofstream answers(part, std::ios::binary);
    if (!answers) throw std::system_error(errno, std::generic_category(), part);
    const std::shared_ptr<void> removal(nullptr, [&](void*) { std::remove(part.c_str()); });
    answers << std::string("\x93NUMPY\x01\0\x76\0", 10) << header << '\n';
    answer_all(engine, frames, answers, count, repeat, profile);
    answers.close();
    if (!answers) throw std::system_error(errno, std::generic_category(), part);
    std::filesystem::rename(part, paths[1]);
} catch (const std::exception& error) {
    std::string text = error.what();
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::fprintf(stderr, "infer: %s\n", text.c_str());
    return 1;
}
