// The C interface of the kernels: make a decoder, step it, drop it. No exception leaves it.
#include <memory>
#include <new>
#include "decoder.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

struct Handle {
    std::unique_ptr<native::Decoder<native::Bf16>> bf16;
    std::unique_ptr<native::Decoder<float>> fp32;
};

}  // namespace

extern "C" {

void* native_create(const native::Shape* shape, const native::Weights* weights, int is_bf16, int threads) {
    try {
        auto handle = std::make_unique<Handle>();
        if (is_bf16) {
            handle->bf16 = std::make_unique<native::Decoder<native::Bf16>>(*shape, *weights, threads);
        } else {
            handle->fp32 = std::make_unique<native::Decoder<float>>(*shape, *weights, threads);
        }
        return handle.release();
    } catch (...) {
        return nullptr;
    }
}

// 0; 1 where memory is short, before anything was done; 2 where the step failed in another way.
int native_step(void* opaque, const native::Step* step) {
    auto* handle = static_cast<Handle*>(opaque);
    try {
        if (handle->bf16 != nullptr) {
            handle->bf16->run(*step);
        } else {
            handle->fp32->run(*step);
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (...) {
        return 2;
    }
}

void native_destroy(void* opaque) { delete static_cast<Handle*>(opaque); }

// Weights in 2 MiB pages need 1/512 of the address translations.
void native_use_large_pages(void* start, int64_t bytes) {
#if defined(__linux__)
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

}  // extern "C"
