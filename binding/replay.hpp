// The sums beside the pool (tinyllm/replay.h), for kvpool.replay.
#pragma once

#include <nanobind/nanobind.h>

namespace kvpool {

void bind_replay(nanobind::module_ &m);

} // namespace kvpool
