// What stands before and behind an engine, on the GPU: frames of any size to what the engine reads, and its scores to
// classes and colours. kernels.py calls these functions.
//
// The arithmetic is that of sources.py (Pillow's) and of pixels.py, operation by operation, so that results are equal to
// the last bit. No header is included, because NVRTC alone has none.
//
// Shapes: N images, C channels, K classes, H height, W width, P pixels (H * W). A thread makes one pixel of the result,
// and blockIdx.y is its image.

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef long long int64;

struct float16 {
    uint16 bits;
};

#ifdef __CUDACC__
__device__ float half_to_float(uint16 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ uint16 float_to_half(float value)
{
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ float load(const float *place) { return *place; }
__device__ float load(const float16 *place) { return half_to_float(place->bits); }
__device__ void store(float *place, float value) { *place = value; }
__device__ void store(float16 *place, float value) { place->bits = float_to_half(value); }

__device__ int pixel_of_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// ---- Frames to what the engine reads

struct Fit {
    const uint8 *frames; // [N, any height, any width, C]
    int64 frame_bytes, row_bytes; // from one frame, or row, to the next
    const int *rows, *columns; // [H, 2 + row_taps] and [W, 2 + column_taps], see below
    int row_taps, column_taps;
    int channels, height, width; // of the result
    int is_reversed; // whether the order of channels changes
    int is_height_first; // the axis that is resized first
};

// Weights are multiples of 2^-22; HALF of a step rounds to the nearest.
constexpr int BITS = 22;
constexpr int HALF = 1 << (BITS - 1);

__device__ int round_sum(int sum)
{
    const int value = sum >> BITS;
    return value > 255 ? 255 : value;
}

// Return a value of a fitted frame. A line of a table has the first pixel of the frame that counts, how many do, and
// their weights. Where none does there is padding, which is black. Both axes round to uint8, so their order matters.
__device__ int fit_value(const Fit &fit, int pixel, int channel)
{
    const int *row = fit.rows + pixel / fit.width * (2 + fit.row_taps);
    const int *column = fit.columns + pixel % fit.width * (2 + fit.column_taps);
    const uint8 *corner = fit.frames + blockIdx.y * fit.frame_bytes + row[0] * fit.row_bytes +
                          (int64)column[0] * fit.channels + (fit.is_reversed ? fit.channels - 1 - channel : channel);
    const int *first = fit.is_height_first ? row : column, *second = fit.is_height_first ? column : row;
    const int64 first_step = fit.is_height_first ? fit.row_bytes : fit.channels;
    const int64 second_step = fit.is_height_first ? fit.channels : fit.row_bytes;
    int sum = HALF;
    for (int i = 0; i < second[1]; ++i) {
        int first_sum = HALF;
        for (int j = 0; j < first[1]; ++j)
            first_sum += first[2 + j] * corner[i * second_step + j * first_step];
        sum += second[2 + i] * round_sum(first_sum);
    }
    return round_sum(sum);
}

// Frames [N, H, W, C].
extern "C" __global__ void frames_to_uint8(Fit fit, uint8 *frames)
{
    const int pixel = pixel_of_thread(), num_pixels = fit.height * fit.width;
    if (pixel >= num_pixels)
        return;
    for (int c = 0; c < fit.channels; ++c)
        frames[((int64)blockIdx.y * num_pixels + pixel) * fit.channels + c] = fit_value(fit, pixel, c);
}

// Normalised images [N, C, H, W].
template <typename Value>
__device__ void normalise(const Fit &fit, const float *scale_C, const float *shift_C, Value *images)
{
    const int pixel = pixel_of_thread(), num_pixels = fit.height * fit.width;
    if (pixel >= num_pixels)
        return;
    for (int c = 0; c < fit.channels; ++c) {
        // These intrinsics are never fused into one operation, which would round once.
        const float value = __fadd_rn(__fmul_rn(fit_value(fit, pixel, c), scale_C[c]), shift_C[c]);
        store(images + ((int64)blockIdx.y * fit.channels + c) * num_pixels + pixel, value);
    }
}

extern "C" __global__ void frames_to_float32(Fit fit, const float *scale_C, const float *shift_C, float *images)
{
    normalise(fit, scale_C, shift_C, images);
}

extern "C" __global__ void frames_to_float16(Fit fit, const float *scale_C, const float *shift_C, float16 *images)
{
    normalise(fit, scale_C, shift_C, images);
}

// ---- Scores to classes and colours

struct Paint {
    const uint8 *palette; // [num_colours, 3]
    uint8 *colours; // [N, P, 3], or null for none
    int num_colours;
    int num_pixels; // P
};

// A class that the palette lacks is black.
__device__ void paint_class(const Paint &paint, int64 place, int found)
{
    for (int c = 0; c < 3; ++c)
        paint.colours[place * 3 + c] = found < paint.num_colours ? paint.palette[found * 3 + c] : 0;
}

// The classes [N, P] of the largest of the scores [N, K, P], and their colours. The first of equal scores wins, and
// NaN is the largest, as in numpy's argmax. `lead` is what the first score gets on top.
template <typename Score, typename Class>
__device__ void choose(const Paint &paint, const Score *scores, Class *classes, int num_classes, float lead)
{
    const int pixel = pixel_of_thread();
    if (pixel >= paint.num_pixels)
        return;
    scores += (int64)blockIdx.y * num_classes * paint.num_pixels + pixel;
    Score first;
    store(&first, load(scores) + lead);
    float highest = load(&first);
    int found = 0;
    for (int k = 1; k < num_classes && highest == highest; ++k) {
        const float score = load(scores + (int64)k * paint.num_pixels);
        if (!(score <= highest)) {
            highest = score;
            found = k;
        }
    }
    const int64 place = (int64)blockIdx.y * paint.num_pixels + pixel;
    classes[place] = found;
    if (paint.colours)
        paint_class(paint, place, found);
}

extern "C" __global__ void float32_to_uint8(Paint paint, const float *scores, uint8 *classes, int num_classes, float lead)
{
    choose(paint, scores, classes, num_classes, lead);
}

extern "C" __global__ void float32_to_uint16(Paint paint, const float *scores, uint16 *classes, int num_classes, float lead)
{
    choose(paint, scores, classes, num_classes, lead);
}

extern "C" __global__ void float16_to_uint8(Paint paint, const float16 *scores, uint8 *classes, int num_classes, float lead)
{
    choose(paint, scores, classes, num_classes, lead);
}

extern "C" __global__ void float16_to_uint16(Paint paint, const float16 *scores, uint16 *classes, int num_classes, float lead)
{
    choose(paint, scores, classes, num_classes, lead);
}

// The colours of classes [N, P] that the engine gives itself.
extern "C" __global__ void uint8_to_colours(Paint paint, const uint8 *classes)
{
    const int pixel = pixel_of_thread();
    const int64 place = (int64)blockIdx.y * paint.num_pixels + pixel;
    if (pixel < paint.num_pixels)
        paint_class(paint, place, classes[place]);
}
