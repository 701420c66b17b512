// The C interface of the kernels: make a decoder, step it, drop it; draw tokens; multiply by a matrix; attend to pages,
// write to them. No exception leaves these functions.
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

// Runs the work. Returns 0; 1 if there is too little memory; 2 if it failed in another way, which native_failure
// describes.
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

// Returns the message of the calling thread's last exception.
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

// Allocates all memory before it computes, so it cannot run out of memory in the middle.
int native_step(void* decoder, const native::Step* step) {
    return status_of([&] { static_cast<native::AnyDecoder*>(decoder)->run(*step); });
}

// Draws tokens from the logits of `call`, on the decoder's threads. Any logits will do, not only the decoder's own.
int native_draw(void* decoder, const native::DrawCall* call) {
    return status_of([&] { static_cast<native::AnyDecoder*>(decoder)->draw(*call); });
}

// Computes out[rows][w.n] = a[rows][w.k] x w + bias, for activations and products in bf16 or else in float32. Runs on
// `threads` threads of the pool, or only on the caller's if `parallel` is null.
int native_multiply(const native::Matrix* w, const void* a, int64_t rows, void* out, int is_bf16,
                    native::Parallel parallel, int threads) {
    return status_of([&] {
        if (is_bf16) {
            using native::Bf16;
            native::multiply_rows<Bf16>(*w, static_cast<const Bf16*>(a), rows, static_cast<Bf16*>(out), parallel,
                                        threads);
        } else {
            native::multiply_rows<float>(*w, static_cast<const float*>(a), rows, static_cast<float*>(out), parallel,
                                         threads);
        }
    });
}

// Converts blocks of GGUF to panels.
int native_pack(const native::PackCall* call, int threads) {
    return status_of([&] { native::pack(*call, threads); });
}

// Sets `to` to a digest of bytes.
int native_digest(const uint8_t* bytes, int64_t count, int threads, uint64_t* to) {
    return status_of([&] { *to = native::digest(bytes, count, threads); });
}

void native_destroy(void* decoder) { delete static_cast<native::AnyDecoder*>(decoder); }

// Runs on `threads` threads of the pool, or only on the caller's if `parallel` is null.
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
