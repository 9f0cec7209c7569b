// A decoding step: its products, in float, and what lies between them, each as one pass over memory: norms, rotary
// angles, attention to what was kept, gates, and the choice of a token. And what learning and scoring read of a token's
// logits.
//
// A number is a float, or 16 bits of one (bfloat16). Arithmetic is in float; rounding to 16 bits happens where
// transformers' layers round. A row's result depends on nothing but the row: not on other rows, nor on threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

struct Half {  // bfloat16
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(Half x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline void put(float& out, float x) { out = x; }

inline void put(Half& out, float x) {  // to the nearest, to even between two; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

template <typename T>
inline float rounded(float x) {
    T out;
    put(out, x);
    return to_float(out);
}

// e^x to about one unit in the last place; 0 below -87. Written out since a call would keep a loop from vectors.
inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = std::nearbyint(bounded * 1.44269504088896341f);
    float r = std::fma(n, -0.693359375f, bounded);
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r) + 1.0f;
    int32_t shifted = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &shifted, 4);
    float out = p * power;
    return x < -87.0f ? 0.0f : (std::isnan(x) ? x : out);
}

#if defined(__AVX512F__)
constexpr int64_t lanes = 16, held = 24;  // floats of a vector; vectors of sums that fit into registers
#else
constexpr int64_t lanes = 8, held = 12;
#endif
typedef float Vector __attribute__((vector_size(4 * lanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * lanes)));

inline Vector load(const float* from) {
    Vector out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

inline Vector load(const Half* from) {
    typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    Bits bits = __builtin_convertvector(halves, Bits) << 16;
    Vector out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// x + added, which replaces x where something is added; then its norm, times a weight.
template <typename T>
void norm(T* x, const T* added, const T* weight, T* out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T* mine = x + row * width;
        if (added != nullptr) {
            const T* more = added + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) put(mine[i], to_float(mine[i]) + to_float(more[i]));
        }
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) squares += to_float(mine[i]) * to_float(mine[i]);
        float scale = 1.0f / std::sqrt(squares / float(width) + eps);
        T* to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) put(to[i], to_float(weight[i]) * rounded<T>(to_float(mine[i]) * scale));
    }
}

// silu(gate) * up, which stand side by side.
template <typename T>
void gate(const T* both, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gates = both + 2 * row * width;
        const T* ups = gates + width;
        T* to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            float g = to_float(gates[i]);
            put(to[i], rounded<T>(g / (1.0f + exponential(-g))) * to_float(ups[i]));
        }
    }
}

// Where keys and values are: keys [row head size length], values [row head length size].
struct Kept {
    int64_t heads, shared, size, length;
};

// Turns queries and keys of one new token, and keeps its key and value.
template <typename T>
void turn(T* qkv, const T* cosines, const T* sines, T* keys, T* values, int64_t rows, int64_t at, Kept kept) {
    int64_t half = kept.size / 2;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T* mine = qkv + row * (kept.heads + 2 * kept.shared) * kept.size;
        const T* c = cosines + row * kept.size;
        const T* s = sines + row * kept.size;
        for (int64_t head = 0; head < kept.heads + kept.shared; ++head) {
            T* x = mine + head * kept.size;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                float low = to_float(x[i]), high = to_float(x[i + half]);
                float first = rounded<T>(low * to_float(c[i])) + rounded<T>(-high * to_float(s[i]));
                float second = rounded<T>(high * to_float(c[i + half])) + rounded<T>(low * to_float(s[i + half]));
                put(x[i], first);
                put(x[i + half], second);
            }
        }
        for (int64_t head = 0; head < kept.shared; ++head) {
            const T* key = mine + (kept.heads + head) * kept.size;
            const T* value = key + kept.shared * kept.size;
            T* k = keys + (row * kept.shared + head) * kept.size * kept.length;
            for (int64_t i = 0; i < kept.size; ++i) k[i * kept.length + at] = key[i];
            T* v = values + ((row * kept.shared + head) * kept.length + at) * kept.size;
            std::memcpy(v, value, kept.size * sizeof(T));
        }
    }
}

// Scores of `members` queries, of one head of keys, at V vectors of places.
template <int64_t V, int64_t members, typename T>
inline void score_block(const float* queries, int64_t size, const T* keys, int64_t length, float* scores, int64_t across) {
    Vector sums[members][V] = {};
    for (int64_t i = 0; i < size; ++i, keys += length) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < V; ++v) {
            Vector key = load(keys + v * lanes);
#pragma GCC unroll 4
            for (int64_t m = 0; m < members; ++m) sums[m][v] += queries[m * size + i] * key;
        }
    }
    for (int64_t m = 0; m < members; ++m) std::memcpy(scores + m * across, sums[m], sizeof sums[m]);
}

// The same at all places from the first on. Less than a vector of what is behind the last is read, and has scores, too.
template <int64_t members, typename T>
void score(const float* queries, int64_t size, const T* keys, int64_t length, float* scores, int64_t across, int64_t first,
           int64_t until) {
    constexpr int64_t most = held / 6;
    for (; first + most * lanes <= until; first += most * lanes)
        score_block<most, members>(queries, size, keys + first, length, scores + first, across);
    for (; first < until; first += lanes)
        score_block<1, members>(queries, size, keys + first, length, scores + first, across);
}

// Makes scores e^(score - largest), and returns their sum.
inline float exponentials(float* scores, int64_t first, int64_t until, float scaling) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t t = first; t < until; ++t) {
        scores[t] *= scaling;
        most = scores[t] > most ? scores[t] : most;
    }
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t t = first; t < until; ++t) {
        scores[t] = exponential(scores[t] - most);
        total += scores[t];
    }
    return total;
}

// Adds values, weighted, to V vectors of numbers of each member.
template <int64_t V, int64_t members, typename T>
inline void gather_block(const float* weights, int64_t across, const T* values, int64_t size, float* found,
                         int64_t first, int64_t until) {
    Vector sums[members][V];
    for (int64_t m = 0; m < members; ++m) std::memcpy(sums[m], found + m * size, sizeof sums[m]);
    for (int64_t t = first; t < until; ++t) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < V; ++v) {
            Vector value = load(values + t * size + v * lanes);
#pragma GCC unroll 4
            for (int64_t m = 0; m < members; ++m) sums[m][v] += weights[m * across + t] * value;
        }
    }
    for (int64_t m = 0; m < members; ++m) std::memcpy(found + m * size, sums[m], sizeof sums[m]);
}

template <int64_t members, typename T>
void gather(const float* weights, int64_t across, const T* values, int64_t size, float* found, int64_t first,
            int64_t until) {
    constexpr int64_t most = held / 6;
    int64_t i = 0;
    for (; i + most * lanes <= size; i += most * lanes)
        gather_block<most, members>(weights, across, values + i, size, found + i, first, until);
    for (; i + lanes <= size; i += lanes)
        gather_block<1, members>(weights, across, values + i, size, found + i, first, until);
    for (; i < size; ++i)
        for (int64_t m = 0; m < members; ++m)
            for (int64_t t = first; t < until; ++t)
                found[m * size + i] = std::fma(weights[m * across + t], to_float(values[t * size + i]), found[m * size + i]);
}

template <int64_t n>
using Count = std::integral_constant<int64_t, n>;

// What one token of each row attends to: `read` places of its prompt, from the row's first on, and its own tokens.
// Where rows of one prompt follow each other, what they read stays in the cache. Behind all keys a vector can be read.
template <typename T>
void attend(const T* qkv, const T* prompt_keys, const T* prompt_values, const int64_t* prompts, int64_t read,
            int64_t prompt_length, const T* keys, const T* values, const int64_t* firsts, T* out, int64_t rows,
            int64_t until, float scaling, Kept kept) {
    constexpr int64_t most_members = 4;
    const int64_t group = kept.heads / kept.shared, size = kept.size, across = read + until + lanes, end = read + until;
#pragma omp parallel
    {
        std::vector<float> memory(most_members * (across + 2 * size));
        float* scores = memory.data();
        float* queries = scores + most_members * across;
        float* found = queries + most_members * size;
#pragma omp for schedule(static)
        for (int64_t each = 0; each < rows * kept.shared; ++each) {
            const int64_t row = each % rows, shared = each / rows, first = firsts[row];
            const int64_t of_prompt = (prompts[row] * kept.shared + shared) * size * prompt_length;
            const int64_t of_row = (row * kept.shared + shared) * size * kept.length;
            auto attend_with = [&](auto count, int64_t head) {
                constexpr int64_t members = decltype(count)::value;
                const T* q = qkv + (row * (kept.heads + 2 * kept.shared) + head) * size;
                for (int64_t i = 0; i < members * size; ++i) queries[i] = to_float(q[i]);
                score<members>(queries, size, prompt_keys + of_prompt, prompt_length, scores, across, first, read);
                score<members>(queries, size, keys + of_row, kept.length, scores + read, across, 0, until);
                float totals[members];
                for (int64_t m = 0; m < members; ++m) totals[m] = exponentials(scores + m * across, first, end, scaling);
                std::fill_n(found, members * size, 0.0f);
                gather<members>(scores, across, prompt_values + of_prompt, size, found, first, read);
                gather<members>(scores + read, across, values + of_row, size, found, 0, until);
                T* to = out + (row * kept.heads + head) * size;
                for (int64_t m = 0; m < members; ++m)
#pragma omp simd
                    for (int64_t i = 0; i < size; ++i) put(to[m * size + i], found[m * size + i] / totals[m]);
            };
            int64_t head = shared * group, last = head + group;
            for (; head + most_members <= last; head += most_members) attend_with(Count<most_members>{}, head);
            if (last - head == 3) attend_with(Count<3>{}, head);
            if (last - head == 2) attend_with(Count<2>{}, head);
            if (last - head == 1) attend_with(Count<1>{}, head);
        }
    }
}

// The token at which the running sum of whole weights, floor(2^40 p / max p), passes the row's number in [0, 1), which
// is a multiple of 2^-24; or without numbers the first of the likeliest. A row that is not finite has no token: -1.
template <typename T>
void draw(const T* logits, const float* numbers, float temperature, int64_t* tokens, float* log_probs, int64_t rows,
          int64_t words) {
    constexpr int64_t block = 1024;
    int64_t blocks = (words + block - 1) / block;
#pragma omp parallel
    {
        std::vector<int64_t> sums(blocks);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const T* mine = logits + row * words;
            float most = -INFINITY;
            int bad = 0;
#pragma omp simd reduction(max : most) reduction(| : bad)
            for (int64_t i = 0; i < words; ++i) {
                float s = to_float(mine[i]) / temperature;
                most = s > most ? s : most;
                bad |= !(s < INFINITY);
            }
            tokens[row] = -1;
            log_probs[row] = NAN;
            if (bad || most == -INFINITY) continue;
            double total = 0.0;
            int64_t whole = 0;
            for (int64_t b = 0; b < blocks; ++b) {
                int64_t begin = b * block, end = begin + block < words ? begin + block : words;
                int64_t sum = 0;
                float part = 0.0f;
#pragma omp simd reduction(+ : sum, part)
                for (int64_t i = begin; i < end; ++i) {
                    float e = exponential(to_float(mine[i]) / temperature - most);
                    part += e;
                    sum += int64_t(e * 1099511627776.0f);
                }
                sums[b] = sum;
                whole += sum;
                total += part;
            }
            int64_t token = 0;
            if (numbers == nullptr) {
                while (to_float(mine[token]) / temperature != most) ++token;
            } else {
                int64_t numerator = int64_t(numbers[row] * 16777216.0f);
                int64_t target = numerator * (whole >> 24) + ((numerator * (whole & 16777215)) >> 24), passed = 0, b = 0;
                while (b + 1 < blocks && passed + sums[b] <= target) passed += sums[b++];
                token = b * block;
                while ((passed += int64_t(exponential(to_float(mine[token]) / temperature - most) * 1099511627776.0f)) <=
                           target &&
                       token + 1 < words)
                    ++token;
            }
            tokens[row] = token;
            log_probs[row] = to_float(mine[token]) / temperature - most - float(std::log(total));
        }
    }
}

// Where the logits of each token lie: a row of them in another batch row every `width` tokens.
struct Places {
    int64_t tokens, width, batch_stride, stride;

    int64_t operator[](int64_t token) const { return token / width * batch_stride + token % width * stride; }
};

constexpr float least_log_prob = -1e4f;  // stands for -inf in p log p, so that words of probability zero add zero

// Of each token its log-probability, and, where there is room for it, the entropy of what it comes from; the
// largest score and log sum e^(score - largest) are kept for `read_backward`. Scores are logits over the temperature.
template <typename T>
void read(const T* logits, const int64_t* tokens, float temperature, float* log_probs, float* largest, float* log_sums,
          float* entropies, Places places, int64_t words) {
    constexpr int64_t block = 1024;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < places.tokens; ++row) {
        const T* mine = logits + places[row];
        float most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < words; ++i) {
            float s = to_float(mine[i]) / temperature;
            most = s > most ? s : most;
        }
        double total = 0.0, weighted = 0.0;
        for (int64_t begin = 0; begin < words; begin += block) {
            int64_t end = begin + block < words ? begin + block : words;
            float sum = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
            for (int64_t i = begin; i < end; ++i) {  // one loop, asked for entropies or not: the same bits
                float s = to_float(mine[i]) / temperature - most;
                float e = exponential(s);
                sum += e;
                product += e * (s < least_log_prob ? least_log_prob : s);
            }
            total += sum;
            weighted += product;
        }
        double log_sum = std::log(total);
        largest[row] = most;
        log_sums[row] = float(log_sum);
        log_probs[row] = to_float(mine[tokens[row]]) / temperature - most - float(log_sum);
        if (entropies != nullptr) entropies[row] = float(log_sum - weighted / total);
    }
}

// The gradient of the logits from that of the log-probabilities and, where there is one, of the entropies.
template <typename T>
void read_backward(const T* logits, const int64_t* tokens, float temperature, const float* largest, const float* log_sums,
          const float* entropies, const float* of_log_probs, const float* of_entropies, T* out, Places places,
          int64_t words) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < places.tokens; ++row) {
        const T* mine = logits + places[row];
        T* to = out + row * words;
        float weight = of_log_probs[row] / temperature, most = largest[row], log_sum = log_sums[row];
        float entropy = 0.0f, of_entropy = 0.0f;
        if (of_entropies != nullptr) {
            entropy = entropies[row];
            of_entropy = of_entropies[row] / temperature;
        }
        auto at = [=](int64_t i) {
            float log_prob = to_float(mine[i]) / temperature - most - log_sum;
            float bounded = log_prob < least_log_prob ? least_log_prob : log_prob;
            return -exponential(log_prob) * (weight + of_entropy * (bounded + entropy));
        };
#pragma omp simd
        for (int64_t i = 0; i < words; ++i) put(to[i], at(i));
        if (tokens[row] >= 0) put(to[tokens[row]], at(tokens[row]) + weight);  // else another process has the word
    }
}

// --- products of few rows
//
// Libraries copy a matrix into an order of their own at each product, which for few rows takes longer than the product.
// Here the rows are copied, and the matrix is read as it lies: each of its numbers times vectors that have one input of
// several rows. A result is a sum over the inputs in their order.

constexpr int64_t most_vectors = 3;
constexpr int64_t strip = 24;  // outputs whose weights stay in the cache while all rows go over them

struct Product {
    int64_t rows, outputs, inputs, stride;  // of `out`, between two rows
    bool adds;                              // to what is in `out`
};

// Reads one float, or two numbers of 16 bits, of which each fills a vector.
inline void spread(const float* from, float (&out)[1]) { out[0] = *from; }

inline void spread(const Half* from, Vector (&out)[2]) {
    uint32_t both;
    std::memcpy(&both, from, 4);
    Bits bits = Bits{} + both, first = bits << 16, second = bits & 0xffff0000u;
    std::memcpy(&out[0], &first, sizeof first);
    std::memcpy(&out[1], &second, sizeof second);
}

// `width` outputs of up to V vectors of rows. What is ahead is fetched meanwhile.
template <int64_t V, int64_t width, typename W>
void multiply_block(const float* turned, int64_t step, const W* weight, float* out, int64_t rows,
                    const Product& product) {
    Vector sums[width][V] = {};
    const int64_t inputs = product.inputs, vectors = step / lanes;
    constexpr int64_t at_once = sizeof(float) / sizeof(W), line = 64 / sizeof(W), ahead = 8 * line;
    auto take = [&](int64_t i) __attribute__((always_inline)) {
        const Vector* x = reinterpret_cast<const Vector*>(turned + i * step);
#pragma GCC unroll 12
        for (int64_t n = 0; n < width; ++n) {
            std::conditional_t<at_once == 1, float, Vector> numbers[at_once];
            spread(weight + n * inputs + i, numbers);
#pragma GCC unroll 2
            for (int64_t each = 0; each < at_once; ++each)
#pragma GCC unroll 3
                for (int64_t v = 0; v < V; ++v) sums[n][v] += numbers[each] * x[each * vectors + v];
        }
    };
    int64_t i = 0;
    for (; i + 4 <= inputs; i += 4) {
        if (i % line == 0) {  // of each output; past the last input, of those that the next block begins with
            int64_t to = i + ahead < inputs ? i + ahead : i + ahead + (width - 1) * inputs;
#pragma GCC unroll 12
            for (int64_t n = 0; n < width; ++n) __builtin_prefetch(weight + n * inputs + to, 0, 2);
        }
#pragma GCC unroll 4
        for (int64_t more = 0; more < 4; more += at_once) take(i + more);
    }
    for (; i < inputs; ++i)
        for (int64_t n = 0; n < width; ++n)
            for (int64_t v = 0; v < V; ++v)
                sums[n][v] += to_float(weight[n * inputs + i]) * reinterpret_cast<const Vector*>(turned + i * step)[v];
    for (int64_t row = 0; row < rows; ++row)
#pragma GCC unroll 12
        for (int64_t n = 0; n < width; ++n) {
            float sum = sums[n][row / lanes][row % lanes];
            out[row * product.stride + n] = product.adds ? out[row * product.stride + n] + sum : sum;
        }
}

template <int64_t V, typename W>
void multiply_strip(const float* turned, int64_t step, const W* weight, float* out, int64_t rows, int64_t outputs,
                    const Product& product) {
    constexpr int64_t width = std::min<int64_t>(held / V, 12);
    int64_t n = 0, inputs = product.inputs;
    for (; n + width <= outputs; n += width)
        multiply_block<V, width>(turned, step, weight + n * inputs, out + n, rows, product);
    for (; n < outputs; ++n)
        multiply_block<V, 1>(turned, step, weight + n * inputs, out + n, rows, product);
}

// x W^T, of x [rows inputs] and W [outputs inputs].
template <typename W>
void multiply(const float* x, const W* weight, float* out, int64_t across, Product product) {
    const int64_t rows = product.rows, inputs = product.inputs, outputs = product.outputs;
    const int64_t vectors = (rows + lanes - 1) / lanes, step = vectors * lanes;
    const int64_t parts = (vectors + most_vectors - 1) / most_vectors;
    static thread_local std::vector<float> memory;
    memory.resize(std::max<size_t>(memory.size(), size_t(step * inputs + lanes)));
    float* turned = memory.data();
    while (reinterpret_cast<uintptr_t>(turned) % sizeof(Vector)) ++turned;
#pragma omp parallel if (rows * outputs * inputs > 1 << 18)
    {
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < inputs; begin += lanes) {
            int64_t end = std::min(begin + lanes, inputs);
            for (int64_t row = 0; row < step; ++row)
                for (int64_t i = begin; i < end; ++i) turned[i * step + row] = row < rows ? x[row * across + i] : 0.0f;
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < outputs; n += strip) {
            const W* lines = weight + n * inputs;
            int64_t width = std::min(strip, outputs - n), done = 0;
            for (int64_t part = 0; part < parts; ++part) {
                int64_t taken = (vectors - done + parts - part - 1) / (parts - part), row = done * lanes;
                auto on = taken == 1 ? multiply_strip<1, W> : taken == 2 ? multiply_strip<2, W> : multiply_strip<3, W>;
                on(turned + row, step, lines, out + row * product.stride + n,
                   std::min(rows - row, taken * lanes), width, product);
                done += taken;
            }
        }
    }
}

}  // namespace

#define FOR_EACH_NUMBER(make) make(float, float) make(half, Half)

#define ENTRIES(name, T)                                                                                             \
    void norm_##name(T* x, const T* added, const T* weight, T* out, int64_t rows, int64_t width, float eps) {        \
        norm<T>(x, added, weight, out, rows, width, eps);                                                            \
    }                                                                                                                \
    void gate_##name(const T* both, T* out, int64_t rows, int64_t width) { gate<T>(both, out, rows, width); }        \
    void draw_##name(const T* logits, const float* numbers, float temperature, int64_t* tokens, float* log_probs,    \
                     int64_t rows, int64_t words) {                                                                  \
        draw<T>(logits, numbers, temperature, tokens, log_probs, rows, words);                                       \
    }                                                                                                                \
    void read_##name(const T* logits, const int64_t* tokens, float temperature, float* log_probs, float* largest,    \
                     float* log_sums, float* entropies, int64_t rows, int64_t width, int64_t batch_stride,           \
                     int64_t stride, int64_t words) {                                                                \
        Places places{rows, width, batch_stride, stride};                                                            \
        read<T>(logits, tokens, temperature, log_probs, largest, log_sums, entropies, places, words);                \
    }                                                                                                                \
    void read_backward_##name(const T* logits, const int64_t* tokens, float temperature, const float* largest,                \
                     const float* log_sums, const float* entropies, const float* of_log_probs,                       \
                     const float* of_entropies, T* out, int64_t rows, int64_t width, int64_t batch_stride,           \
                     int64_t stride, int64_t words) {                                                                \
        Places places{rows, width, batch_stride, stride};                                                            \
        read_backward<T>(logits, tokens, temperature, largest, log_sums, entropies, of_log_probs, of_entropies, out, places,  \
                words);                                                                                              \
    }                                                                                                                \
    void multiply_##name(const float* x, const T* weight, float* out, int64_t across, int64_t stride, int64_t rows,  \
                         int64_t outputs, int64_t inputs, int64_t adds) {                                            \
        multiply<T>(x, weight, out, across, Product{rows, outputs, inputs, stride, adds != 0});                      \
    }                                                                                                                \
    void turn_##name(T* qkv, const T* cosines, const T* sines, T* keys, T* values, int64_t rows, int64_t at,         \
                     int64_t heads, int64_t shared, int64_t size, int64_t length) {                                  \
        turn<T>(qkv, cosines, sines, keys, values, rows, at, Kept{heads, shared, size, length});                     \
    }                                                                                                                \
    void attend_##name(const T* qkv, const T* prompt_keys, const T* prompt_values, const int64_t* prompts,           \
                       int64_t read, int64_t prompt_length, const T* keys, const T* values, const int64_t* firsts,   \
                       T* out, int64_t rows, int64_t until, float scaling, int64_t heads, int64_t shared,            \
                       int64_t size, int64_t length) {                                                               \
        attend<T>(qkv, prompt_keys, prompt_values, prompts, read, prompt_length, keys, values, firsts, out, rows,    \
                  until, scaling, Kept{heads, shared, size, length});                                                \
    }

extern "C" {
FOR_EACH_NUMBER(ENTRIES)
}
