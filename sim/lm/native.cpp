// Losses and gradients of one Llama in fp32 on one core: the mathematics of stacked.py. Called by native.py.
//
// Activations have one feature a row and one token a column, so that every loop runs over tokens with unit stride.
// The activations of one call should fit in the second-level cache.
//
// Legend: M tokens of all sequences, T of one, C hidden size, F feed-forward size, H heads, D head size (H D = C),
// V vocabulary, P parameters.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

struct Block {
    int64_t query_key_value, attended, gate_up, down, norm1, norm2;  // offsets in the flat vector
};

struct Shape {
    int64_t layers, heads, head_size, inner, vocabulary, tokens;
    int64_t embedding, norm;      // offsets in the flat vector
    const Block *blocks;          // [layers]
    const float *cosine, *sine;   // [D/2, T]
    float epsilon;
};

namespace {

constexpr long ROWS = 8, LANES = 16, COLUMNS = 2 * LANES;  // a product computes ROWS x COLUMNS sums in registers
constexpr long MOST_TERMS = 512;                           // terms of a sum in one panel, which takes 64 kB
constexpr long MOST_LAYERS = 64;

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

Lanes load(const float *from) { return *reinterpret_cast<const Lanes *>(from); }
void store(float *to, Lanes value) { *reinterpret_cast<Lanes *>(to) = value; }

struct Matrix {
    const float *at;
    long row, column;  // strides

    Matrix transposed() const { return {at, column, row}; }
};

// C (+)= A B, where A is [rows, terms], B [terms, columns]. Rows are multiples of ROWS, columns of COLUMNS.
void multiply(long rows, long columns, long terms, Matrix a, Matrix b, float *c, long stride, bool add = false) {
    alignas(64) float panel[MOST_TERMS * COLUMNS];
    for (long first = 0; first < terms; first += MOST_TERMS, add = true) {
        const long count = std::min(MOST_TERMS, terms - first);
        for (long n = 0; n < columns; n += COLUMNS) {
            const float *from = b.at + first * b.row + n * b.column;
            for (long k = 0; k < count; k++)
                if (b.column == 1)
                    std::memcpy(panel + k * COLUMNS, from + k * b.row, 4 * COLUMNS);
                else
                    for (long j = 0; j < COLUMNS; j++) panel[k * COLUMNS + j] = from[k * b.row + j * b.column];
            for (long i = 0; i < rows; i += ROWS) {
                Lanes sums[ROWS][2] = {};
                const float *left = a.at + i * a.row + first * a.column;
                for (long k = 0; k < count; k++, left += a.column) {
                    const Lanes right0 = load(panel + k * COLUMNS), right1 = load(panel + k * COLUMNS + LANES);
#pragma GCC unroll 8
                    for (long r = 0; r < ROWS; r++) {
                        sums[r][0] += left[r * a.row] * right0;
                        sums[r][1] += left[r * a.row] * right1;
                    }
                }
#pragma GCC unroll 8
                for (long r = 0; r < ROWS; r++) {
                    float *to = c + (i + r) * stride + n;
                    store(to, add ? load(to) + sums[r][0] : sums[r][0]);
                    store(to + LANES, add ? load(to + LANES) + sums[r][1] : sums[r][1]);
                }
            }
        }
    }
}

// exp(x) for x <= 88 to a few units in the last place, and 0 below -87. The polynomial is Cephes' expf.
inline float exponential(float x) {
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;  // NaN stays NaN
    const float power = std::nearbyint(bounded * 1.44269504f);
    const float rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const int32_t bits = (static_cast<int32_t>(power) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : sum * scale;
}

// What the backward pass of a block needs.
struct Kept {
    float *x1, *scale1, *normed1, *qkv, *attention, *attended, *x2, *scale2, *normed2, *gate_up, *inner;
};

class Pass {
  public:
    Pass(const Shape &shape, const float *theta, const int64_t *batch, long sequences, float *memory)
        : s(shape), theta(theta), batch(batch), T(shape.tokens), M(sequences * T), D(shape.head_size),
          C(shape.heads * D), F(shape.inner), V(shape.vocabulary), memory(memory) {
        for (long number = 0; number < s.layers; number++)
            kept[number] = {take(C), take(1), take(C),     take(3 * C), take(s.heads * T), take(C),
                            take(C), take(1), take(C),     take(2 * F), take(F)};
        x = take(C), scale = take(1), normed = take(C), logits = take(V);
        flow = take(C), passed = take(std::max(C, F)), by_gate_up = take(2 * F), by_qkv = take(3 * C);
        scores = take(T), maximum = take(1), total = take(1);
    }

    float *end() const { return memory; }

    // Return the cross entropies in nats, summed over the tokens. ``logits`` becomes their gradient by the logits.
    double forward() {
        float *in = s.layers ? kept[0].x1 : x;
        for (long m = 0; m < M; m++)
            for (long c = 0; c < C; c++) in[c * M + m] = theta[s.embedding + token(m) * C + c];
        for (long number = 0; number < s.layers; number++)
            block(s.blocks[number], kept[number], number + 1 < s.layers ? kept[number + 1].x1 : x);
        norm(x, s.norm, scale, normed);
        linear(V, C, s.embedding, normed, logits);
        double loss = 0;
        for (long m = 0; m < M; m++) loss -= logits[target(m) * M + m];
        softmax(logits, V, M);
        for (long m = 0; m < M; m++) {
            loss += maximum[m] + std::log(static_cast<double>(total[m]));
            logits[target(m) * M + m] -= 1.0f;
        }
        return loss;
    }

    // Add the gradients, times ``weight``, to ``gradient`` [P]; after ``forward``.
    void backward(float *gradient, float weight) {
        by = gradient;
        for (long place = 0; place < V * M; place++) logits[place] *= weight;
        std::fill(flow, flow + C * M, 0.0f);
        linear_backward(V, C, s.embedding, normed, logits, passed);
        norm_backward(x, scale, s.norm);
        for (long number = s.layers; number-- > 0;) block_backward(s.blocks[number], kept[number]);
        for (long m = 0; m < M; m++)
            for (long c = 0; c < C; c++) by[s.embedding + token(m) * C + c] += flow[c * M + m];
    }

  private:
    const Shape &s;
    const float *theta;    // [P]
    const int64_t *batch;  // [sequences, T+1]
    const long T, M, D, C, F, V;
    float *memory, *by;
    Kept kept[MOST_LAYERS];
    float *x, *scale, *normed, *logits;  // of the output
    float *flow;                         // gradient by the residual stream, [C, M]
    float *passed;                       // gradient by the input of a product
    float *by_gate_up, *by_qkv, *scores, *maximum, *total;

    float *take(long rows) {
        memory += rows * M;
        return memory - rows * M;
    }

    int64_t token(long m) const { return batch[m + m / T]; }
    int64_t target(long m) const { return batch[m + m / T + 1]; }

    // --- parts, forward and backward ---------------------------------------------------------------------------------

    // y = W x for W [outputs, inputs] at an offset of theta.
    void linear(long outputs, long inputs, long at, const float *x, float *y, bool add = false) {
        multiply(outputs, M, inputs, {theta + at, inputs, 1}, {x, M, 1}, y, M, add);
    }

    // Add the gradient by W; write the one by x.
    void linear_backward(long outputs, long inputs, long at, const float *x, const float *by_y, float *by_x) {
        multiply(outputs, inputs, M, {by_y, M, 1}, {x, 1, M}, by + at, inputs, true);
        multiply(inputs, M, outputs, {theta + at, 1, inputs}, {by_y, M, 1}, by_x, M);
    }

    void norm(const float *x, long at, float *scale, float *y) {
        std::fill(scale, scale + M, 0.0f);
        for (long c = 0; c < C; c++)
            for (long m = 0; m < M; m++) scale[m] += x[c * M + m] * x[c * M + m];
        for (long m = 0; m < M; m++) scale[m] = 1.0f / std::sqrt(scale[m] / C + s.epsilon);
        for (long c = 0; c < C; c++)
            for (long m = 0; m < M; m++) y[c * M + m] = x[c * M + m] * scale[m] * theta[at + c];
    }

    // Add to the gradient by the norm's weight and to ``flow``; ``passed`` is the gradient by its output.
    void norm_backward(const float *x, const float *scale, long at) {
        float *along = total;
        std::fill(along, along + M, 0.0f);
        for (long c = 0; c < C; c++) {
            Lanes sums = {};
            for (long m = 0; m < M; m += LANES) {
                const Lanes product = load(passed + c * M + m) * load(x + c * M + m) * load(scale + m);
                sums += product;
                store(along + m, load(along + m) + product * theta[at + c]);
            }
            for (long lane = 0; lane < LANES; lane++) by[at + c] += sums[lane];
        }
        for (long m = 0; m < M; m++) along[m] *= scale[m] / C;
        for (long c = 0; c < C; c++)
            for (long m = 0; m < M; m++)
                flow[c * M + m] += (passed[c * M + m] * theta[at + c] - x[c * M + m] * along[m]) * scale[m];
    }

    // Replace each column by its softmax; leave its maximum and its sum of exponentials.
    void softmax(float *x, long rows, long columns) {
        std::copy(x, x + columns, maximum);
        std::fill(total, total + columns, 0.0f);
        for (long i = 1; i < rows; i++)
            for (long m = 0; m < columns; m++) maximum[m] = x[i * M + m] > maximum[m] ? x[i * M + m] : maximum[m];
        for (long i = 0; i < rows; i++)
            for (long m = 0; m < columns; m++) total[m] += x[i * M + m] = exponential(x[i * M + m] - maximum[m]);
        for (long i = 0; i < rows; i++)
            for (long m = 0; m < columns; m++) x[i * M + m] /= total[m];
    }

    // Rotate queries and keys by their positions, or back.
    void rotate(float *qkv, float direction) {
        for (long head = 0; head < 2 * s.heads; head++)
            for (long d = 0; d < D / 2; d++)
                for (long first = 0; first < M; first += T) {
                    float *real = qkv + (head * D + d) * M + first, *imaginary = real + D / 2 * M;
                    const float *cosine = s.cosine + d * T, *sine = s.sine + d * T;
                    for (long t = 0; t < T; t++) {
                        const float a = real[t], b = imaginary[t], turn = direction * sine[t];
                        real[t] = a * cosine[t] - b * turn;
                        imaginary[t] = b * cosine[t] + a * turn;
                    }
                }
    }

    // Call ``each`` with the offsets of a head's features and of its attention, for every head and sequence.
    template <class Each> void heads(Each each) {
        for (long head = 0; head < s.heads; head++)
            for (long first = 0; first < M; first += T) each(head * D * M + first, head * T * M + first);
    }

    // --- blocks -------------------------------------------------------------------------------------------------------

    void block(const Block &at, Kept &k, float *out) {
        norm(k.x1, at.norm1, k.scale1, k.normed1);
        linear(3 * C, C, at.query_key_value, k.normed1, k.qkv);
        rotate(k.qkv, 1.0f);
        const float factor = 1.0f / std::sqrt(static_cast<float>(D));
        heads([&](long features, long square) {
            const Matrix query{k.qkv + features, M, 1}, key{query.at + C * M, M, 1}, value{key.at + C * M, M, 1};
            float *attention = k.attention + square;  // [keys, queries]
            multiply(T, T, D, key.transposed(), query, attention, M);
            for (long i = 0; i < T; i++) {
                for (long q = 0; q < T; q++) attention[i * M + q] *= factor;
                std::fill(attention + i * M, attention + i * M + i, -1e30f);  // queries before this key
            }
            softmax(attention, T, T);
            multiply(D, T, T, value, {attention, M, 1}, k.attended + features, M);
        });
        std::copy(k.x1, k.x1 + C * M, k.x2);
        linear(C, C, at.attended, k.attended, k.x2, true);

        norm(k.x2, at.norm2, k.scale2, k.normed2);
        linear(2 * F, C, at.gate_up, k.normed2, k.gate_up);
        for (long i = 0; i < F * M; i++) k.inner[i] = k.gate_up[i] * sigmoid(k.gate_up[i]) * k.gate_up[F * M + i];
        std::copy(k.x2, k.x2 + C * M, out);
        linear(C, F, at.down, k.inner, out, true);
    }

    void block_backward(const Block &at, const Kept &k) {
        linear_backward(C, F, at.down, k.inner, flow, passed);
        for (long i = 0; i < F * M; i++) {
            const float gate = k.gate_up[i], opened = sigmoid(gate);
            by_gate_up[i] = passed[i] * k.gate_up[F * M + i] * opened * (1.0f + gate * (1.0f - opened));
            by_gate_up[F * M + i] = passed[i] * gate * opened;
        }
        linear_backward(2 * F, C, at.gate_up, k.normed2, by_gate_up, passed);
        norm_backward(k.x2, k.scale2, at.norm2);

        linear_backward(C, C, at.attended, k.attended, flow, passed);
        const float factor = 1.0f / std::sqrt(static_cast<float>(D));
        heads([&](long features, long square) {
            const Matrix query{k.qkv + features, M, 1}, key{query.at + C * M, M, 1}, value{key.at + C * M, M, 1};
            const Matrix by_attended{passed + features, M, 1}, by_scores{scores, M, 1};
            const float *attention = k.attention + square;
            multiply(T, T, D, value.transposed(), by_attended, scores, M);
            std::fill(total, total + T, 0.0f);
            for (long i = 0; i < T; i++)
                for (long q = 0; q < T; q++) total[q] += scores[i * M + q] * attention[i * M + q];
            for (long i = 0; i < T; i++)
                for (long q = 0; q < T; q++)
                    scores[i * M + q] = (scores[i * M + q] - total[q]) * attention[i * M + q] * factor;
            float *by_query = by_qkv + features, *by_key = by_query + C * M, *by_value = by_key + C * M;
            multiply(D, T, T, key, by_scores, by_query, M);
            multiply(D, T, T, query, by_scores.transposed(), by_key, M);
            multiply(D, T, T, by_attended, Matrix{attention, M, 1}.transposed(), by_value, M);
        });
        rotate(by_qkv, -1.0f);
        linear_backward(3 * C, C, at.query_key_value, k.normed1, by_qkv, passed);
        norm_backward(k.x1, k.scale1, at.norm1);
    }

    static float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
};

}  // namespace

extern "C" {

// Return how many floats of memory the functions below need.
int64_t memory_floats(const Shape *shape, int64_t sequences) {
    float *none = nullptr;
    return Pass(*shape, none, nullptr, sequences, none).end() - none;
}

// Return the cross entropies in nats, summed over the tokens.
double loss(const Shape *shape, const float *theta, const int64_t *batch, int64_t sequences, float *memory) {
    return Pass(*shape, theta, batch, sequences, memory).forward();
}

// Return ``loss``, and add its gradient, times ``weight``, to ``gradient`` [P].
double accumulate(const Shape *shape, const float *theta, const int64_t *batch, int64_t sequences, float *memory,
                  float *gradient, float weight) {
    Pass pass(*shape, theta, batch, sequences, memory);
    const double loss = pass.forward();
    pass.backward(gradient, weight);
    return loss;
}

}
