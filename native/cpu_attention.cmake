# Attention on CPUs that does not depend on how tokens were batched, nor on the number of threads.
#
# ggml has three ways to compute it: tiles for 64 tokens and more, single rows for fewer, and for a token that is
# alone, stretches of the cache, one for each thread. They round differently, so that an answer which another node
# continues could go on with another word. In the copy of ops.cpp that is compiled here all tokens are computed as
# tiles, of as many rows as there are: a row's numbers do not depend on the rows beside it. To make that fast for few
# rows, the transposed copy of the keys is made with vector instructions.
#
# - Machines with more threads than heads keep ggml's stretches for a token that is alone: some of their threads would
#   have nothing to do.
# - Heads of more than 128 numbers, for which the copy takes longer than rows, are computed as tiles only in whole
#   tiles of 64 tokens, and as rows in the rest of a batch. So are all heads on processors without AVX2 or NEON, and on
#   those with SVE, for which ggml has no fast product of tiles.
# - Quantised caches are computed as rows, always.
#
# Where ggml's text has changed, the file is compiled as it is, with a warning.

set(mesh_ops "${ENGINE_SOURCE}/ggml/src/ggml-cpu/ops.cpp")
file(READ "${mesh_ops}" mesh_code)

function(mesh_replace old new)
    string(FIND "${mesh_code}" "${old}" first)
    string(FIND "${mesh_code}" "${old}" last REVERSE)
    if (first EQUAL -1 OR NOT first EQUAL last)
        set(mesh_is_unknown TRUE PARENT_SCOPE)
        return()
    endif()
    string(REPLACE "${old}" "${new}" changed "${mesh_code}")
    set(mesh_code "${changed}" PARENT_SCOPE)
endfunction()

mesh_replace("nek1 >= 512;" "nek1 >= 512 && neq2 < nth;")

mesh_replace("neq1 >= Q_TILE_SZ);" "neq1 >= mesh_least_rows(DK));")

# The scratch memory of a thread begins where it did; of a tile, only the rows that there are take part.
mesh_replace("        void  * Q_q    = base;" "        const int Q_TILE_SZ = tile_rows;\n\n        void  * Q_q    = base;")
mesh_replace("bool skip[Q_TILE_SZ] = {};" "bool skip[ggml_fa_tile_config::Q] = {};")

mesh_replace([=[
                ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir0, ir1);
            } else {]=]
[=[
                for (int64_t ir = ir0; ir < ir1;) {
                    const int64_t head = ir - ir % neq1;
                    const int64_t rest = mesh_least_rows(DK) > 1 ? neq1 % Q_TILE_SZ : 0;
                    const int64_t end  = MIN(ir1, head + neq1 - rest);
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

        if (use_tiled && mesh_least_rows(DK) > 1 && neq1 % Q_TILE_SZ != 0) {
            ggml_barrier(params->threadpool);  // rows and tiles have different scratch memory
            for (int64_t head = ith; head < neq2*neq3; head += nth) {
                ggml_compute_forward_flash_attn_ext_f16_one_chunk(
                    params, dst, (head + 1)*neq1 - neq1 % Q_TILE_SZ, (head + 1)*neq1, 0, nek1, nullptr, 0);
            }
        }
    }
}

void ggml_compute_forward_flash_attn_ext(]=])

mesh_replace([=[
            for (int tk = 0; tk < kv_tile; tk++) {
                const char * k_data = (const char *)k->data + (ic + tk)*nbk1 + ik2*nbk2 + ik3*nbk3;]=]
[=[
            const char * k_tile   = (const char *)k->data + ic*nbk1 + ik2*nbk2 + ik3*nbk3;
            const bool   k_packed = kv_tile == KV_TILE_SZ && mesh_transposed(K_f32, k_tile, nbk1, DK, kv_type);
            for (int tk = 0; tk < kv_tile && !k_packed; tk++) {
                const char * k_data = (const char *)k->data + (ic + tk)*nbk1 + ik2*nbk2 + ik3*nbk3;]=])

# Only what no key or value is written to has to be zero.
mesh_replace("        memset(K_f32, 0, DK * KV_TILE_SZ * sizeof(float));\n        memset(V32,   0, KV_TILE_SZ * DV * sizeof(float));"
    "        if (nek1 % KV_TILE_SZ != 0) {\n            memset(K_f32, 0, DK * KV_TILE_SZ * sizeof(float));\n            memset(V32,   0, KV_TILE_SZ * DV * sizeof(float));\n        }")

mesh_replace([=[
static void ggml_compute_forward_flash_attn_ext_tiled(]=]
[=[
// The fewest rows that are computed as a tile.
static int64_t mesh_least_rows(int64_t head_size) {
#if (defined(__AVX2__) && defined(__F16C__)) || (defined(__aarch64__) && defined(__ARM_NEON) && !defined(__ARM_FEATURE_SVE))
    return head_size <= 128 ? 1 : ggml_fa_tile_config::Q;
#else
    GGML_UNUSED(head_size);
    return ggml_fa_tile_config::Q;
#endif
}

// A tile of keys as F32, transposed; false where it has to be made in another way.
static bool mesh_transposed(float * dst, const char * k, size_t nb1, int64_t DK, ggml_type type) {
    static constexpr int KV = ggml_fa_tile_config::KV;
#if defined(__AVX2__) && defined(__F16C__)
    for (int tk = 0; tk < KV && DK % 8 == 0; tk += 8) {
        for (int64_t dk = 0; dk < DK; dk += 8) {
            __m256 r[8], t[8];
            for (int i = 0; i < 8; i++) {
                const char * row = k + (tk + i)*nb1;
                r[i] = type == GGML_TYPE_F16 ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const ggml_fp16_t *)row + dk)))
                                             : _mm256_loadu_ps((const float *)row + dk);
            }
            for (int i = 0; i < 8; i += 2) {
                t[i]     = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            for (int i = 0; i < 8; i += 4) {
                r[i]     = _mm256_shuffle_ps(t[i],     t[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(t[i],     t[i + 2], 0xEE);
                r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
            }
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(dst + (dk + i)*KV + tk,     _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
                _mm256_storeu_ps(dst + (dk + i + 4)*KV + tk, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
            }
        }
    }
    return DK % 8 == 0;
#elif defined(__aarch64__) && defined(__ARM_NEON)
    for (int tk = 0; tk < KV && DK % 4 == 0; tk += 4) {
        for (int64_t dk = 0; dk < DK; dk += 4) {
            float32x4_t r[4];
            for (int i = 0; i < 4; i++) {
                const char * row = k + (tk + i)*nb1;
                r[i] = type == GGML_TYPE_F16 ? vcvt_f32_f16(vld1_f16((const __fp16 *)row + dk)) : vld1q_f32((const float *)row + dk);
            }
            const float32x4x2_t a = vtrnq_f32(r[0], r[1]);
            const float32x4x2_t b = vtrnq_f32(r[2], r[3]);
            vst1q_f32(dst + (dk + 0)*KV + tk, vcombine_f32(vget_low_f32(a.val[0]),  vget_low_f32(b.val[0])));
            vst1q_f32(dst + (dk + 1)*KV + tk, vcombine_f32(vget_low_f32(a.val[1]),  vget_low_f32(b.val[1])));
            vst1q_f32(dst + (dk + 2)*KV + tk, vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])));
            vst1q_f32(dst + (dk + 3)*KV + tk, vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1])));
        }
    }
    return DK % 4 == 0;
#else
    GGML_UNUSED(dst); GGML_UNUSED(k); GGML_UNUSED(nb1); GGML_UNUSED(DK); GGML_UNUSED(type); GGML_UNUSED(KV);
    return false;
#endif
}

static void ggml_compute_forward_flash_attn_ext_tiled(]=])

if (mesh_is_unknown)
    message(WARNING "ggml's attention has changed: an answer that another node continues may differ in a word")
    return()
endif()

set(mesh_changed_ops "${CMAKE_BINARY_DIR}/ggml-cpu/ops.cpp")
file(WRITE "${mesh_changed_ops}" "${mesh_code}")
foreach (target IN LISTS mesh_cpu_targets)
    get_target_property(mesh_cpu_sources ${target} SOURCES)
    list(FILTER mesh_cpu_sources EXCLUDE REGEX "ggml-cpu/ops\\.cpp$")
    set_target_properties(${target} PROPERTIES SOURCES "${mesh_cpu_sources}")
    target_sources(${target} PRIVATE "${mesh_changed_ops}")
    target_include_directories(${target} PRIVATE "${ENGINE_SOURCE}/ggml/src/ggml-cpu")
endforeach()
