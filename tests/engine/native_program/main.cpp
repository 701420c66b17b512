// Checks the kernels without Python: under sanitizers, and on machines that only an emulator runs.
#include "library.cpp"
#include "check_attention.h"
#include "check_decoder.h"
#include "check_draw.h"
#include "check_exp2.h"
#include "check_pack.h"
#include "check_routing.h"

void* operator new(size_t size) { return allocate(size, 16); }
void* operator new(size_t size, std::align_val_t alignment) { return allocate(size, (size_t)alignment); }
void* operator new(size_t size, const std::nothrow_t&) noexcept {
    try {
        return allocate(size, 16);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }

int main() {
    check_exp2();
    check_argmax();
    check_products();
    check_pack();
    check_attention();
    check_routing();
    check_draw();
    check_decoder();
}
