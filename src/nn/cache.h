#pragma once
// Tensors of a state that grow by the tokens read.
#include <functional>
#include <string>

#include "nn/mixer.h"

namespace assay::nn {

// Appends x [B, T, …] along time to what the state holds under `name`; returns all of it. Without
// gradients room is kept for as much again, so a token costs its own bytes, not those of its past;
// a state that was copied grows apart from its copy. With gradients everything is copied. A last
// piece is put behind the past and not kept. Whoever else holds what the state held keeps it
// unchanged, at the price of a copy.
at::Tensor append(State& state, const std::string& name, const at::Tensor& x);

// As append without gradients, for a kernel that writes the new steps itself: makes room for
// `count` steps of the shape and dtype of x and returns all. The new steps are not initialised.
at::Tensor grow(State& state, const std::string& name, const at::Tensor& x, int64_t count);

// Moves what the state holds under `name` to memory of its own for `capacity` steps, no fewer than
// it has, and returns all of them. The state then holds all; the new steps are not initialised.
at::Tensor reserve(State& state, const std::string& name, int64_t capacity);

// Memory for `capacity` steps like those of x [B, T, …] in `batch` sequences. It shows T steps, not
// initialised; append() uses the others.
at::Tensor with_room(const at::Tensor& x, int64_t batch, int64_t capacity);

// As append, but the state keeps the last `count` steps only: a window. Without gradients there is
// room for `count` more, so the window is copied once in as many tokens.
at::Tensor append_last(State& state, const std::string& name, const at::Tensor& x, int64_t count);

// Tokens that the state holds under `name`; 0 when there is nothing.
int64_t length_of(const State& state, const std::string& name);

// body(b) for each used row b of a batch of State::rows, on the CPU side by side: a step reads the
// caches of each row with calls of their own, which are too small to be divided among threads.
void for_each_row(const State& state, const c10::Device& device,
                  const std::function<void(int64_t b)>& body);

}  // namespace assay::nn
