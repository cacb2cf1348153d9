// Reads frames and writes answers, as .npy files or raw. POSIX and the standard library only.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "bundle.hpp"

namespace frames {

struct Answer {
    std::string type;  // as NumPy writes it: |u1 for uint8
    Shape shape;       // without the batch
    std::vector<std::uint8_t> bytes;
};

// The shape of one answer, from that of a batch, which is negative where it is dynamic.
template <class Sizes>
Shape shape_of_one(const Sizes& batch) {
    Shape shape;
    for (std::size_t axis = 0; axis < batch.size(); ++axis) {
        if (axis > 0 && batch[axis] < 0)
            throw Failure("the engine's answer has a dynamic shape. Build it with a fixed image size.");
        if (axis == 0 && batch[axis] > 1)
            throw Failure("the engine takes no single frame. Build it with target.max_batch=1.");
        if (axis > 0) shape.push_back(static_cast<std::size_t>(batch[axis]));
    }
    return shape;
}

inline Answer make_answer(std::string type, Shape shape) {
    std::size_t num_bytes = std::stoul(type.substr(2));
    for (const std::size_t size : shape) num_bytes *= size;
    return {std::move(type), std::move(shape), std::vector<std::uint8_t>(num_bytes)};
}

// Frames of a mapped .npy file, or raw ones from stdin.
class Frames {
  public:
    Frames(const std::string& path, const Description& engine)
        : frame_bytes_(engine.frame_bytes()), is_raw_(path == "-") {
        if (is_raw_) {
            buffer_.resize(frame_bytes_);
            return;
        }
        const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat status = {};
        if (file < 0 || ::fstat(file, &status) != 0) throw Failure(path + ": " + std::strerror(errno) + ".");
        const auto size = static_cast<std::size_t>(status.st_size);
        void* mapped = size < 16 ? MAP_FAILED : ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
        ::close(file);
        if (mapped == MAP_FAILED)
            throw Failure(path + ": not a complete .npy file. Write the frames with numpy.save.");
        ::madvise(mapped, size, MADV_SEQUENTIAL);
        const auto* bytes = static_cast<const std::uint8_t*>(mapped);
        const bool is_v1 = bytes[6] == 1;
        const std::size_t start = is_v1 ? 10 : 12;
        std::size_t length = bytes[8] | bytes[9] << 8;
        if (!is_v1)
            length |= static_cast<std::size_t>(bytes[10]) << 16 | static_cast<std::size_t>(bytes[11]) << 24;
        if (std::memcmp(bytes, "\x93NUMPY", 6) != 0 || bytes[6] < 1 || bytes[6] > 3 || length > size - start)
            throw Failure(path + ": not a complete .npy file. Write the frames with numpy.save.");
        const std::string header(reinterpret_cast<const char*>(bytes) + start, length);
        const std::string expected = text_of({engine.height, engine.width, engine.channels});
        const std::size_t open = header.find('('), close = header.find(')'), comma = header.find(',', open);
        const bool is_uint8 =
            header.find("'|u1'") < open && header.find("'fortran_order': False") != std::string::npos;
        if (!is_uint8 || comma >= close || header.substr(comma + 1, close - comma - 1) != " " + expected)
            throw Failure(path + ": holds " + header.substr(0, header.find_last_not_of(" \n") + 1) +
                          ", expected C-ordered '|u1' of shape (N, " + expected +
                          "), the channels as in model.json's 'reads'.");
        count = std::strtoull(header.c_str() + open + 1, nullptr, 10);
        if (count == 0 || count > (size - start - length) / frame_bytes_)
            throw Failure(path + ": holds " + std::to_string((size - start - length) / frame_bytes_) +
                          " whole frames, its header says " + std::to_string(count) +
                          ", expected at least one. Write the frames with numpy.save.");
        next_ = bytes + start + length;
    }

    const std::uint8_t* next() {  // nullptr at the end
        if (!is_raw_) return num_read_++ < count ? next_ + (num_read_ - 1) * frame_bytes_ : nullptr;
        std::size_t filled = 0;
        while (filled < frame_bytes_) {
            const ssize_t got = ::read(STDIN_FILENO, buffer_.data() + filled, frame_bytes_ - filled);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) throw Failure(std::string("stdin: ") + std::strerror(errno) + ".");
            if (got == 0) break;
            filled += static_cast<std::size_t>(got);
        }
        if (filled != 0 && filled != frame_bytes_)
            throw Failure("stdin ends within a frame, after " + std::to_string(filled) + " of its " +
                          std::to_string(frame_bytes_) + " bytes.");
        return filled == 0 ? nullptr : buffer_.data();
    }

    std::size_t count = 0;  // of a file

  private:
    std::size_t frame_bytes_, num_read_ = 0;
    bool is_raw_;
    const std::uint8_t* next_ = nullptr;
    std::vector<std::uint8_t> buffer_;
};

// A .npy file, in place when it is complete, or raw answers on stdout.
class Answers {
  public:
    Answers(std::string path, const Answer& answer, std::size_t count)
        : path_(std::move(path)), part_(path_ + ".part") {
        if (path_ == "-") return;
        file_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (file_ < 0) throw Failure(part_ + ": " + std::strerror(errno) + ".");
        Shape shape = answer.shape;
        shape.insert(shape.begin(), count);
        std::string header = "{'descr': '" + answer.type + "', 'fortran_order': False, 'shape': (" +
                             text_of(shape) + (shape.size() == 1 ? ",)" : ")") + ", }";
        header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' ');
        header += '\n';
        const auto length = static_cast<unsigned>(header.size());
        const std::string magic = {
            '\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, static_cast<char>(length), static_cast<char>(length >> 8)};
        header.insert(0, magic);
        write(header.data(), header.size());
    }
    ~Answers() {
        if (path_ != "-" && !is_complete_) ::unlink(part_.c_str());
    }
    Answers(const Answers&) = delete;
    Answers& operator=(const Answers&) = delete;

    void write(const void* bytes, std::size_t size) {
        for (const char* next = static_cast<const char*>(bytes); size > 0;) {
            const ssize_t written = ::write(file_, next, size);
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) throw Failure(path_ + ": " + std::strerror(errno) + ".");
            next += written;
            size -= static_cast<std::size_t>(written);
        }
    }

    void finish() {
        if (path_ == "-") return;
        if (::close(file_) != 0 || std::rename(part_.c_str(), path_.c_str()) != 0)
            throw Failure(path_ + ": " + std::strerror(errno) + ".");
        is_complete_ = true;
    }

  private:
    std::string path_, part_;
    int file_ = STDOUT_FILENO;
    bool is_complete_ = false;
};

}  // namespace frames
