# Attention on CPUs that does not depend on how tokens were batched, nor on the number of threads.
#
# ggml has three ways to compute it: tiles for 64 tokens and more, single rows for fewer, and for a token that is
# alone, stretches of the cache, one for each thread. They round differently, so that an answer which another node
# continues could go on with another word. In the copy of ops.cpp that is compiled here
#
# - only whole tiles of 64 tokens are computed as tiles, and the rest of a batch as rows. Prompts are cut at multiples
#   of 64, so that each of their tokens is computed in the same way however large a plan's batches are;
# - a token that is alone is computed as rows, too. Machines with more threads than heads keep ggml's way: some of
#   their threads would have nothing to do.
#
# Where ggml's text has changed, the file is compiled as it is, with a warning.

set(mesh_ops "${ENGINE_SOURCE}/ggml/src/ggml-cpu/ops.cpp")
file(READ "${mesh_ops}" mesh_code)

function(mesh_replace old new)
    string(FIND "${mesh_code}" "${old}" first)
    string(FIND "${mesh_code}" "${old}" last REVERSE)
    if (first EQUAL -1 OR NOT first EQUAL last)
        message(WARNING "ggml's attention has changed: an answer that another node continues may differ in a word")
        return()
    endif()
    string(REPLACE "${old}" "${new}" changed "${mesh_code}")
    set(mesh_code "${changed}" PARENT_SCOPE)
endfunction()

mesh_replace("nek1 >= 512;" "nek1 >= 512 && neq2 < nth;")

mesh_replace([=[
                ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir0, ir1);
            } else {]=]
[=[
                for (int64_t ir = ir0; ir < ir1;) {
                    const int64_t head = ir - ir % neq1;
                    const int64_t end  = MIN(ir1, head + neq1 - neq1 % Q_TILE_SZ);
                    if (ir < end) {
                        ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir, end);
                    }
                    ir = head + neq1;
                }
            } else {]=])

mesh_replace([=[
            current_chunk = ggml_threadpool_chunk_add(params->threadpool, 1);
        }
    }
}

void ggml_compute_forward_flash_attn_ext(]=]
[=[
            current_chunk = ggml_threadpool_chunk_add(params->threadpool, 1);
        }

        if (use_tiled && neq1 % Q_TILE_SZ != 0) {
            ggml_barrier(params->threadpool);  // rows and tiles have different scratch memory
            for (int64_t head = ith; head < neq2*neq3; head += nth) {
                ggml_compute_forward_flash_attn_ext_f16_one_chunk(
                    params, dst, (head + 1)*neq1 - neq1 % Q_TILE_SZ, (head + 1)*neq1, 0, nek1, nullptr, 0);
            }
        }
    }
}

void ggml_compute_forward_flash_attn_ext(]=])

set(mesh_changed_ops "${CMAKE_BINARY_DIR}/ggml-cpu/ops.cpp")
file(WRITE "${mesh_changed_ops}" "${mesh_code}")
get_target_property(mesh_cpu_sources ggml-cpu SOURCES)
list(FILTER mesh_cpu_sources EXCLUDE REGEX "ggml-cpu/ops\\.cpp$")
set_target_properties(ggml-cpu PROPERTIES SOURCES "${mesh_cpu_sources}")
target_sources(ggml-cpu PRIVATE "${mesh_changed_ops}")
target_include_directories(ggml-cpu PRIVATE "${ENGINE_SOURCE}/ggml/src/ggml-cpu")
