#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

using Clock = std::chrono::steady_clock;
using Failure = std::runtime_error;
using Shape = std::vector<std::int64_t>;

struct Tensor {        // a frame, or the answer to one
    std::string type;  // as NumPy writes it: |u1 for uint8
    Shape shape;       // of a batch of one
    std::vector<char> bytes;
};

// Makes a tensor of the shape that an engine declares, which is negative where it is dynamic.
Tensor make_tensor(const std::string& type, Shape shape) {
    if (shape.at(0) < 0) shape[0] = 1;
    std::size_t size = std::stoul(type.substr(2));
    for (const std::int64_t axis : shape) size *= axis < 0 ? 0 : static_cast<std::size_t>(axis);
    if (size == 0 || shape[0] != 1)
        throw Failure("the engine takes no single frame of fixed size. Build it with target.max_batch=1.");
    return {type, shape, std::vector<char>(size)};
}

std::string sha256_of(std::string text) {  // FIPS 180-4, section 6.2
    std::array<std::uint32_t, 8> hash = {};
    std::uint32_t k[64] = {}, w[64] = {};
    for (int number = 2, i = 0; i < 64; ++number) {
        int divisor = 2;
        while (number % divisor != 0) ++divisor;
        if (divisor < number) continue;  // not a prime
        if (i < 8) hash[i] = static_cast<std::uint32_t>(std::fmod(std::sqrt(number), 1) * 0x1p32);
        k[i++] = static_cast<std::uint32_t>(std::fmod(std::cbrt(number), 1) * 0x1p32);
    }
    const std::uint64_t num_bits = 8 * std::uint64_t{text.size()};
    text += '\x80';
    text.append((120 - text.size() % 64) % 64, '\0');
    for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(num_bits >> shift);
    const auto turn = [](std::uint32_t x, int n) { return x >> n | x << (32 - n); };
    for (std::size_t start = 0; start < text.size(); start += 64) {
        for (int i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<std::uint8_t>(text[start + i]);
        auto v = hash;
        for (int i = 0; i < 64; ++i) {
            if (i >= 16)
                w[i] = w[i - 16] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                       (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
            const std::uint32_t t1 = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) +
                                     ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
            const std::uint32_t t2 = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) +
                                     ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
        }
        for (int i = 0; i < 8; ++i) hash[i] += v[i];
    }
    char digits[65];
    for (int i = 0; i < 8; ++i) std::snprintf(digits + 8 * i, 9, "%08x", hash[i]);
    return digits;
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Failure(path + " cannot be read. Copy the bundle again, or name it with --bundle.");
    return {std::istreambuf_iterator<char>(file), {}};
}

struct Bundle {
    std::string folder;
    std::map<std::string, std::string> values;  // the lines of engine.txt
    std::string engine;                         // the content of its file

    explicit Bundle(const std::string& path) : folder(path) {
        std::istringstream lines(read_file(folder + "/engine.txt"));
        for (std::string key; lines >> key && lines.ignore();) std::getline(lines, values[key]);
        engine = read_file(folder + "/" + values["file"]);
        const std::string found = sha256_of(engine), expected = values["sha256"];
        if (found != expected)
            throw Failure("the engine was changed or truncated and is not loaded: its sha256 is " + found +
                          ", engine.txt says " + expected + ". Copy the bundle again.");
    }
};
