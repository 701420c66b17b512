// Steps of a decoder: the same bits however a prompt is cut and whoever else is in a step, and an error, not an end,
// where memory is short.
#pragma once
#include <new>
#include <numeric>
#include "check_argmax.h"
#include "check_products.h"

// The allocations until the one that fails; below 0: none fails. Only the thread that sets it is counted: in others,
// and so in any piece of a team, every allocation fails while it is set, since none is allowed there.
inline std::atomic<int64_t> allocations_left{-1};
inline std::atomic<bool> forbidden_elsewhere{false};
inline thread_local bool counted = false;

inline void* allocate(size_t size, size_t alignment) {
    if (!counted && forbidden_elsewhere) throw std::bad_alloc();
    if (counted && allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
    void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

// Apart, so that the compiler does not take it for another function's memory.
[[gnu::noinline]] inline void release(void* memory) { std::free(memory); }

// The weights of a model. If there are experts, the first layer has them.
struct Layout {
    native::Format format;
    int64_t experts = 0;
};

template <class T> class TinyModel {
  public:
    static constexpr int64_t kHidden = 64, kInner = 96, kVocab = 70, kLayers = 2, kHeads = 6, kKvHeads = 2, kDim = 20;
    static constexpr int64_t kWidth = 96, kPages = 60, kQkv = (kHeads + 2 * kKvHeads) * kDim;

    TinyModel(Layout layout, int threads, int64_t page_size) : format_(layout.format), page_size_(page_size) {
        for (auto& layer : layers_) {
            const bool routed = layout.experts > 0 && &layer == layers_;
            const int64_t experts = routed ? layout.experts : 1;
            layer = {matrix(kQkv, kHidden), matrix(kHidden, kHeads * kDim), matrix(experts * 2 * kInner, kHidden),
                     matrix(experts * kHidden, kInner), routed ? plain_matrix(experts, kHidden) : native::Matrix{},
                     {norm_.data(), nullptr, norm_.data(), nullptr, nullptr, nullptr}, 1};
        }
        shape_ = {kHidden, kVocab, kLayers, layout.experts, layout.experts > 0 ? 2 : 0, 1, kHeads, kKvHeads, kDim,
                  kDim / 2, 1, native::kNoQkNorm, native::kSilu, 1e-5f, 0.2f, 0, 1, 1, 1, 0};
        const native::Matrix head = matrix(kVocab, kHidden);
        weights_ = {layers_, nullptr, head, head, norm_.data()};
        const int status = native_create(&shape_, &weights_, std::is_same_v<T, native::Bf16>, threads, &handle_);
        expect(status == 0 && handle_ != nullptr, "a decoder");
        for (int64_t i = 0; i < kLayers; i++) {
            const int64_t page = kKvHeads * page_size * kDim;  // of keys, before the same page of values
            pools_.emplace_back(2 * kPages * page);
            pages_[i] = {pools_.back().data(), pools_.back().data() + page, 2 * page, 0, 0};
        }
    }
    ~TinyModel() { native_destroy(handle_); }

    // The logits of the last `wants` tokens of each sequence, of one each if that is empty; all begin at `start`. The
    // largest one of each row is checked.
    int step(const std::vector<std::vector<int64_t>>& ids, int64_t start, std::vector<float>& logits,
             std::vector<int64_t> wants = {}) {
        const auto count = (int64_t)ids.size(), each = kPages / count;
        wants.resize(count, wants.empty());
        const int64_t wanted = std::accumulate(wants.begin(), wants.end(), int64_t(0));
        std::vector<int64_t> all, starts(count, start), counts;
        std::vector<int32_t> numbers(kPages);
        std::vector<const int32_t*> tables;
        for (int32_t i = 0; i < kPages; i++) numbers[i] = i;
        for (int64_t s = 0; s < count; s++) {
            all.insert(all.end(), ids[s].begin(), ids[s].end());
            counts.push_back((int64_t)ids[s].size());
            tables.push_back(&numbers[s * each]);
        }
        logits.assign(wanted * kWidth, 0.0f);
        std::vector<int64_t> argmax(wanted, -2);
        const native::Step step{count, (int64_t)all.size(), wanted, all.data(), starts.data(), counts.data(),
                                wants.data(), tables.data(), count, pages_, page_size_, angles_.data(),
                                angles_.data(), logits.data(), argmax.data()};
        counted = forbidden_elsewhere = true;
        const int status = native_step(handle_, &step);
        counted = forbidden_elsewhere = false;
        for (int64_t s = 0; s < step.wanted && status == 0; s++)
            expect(argmax[s] == plain_argmax(&logits[s * kWidth], kVocab), "the first largest logit", s, argmax[s]);
        return status;
    }

    // Takes no memory, in no thread.
    void draw(const native::DrawCall& call) {
        counted = forbidden_elsewhere = true;
        allocations_left = 0;
        const int status = native_draw(handle_, &call);
        allocations_left = -1;
        counted = forbidden_elsewhere = false;
        expect(status == 0, "status of a draw");
    }

  private:
    native::Matrix matrix(int64_t n, int64_t k) {
        if (format_ != native::kPlain) {
            grouped_.emplace_back(format_, n, k, (unsigned)grouped_.size());
            return grouped_.back().matrix();
        }
        return plain_matrix(n, k);
    }
    native::Matrix plain_matrix(int64_t n, int64_t k) {
        held_.push_back(packed(random_values<T>(n * k, (unsigned)held_.size()), n, k));
        return {n, k, nullptr, {{held_.back().data(), n, native::kPlain}}};
    }

    std::vector<float> norm_ = std::vector<float>(96, 0.2f), angles_ = std::vector<float>(400 * kDim, 0.5f);
    std::vector<std::vector<T>> held_, pools_;
    std::vector<GroupedWeights> grouped_;
    native::Layer layers_[kLayers];
    native::Shape shape_;
    native::Weights weights_;
    native::Pages pages_[kLayers];
    native::Format format_;
    int64_t page_size_;
    void* handle_;
};

inline std::vector<int64_t> tokens(int64_t count, int64_t first) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < count; i++) ids.push_back((first + 7 * i) % 70);
    return ids;
}

// The prompt in chunks of so many tokens, after as many other sequences, of which each wants another number of rows.
template <class T>
std::vector<float> logits_of(Layout layout, int64_t chunk, int64_t others, int threads, int64_t page_size) {
    TinyModel<T> model(layout, threads, page_size);
    std::vector<float> logits;
    constexpr int64_t kLength = 90;
    for (int64_t start = 0; start < kLength; start += chunk) {
        std::vector<std::vector<int64_t>> ids;
        std::vector<int64_t> wants;
        const int64_t count = std::min(chunk, kLength - start);
        for (int64_t other = 0; other < others; other++) ids.push_back(tokens(count, other)), wants.push_back(other % 3);
        ids.push_back(tokens(count, 1 + 7 * start)), wants.push_back(start + chunk >= kLength);
        expect(model.step(ids, start, logits, wants) == 0, "status of a step");
    }
    return {logits.end() - model.kWidth, logits.end() - model.kWidth + model.kVocab};
}

template <class T> void check_bits(Layout layout) {
    const std::vector<float> alone = logits_of<T>(layout, 90, 0, 1, 16);
    for (float logit : alone) expect(std::isfinite(logit), "finite logits");
    expect(logits_of<T>(layout, 90, 5, 3, 16) == alone, "bits beside five others");
    expect(logits_of<T>(layout, 37, 0, 2, 16) == alone, "bits of a prompt in chunks");
    expect(logits_of<T>(layout, 37, 2, 2, 16) == alone, "bits of a prompt in chunks beside two others");
    expect(logits_of<T>(layout, 90, 1, 2, 5) == alone, "bits of pages of another size");
}

// Whichever allocation of a step fails, the step says so or does without, and is right when it is done again.
template <class T> void check_short_memory(Layout layout, int64_t page_size) {
    const std::vector<std::vector<int64_t>> ids{tokens(70, 1), tokens(1, 2), tokens(33, 3)};
    std::vector<float> expected, found;
    TinyModel<T>(layout, 2, page_size).step(ids, 0, expected);
    int64_t failures = 0;
    for (int64_t allocation = 0;; allocation++) {
        TinyModel<T> model(layout, 2, page_size);
        allocations_left = allocation;
        const int status = model.step(ids, 0, found);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        expect(status == 0 ? found == expected : status == 1 && failed, "status where memory is short", allocation);
        if (!failed) break;
        failures += status;
        expect(model.step(ids, 0, found) == 0 && found == expected, "a step after one without memory", allocation);
    }
    expect(failures > 10, "allocations of a step", failures);
}

// Steps of more and more tokens, for which the buffers grow while threads may still be late in the step before.
template <class T> void check_growth(Layout layout) {
    for (int64_t i = 0; i < 5; i++) {
        TinyModel<T> model(layout, 3, 16);
        std::vector<float> logits;
        for (int64_t count = 1; count < 100; count *= 2)
            expect(model.step({tokens(count, i)}, 0, logits) == 0, "status of a step with more tokens", count);
    }
}

inline void check_decoder() {
    for (native::Format format : {native::kPlain, native::kFourMin, native::kEight})
        for (int64_t experts : {0, 5}) {
            const Layout layout{format, experts};
            check_bits<float>(layout);
            check_bits<native::Bf16>(layout);
            check_growth<float>(layout);
            check_growth<native::Bf16>(layout);
            check_short_memory<float>(layout, 16);
            check_short_memory<native::Bf16>(layout, 5);
        }
    check_short_memory<float>({native::kPlain}, 5);
    check_short_memory<native::Bf16>({native::kPlain}, 16);
    std::puts("steps are right, also without memory");
}
