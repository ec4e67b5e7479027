// Fibers: one stack a thread of the CTA, and a switch that saves only what a call preserves.
#pragma once
#include <cstddef>

namespace emu {

// Saves the running context in *from and continues at `to`. Declared by its symbol's name: it is written in assembly.
extern "C" void context_switch(void** from, void* to) asm("attngen_context_switch");

constexpr size_t STACK_BYTES = 256 * 1024;

// The stack of fiber `index`, mapped when first asked for and kept until released. Below it lies a guard page.
// Null when the system gives no memory.
char* stack_of(int index);

// Unmaps all stacks. A process may load hundreds of bodies, and the system allows it some 65,000 mappings in all.
void release_stacks();

// A context that starts `entry`, which never returns, on a stack.
void* fresh_context(char* stack, void (*entry)());

}  // namespace emu
