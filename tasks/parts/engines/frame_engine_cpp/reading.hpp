// A decoded frame of any size becomes what the engine reads, and its mask one of the frame's own size, as
// infer.py does both, to the last pixel.
struct Size {
    std::int64_t height, width;
    bool operator==(const Size& other) const { return height == other.height && width == other.width; }
};

using Pixels = std::vector<std::uint8_t>;  // [H, W, C]

// A part of a frame along one axis: from where in the frame to where in the engine's frame how many pixels
// go, and for which pixels of the frame its answer counts.
struct Part {
    std::int64_t from, to, length, first, end;
};

// Returns the windows along an axis; each pixel counts in the one in which it lies most central.
std::vector<Part> cover(std::int64_t length, std::int64_t window, std::int64_t overlap) {
    std::vector<Part> parts;
    const std::int64_t last = std::max<std::int64_t>(0, length - window), size = std::min(length, window);
    for (std::int64_t from = 0; from < last; from += window - overlap) parts.push_back({from, 0, size, 0, 0});
    parts.push_back({last, 0, size, 0, length});
    for (std::size_t i = 1; i < parts.size(); ++i)
        parts[i].first = parts[i - 1].end = (parts[i - 1].from + parts[i].from + window - 1) / 2 + 1;
    return parts;
}

// Returns the centre along an axis, which is all that is answered.
std::vector<Part> centre(std::int64_t length, std::int64_t window) {
    const std::int64_t from = std::max<std::int64_t>(0, length - window) / 2, size = std::min(length, window);
    return {{from, std::max<std::int64_t>(0, window - length) / 2, size, from, from + size}};
}

// Resizes the middle axis of [outer, old, inner] by Pillow's bilinear filter, a triangle that grows with the
// reduction; its weights are multiples of 2^-22.
Pixels resize_axis(const Pixels& pixels, std::int64_t outer, std::int64_t old, std::int64_t inner,
                   std::int64_t size) {
    Pixels resized(outer * size * inner);
    const double scale = static_cast<double>(old) / size, reach = std::max(scale, 1.0);
    for (std::int64_t to = 0; to < size; ++to) {
        const double centre = (to + 0.5) * scale;
        const auto first = static_cast<std::int64_t>(std::max(0.0, centre - reach + 0.5));
        const auto end = static_cast<std::int64_t>(std::min<double>(old, centre + reach + 0.5));
        std::vector<double> weights;
        double total = 0;
        for (std::int64_t from = first; from < end; ++from) {
            weights.push_back(std::max(0.0, 1.0 - std::abs((from - centre + 0.5) * (1.0 / reach))));
            total += weights.back();
        }
        std::vector<int> steps;
        for (const double weight : weights)
            steps.push_back(static_cast<int>(weight / total * (1 << 22) + 0.5));
        for (std::int64_t i = 0; i < outer; ++i)
            for (std::int64_t j = 0; j < inner; ++j) {
                int sum = 1 << 21;
                for (std::int64_t from = first; from < end; ++from)
                    sum += steps[from - first] * pixels[(i * old + from) * inner + j];
                resized[(i * size + to) * inner + j] = static_cast<std::uint8_t>(std::min(sum >> 22, 255));
            }
    }
    return resized;
}

// Resizes a frame; Pillow takes the height first where it loses more than twice as much as the width.
Pixels resize(Pixels pixels, Size old, Size size, std::int64_t channels) {
    const std::int64_t less_width = std::max<std::int64_t>(0, 2 * (old.width - size.width));
    const bool height_first = old.height - size.height > less_width;
    if (height_first && old.height != size.height)
        pixels = resize_axis(pixels, 1, old.height, old.width * channels, size.height);
    const std::int64_t rows = height_first ? size.height : old.height;
    if (old.width != size.width) pixels = resize_axis(pixels, rows, old.width, channels, size.width);
    if (rows != size.height) pixels = resize_axis(pixels, 1, rows, size.width * channels, size.height);
    return pixels;
}

// What engine.txt says of how images were read, for frames of one type and size.
class Reading {
    std::string mode_, type_;  // type_ is that of values, as NumPy writes it: |u1, <u2 or <f4
    Size frame_, engine_;
    std::int64_t channels_, answer_bytes_;
    float low_ = 0, gain_ = 0;  // of value_range
    bool has_mask_;
    std::vector<Part> rows_, columns_;

    // Returns a value of the frame as 8 bits.
    template <typename Value> std::uint8_t scaled(const char* place) const {
        Value value;
        std::memcpy(&value, place, sizeof value);
        float number = static_cast<float>(value);
        if (std::isnan(number)) number = low_;
        number = (number - low_) * gain_;
        return static_cast<std::uint8_t>(std::nearbyint(std::clamp(number, 0.0f, 255.0f)));
    }

  public:
    std::vector<char> frame, answer;  // one frame as it comes, and its answer

    Reading(std::map<std::string, std::string> values, const Tensor& read, const Tensor& answered,
            const std::string& type, Size size)
        : mode_(values["resize_mode"]), type_(type), frame_(size),
          engine_{read.shape.at(1), read.shape.at(2)}, channels_(read.shape.at(3)),
          answer_bytes_(std::stoll(answered.type.substr(2))), has_mask_(values["task"] == "segmentation") {
        const std::string types = " " + values["types"] + " ", range = values["value_range"];
        if (mode_.empty() || types == "  ")
            throw Failure("engine.txt has no resize_mode or no types: another version wrote it. Build the "
                          "bundle again.");
        if (type == "|u1" ? types.find(" uint8 ") == types.npos : range.empty())
            throw Failure("the frames are of type " + type + ", the engine was measured on images of type" +
                          types + (range.empty() ? "and no value_range" : "with the value_range " + range) +
                          ". Give frames like those, or train on images like these.");
        if (mode_ == "windows" && !has_mask_)
            throw Failure("images were cut into windows, which only masks put together. Build it again.");
        double low = 0, high = 1;
        std::istringstream(range) >> low >> high;
        low_ = static_cast<float>(low), gain_ = static_cast<float>(255 / (high - low));
        const Size held = mode_ == "resize" ? engine_ : frame_;  // of the frame that the parts are of
        const std::int64_t overlap = std::atoll(values["window_overlap"].c_str());
        const bool is_cut = mode_ == "windows";
        rows_ = is_cut ? cover(held.height, engine_.height, overlap) : centre(held.height, engine_.height);
        columns_ = is_cut ? cover(held.width, engine_.width, overlap) : centre(held.width, engine_.width);
        frame.resize(size.height * size.width * channels_ * std::stoul(type.substr(2)));
        answer.resize(has_mask_ ? size.height * size.width * answer_bytes_ : answered.bytes.size());
    }

    bool has_mask() const { return has_mask_; }

    // Whether frames are what the engine reads, so that nothing needs a copy.
    bool is_plain() const { return type_ == "|u1" && frame_ == engine_; }

    // Answers `frame` into `answer`; where the engine saw nothing, a mask is 255.
    template <typename Engine> void infer(Engine& engine) {
        Pixels pixels(frame_.height * frame_.width * channels_);
        for (std::size_t i = 0; i < pixels.size(); ++i)
            pixels[i] = type_ == "|u1"   ? static_cast<std::uint8_t>(frame[i])
                        : type_ == "<u2" ? scaled<std::uint16_t>(&frame[2 * i])
                                         : scaled<float>(&frame[4 * i]);
        const Size held = mode_ == "resize" ? engine_ : frame_;
        if (mode_ == "resize") pixels = resize(std::move(pixels), frame_, engine_, channels_);
        std::vector<char> mask(has_mask_ ? held.height * held.width * answer_bytes_ : 0);
        for (std::size_t i = 0; i < mask.size(); i += answer_bytes_) mask[i] = '\xff';
        for (const Part& row : rows_)
            for (const Part& column : columns_) {
                std::fill(engine.frame.bytes.begin(), engine.frame.bytes.end(), '\0');
                for (std::int64_t y = 0; y < row.length; ++y)
                    std::memcpy(&engine.frame.bytes[((row.to + y) * engine_.width + column.to) * channels_],
                                &pixels[((row.from + y) * held.width + column.from) * channels_],
                                column.length * channels_);
                engine.infer();
                for (std::int64_t y = row.first; has_mask_ && y < row.end; ++y)
                    std::memcpy(&mask[(y * held.width + column.first) * answer_bytes_],
                                &engine.answer.bytes[((y - row.from + row.to) * engine_.width + column.first -
                                                      column.from + column.to) * answer_bytes_],
                                (column.end - column.first) * answer_bytes_);
            }
        if (!has_mask_) answer = engine.answer.bytes;
        else if (held == frame_) answer = std::move(mask);
        else
            for (std::int64_t y = 0; y < frame_.height; ++y)
                for (std::int64_t x = 0; x < frame_.width; ++x)
                    std::memcpy(&answer[(y * frame_.width + x) * answer_bytes_],
                                &mask[((2 * y + 1) * held.height / (2 * frame_.height) * held.width +
                                       (2 * x + 1) * held.width / (2 * frame_.width)) * answer_bytes_],
                                answer_bytes_);
    }
};
