// Reads the bundle: engine.txt, and the engine that it names.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace frames {

namespace fs = std::filesystem;
using Shape = std::vector<std::size_t>;

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Description {  // engine.txt
    std::map<std::string, std::string> values, options;
    std::size_t height = 0, width = 0, channels = 0;

    const std::string& at(const std::string& key) const {
        const auto found = values.find(key);
        if (found == values.end())
            throw Failure("engine.txt has no line '" + key + "'. Copy the bundle again.");
        return found->second;
    }
    std::size_t number(const std::string& key) const {
        const std::string& text = at(key);
        if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos)
            throw Failure("engine.txt says '" + key + " " + text +
                          "', expected a number. Copy the bundle again.");
        return std::stoul(text);
    }
    std::size_t frame_bytes() const { return height * width * channels; }
};

inline std::string text_of(const Shape& shape) {
    std::string text;
    for (const std::size_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return text;
}

inline std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file)
        throw Failure(path.string() +
                      " cannot be read. Copy the bundle again, or name its folder with --bundle.");
    return {std::istreambuf_iterator<char>(file), {}};
}

inline Description read_description(const fs::path& bundle) {
    Description found;
    std::istringstream lines(read_file(bundle / "engine.txt"));
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string key, name;
        words >> key >> std::ws;
        if (key == "option") words >> name >> std::ws;
        std::getline(words, key == "option" ? found.options[name] : found.values[key]);
    }
    found.height = found.number("height");
    found.width = found.number("width");
    found.channels = found.number("channels");
    return found;
}

// FIPS 180-4, section 6.2.
inline std::string sha256_of(std::string text) {
    static constexpr std::uint32_t K[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    std::array<std::uint32_t, 8> hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const auto rotate = [](std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); };
    const std::uint64_t num_bits = 8 * static_cast<std::uint64_t>(text.size());
    text += '\x80';
    text.append((120 - text.size() % 64) % 64, '\0');
    for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(num_bits >> shift);
    for (std::size_t start = 0; start < text.size(); start += 64) {
        std::uint32_t w[64] = {};
        for (std::size_t i = 0; i < 64; ++i)
            w[i / 4] = w[i / 4] << 8 | static_cast<std::uint8_t>(text[start + i]);
        for (int i = 16; i < 64; ++i) {
            const std::uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ (a >> 3)) + w[i - 7] +
                   (rotate(b, 17) ^ rotate(b, 19) ^ (b >> 10));
        }
        auto v = hash;
        for (int i = 0; i < 64; ++i) {
            const std::uint32_t t1 = v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) +
                                     ((v[4] & v[5]) ^ (~v[4] & v[6])) + K[i] + w[i];
            const std::uint32_t t2 = (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) +
                                     ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
        }
        for (std::size_t i = 0; i < 8; ++i) hash[i] += v[i];
    }
    char digits[65];
    for (std::size_t i = 0; i < 8; ++i) std::snprintf(digits + 8 * i, 9, "%08x", hash[i]);
    return digits;
}

inline std::string read_engine(const fs::path& file, const std::string& expected) {
    std::string content = read_file(file);
    if (const std::string found = sha256_of(content); found != expected)
        throw Failure(file.string() + ": sha256 " + found.substr(0, 12) + "..., engine.txt says " +
                      expected.substr(0, 12) +
                      "...; the file was changed or truncated and is not loaded. Copy the bundle again.");
    return content;
}

}  // namespace frames
