#pragma once

namespace mesh {

// From now on the engine reads from a model's files only what it uses.
void map_files_sparingly();

}  // namespace mesh
