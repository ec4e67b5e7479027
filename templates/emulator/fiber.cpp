#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#if defined(__APPLE__)
#define HIDDEN ".private_extern attngen_context_switch\n"
#else
#define HIDDEN ".hidden attngen_context_switch\n"
#endif

#if defined(__x86_64__)
asm(R"(
.text
.globl attngen_context_switch
)" HIDDEN R"(
.p2align 4
attngen_context_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
// Six registers, the address that `ret` takes, and the slot of the caller's own return address, which keeps the
// alignment that a function expects at its entry.
static constexpr int FRAME_WORDS = 8, ENTRY_WORD = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl attngen_context_switch
)" HIDDEN R"(
.p2align 4
attngen_context_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static constexpr int FRAME_WORDS = 20, ENTRY_WORD = 11;
#else
#error "the emulator has a context switch for x86-64 and aarch64 only"
#endif

namespace emu {

static std::vector<char*> stacks;

static size_t guard_bytes() { return (size_t)sysconf(_SC_PAGESIZE); }

char* stack_of(int index) {
  while ((int)stacks.size() <= index) {
    const size_t guard = guard_bytes();
    void* p = mmap(nullptr, guard + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    mprotect(p, guard, PROT_NONE);
    stacks.push_back((char*)p + guard);
  }
  return stacks[index];
}

void release_stacks() {
  for (char* stack : stacks) munmap(stack - guard_bytes(), guard_bytes() + STACK_BYTES);
  stacks.clear();
}

void* fresh_context(char* stack, void (*entry)()) {
  void** frame = (void**)(stack + STACK_BYTES) - FRAME_WORDS;
  memset(frame, 0, FRAME_WORDS * sizeof(void*));
  frame[ENTRY_WORD] = (void*)entry;
  return frame;
}

}  // namespace emu
