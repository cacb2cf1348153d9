// The program around an engine: arguments, the loop over the frames, times.
//
// An Engine is made of (Description, content of its file) and has
//   Answer answer;                     type, shape and bytes of the answer to one frame
//   void infer(const uint8_t* frame);  fills answer.bytes
#pragma once

#include <algorithm>
#include <chrono>
#include <climits>

#include "frames.hpp"

namespace frames {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Times of the last 65536 inferences, so that a stream without end needs no more memory.
struct Times {
    std::vector<float> last_ms;
    std::size_t count = 0;

    void add(double seconds) {
        if (last_ms.size() <= count % 65536) last_ms.push_back(0);
        last_ms[count++ % 65536] = static_cast<float>(1000 * seconds);
    }
    float quantile(double share) {
        if (last_ms.empty()) return 0;
        const auto rank = last_ms.begin() +
                          static_cast<std::ptrdiff_t>(share * static_cast<double>(last_ms.size() - 1) + 0.5);
        std::nth_element(last_ms.begin(), rank, last_ms.end());
        return *rank;
    }
};

struct Arguments {
    std::string frames, answers, bundle = fs::read_symlink("/proc/self/exe").parent_path();
    std::size_t repeat = 1;
    bool profile = false, help = false;
};

inline constexpr const char* USAGE =
    "usage: infer FRAMES.npy MASKS.npy [--profile] [--repeat N] [--bundle FOLDER]\n"
    "       infer - -          raw frames on stdin, raw answers on stdout, one after the other\n\n"
    "FRAMES.npy     uint8 [N, H, W, C] of the size in engine.txt, channels as its 'reads' says: RGB, or BGR\n"
    "MASKS.npy      receives the class of each pixel, [N, H, W], or of each frame, [N]\n"
    "--profile      writes JSON to stderr: p50 and p99 of the last 65536 inferences, from a frame in memory "
    "to its\n"
    "               answer in memory, and frames per second with reading and writing\n"
    "--repeat N     infers each frame N times; it is answered once\n"
    "--bundle       folder of engine.txt and the engine; default: the folder of this program\n";

inline Arguments parse(int argc, char** argv) {
    Arguments found;
    std::vector<std::string> paths;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--help" || word == "-h") {
            found.help = true;
        } else if (word == "--profile") {
            found.profile = true;
        } else if ((word == "--repeat" || word == "--bundle") && i + 1 < argc) {
            const std::string value = argv[++i];
            if (word == "--bundle") found.bundle = value;
            if (word == "--repeat") found.repeat = std::strtoull(value.c_str(), nullptr, 10);
        } else if (word == "-" || word.rfind('-', 0) != 0) {
            paths.push_back(word);
        } else {
            throw Failure("no option " + word + ", or its value is missing. See --help.");
        }
    }
    if (found.help) return found;
    if (paths.size() != 2 || (paths[0] == "-") != (paths[1] == "-") || found.repeat == 0 ||
        found.repeat > INT_MAX)
        throw Failure("expected two files, or - -, and --repeat of at least 1. See --help.");
    found.frames = paths[0], found.answers = paths[1];
    return found;
}

template <class Engine>
void run(const Arguments& arguments) {
    const Description description = read_description(arguments.bundle);
    Frames input(arguments.frames, description);
    Engine engine(description,
                  read_engine(fs::path(arguments.bundle) / description.at("file"), description.at("sha256")));
    Answers output(arguments.answers, engine.answer, input.count);
    const std::vector<std::uint8_t> black(description.frame_bytes());
    if (arguments.profile) engine.infer(black.data());  // the first inference is slower
    Times times;
    const auto start = Clock::now();
    while (const std::uint8_t* frame = input.next()) {
        for (std::size_t i = 0; i < arguments.repeat; ++i) {
            const auto begin = Clock::now();
            engine.infer(frame);
            times.add(seconds_since(begin));
        }
        output.write(engine.answer.bytes.data(), engine.answer.bytes.size());
    }
    const double total_s = seconds_since(start);
    output.finish();
    if (arguments.profile)
        std::fprintf(stderr,
                     "{\"frames\": %zu, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"frames_per_s\": %.2f}\n",
                     times.count / arguments.repeat, times.quantile(0.5), times.quantile(0.99),
                     static_cast<double>(times.count) / total_s);
}

template <class Engine>
int run_program(int argc, char** argv) {
    try {
        const Arguments arguments = parse(argc, argv);
        if (arguments.help) return std::fputs(USAGE, stdout) < 0;
        run<Engine>(arguments);
        return 0;
    } catch (const std::exception& error) {
        std::string text = error.what();
        std::replace(text.begin(), text.end(), '\n', ' ');
        std::fprintf(stderr, "infer: %s\n", text.c_str());
        return 1;
    }
}

}  // namespace frames
