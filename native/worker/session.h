#pragma once

#include "worker/worker.h"

namespace mesh {

// Serves the client at the other end of `fd`, which is owned from here on, until it leaves.
// Throws what it did wrong, after telling it.
void serve_session(worker & owner, int fd);

}  // namespace mesh
