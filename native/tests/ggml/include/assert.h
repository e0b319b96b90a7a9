// Stands in for the system's <assert.h> while ggml is compiled for our tests.
//
// Release builds drop ggml's assertions, yet its kernels rely on them: what a
// hostile graph could break has to stop a test. Assertions about values are let
// through: a NaN in an input spoils the client's own answer and nothing else.

#undef assert

#ifdef __cplusplus
extern "C" {
#endif
void mesh_assertion_failed(const char * expression, const char * file, int line);
#ifdef __cplusplus
}
#endif

#define assert(expression) ((expression) ? (void)0 : mesh_assertion_failed(#expression, __FILE__, __LINE__))

#if !defined(__cplusplus) && !defined(static_assert)
#define static_assert _Static_assert
#endif
