// The C interface of the kernels: make a decoder, step it, drop it; draw tokens; attend to pages, write to them. No
// exception leaves.
#include <cstdio>
#include <exception>
#include <new>
#include "decoder.h"
#include "pack.h"
#include "parallel_pages.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

thread_local char failure[256];

// 0; 1 where memory is short; 2 where the work failed in another way, which native_failure describes.
template <class Work> int status_of(Work&& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::exception& error) {
        std::snprintf(failure, sizeof failure, "%s", error.what());
    } catch (...) {
        std::snprintf(failure, sizeof failure, "an unknown exception");
    }
    return 2;
}

}  // namespace

extern "C" {

// The message of the last exception of the calling thread.
const char* native_failure() { return failure; }

int native_create(const native::Shape* shape, const native::Weights* weights, int is_bf16, int threads,
                  void** decoder) {
    return status_of([&] {
        native::AnyDecoder* made;
        if (is_bf16) {
            made = new native::Decoder<native::Bf16>(*shape, *weights, threads);
        } else {
            made = new native::Decoder<float>(*shape, *weights, threads);
        }
        *decoder = made;
    });
}

// Memory is short before anything was done, or never.
int native_step(void* decoder, const native::Step* step) {
    return status_of([&] { static_cast<native::AnyDecoder*>(decoder)->run(*step); });
}

// Draws on the decoder's threads. The logits may be other logits than the decoder's last step has computed.
int native_draw(void* decoder, const native::DrawCall* call) {
    return status_of([&] { static_cast<native::AnyDecoder*>(decoder)->draw(*call); });
}

// out[rows][whole panels of w.n] = a[rows][w.k] x w, of float32 activations.
int native_multiply(const native::Matrix* w, const float* a, int64_t rows, float* out, int threads) {
    return status_of([&] { native::multiply_rows<float>(*w, a, rows, out, threads); });
}

// Blocks of GGUF to panels.
int native_pack(const native::PackCall* call, int threads) {
    return status_of([&] { native::pack(*call, threads); });
}

void native_destroy(void* decoder) { delete static_cast<native::AnyDecoder*>(decoder); }

// On `threads` threads of the pool; null: on the caller's alone.
int native_attend_pages(const native::PagesCall* call, native::Parallel parallel, int threads) {
    return status_of([&] { native::attend_pages(*call, parallel, threads); });
}

int native_write_pages(const native::WriteCall* call, native::Parallel parallel, int threads) {
    return status_of([&] { native::write_pages(*call, parallel, threads); });
}

// Weights in 2 MiB pages need 1/512 of the address translations.
void native_use_large_pages(void* start, int64_t bytes) {
#if defined(__linux__)
    madvise(start, bytes, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}

}  // extern "C"
