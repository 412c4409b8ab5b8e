// kvpool.attention; attention.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace kvpool {

void bind_attention(nanobind::module_ &m); // after bind_pool

} // namespace kvpool
