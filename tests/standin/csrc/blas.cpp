// cuBLAS and cuBLASLt: a product reads its factors and, without looking at them, makes zeros.
//
// Declared here as their public documentation has them, since their headers come with libraries of several 100 MB.
#include "standin.h"

#include <library_types.h>

#include <cstring>

using namespace standin;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  int pointer_mode = 0, math_mode = 0;
};

// One operand, by columns.
struct Matrix {
  char* at;
  cudaDataType type;
  int64_t rows, columns, leading, batches, stride;
};

size_t size_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_16F: case CUDA_R_16BF: return 2;
    case CUDA_R_32F: case CUDA_R_32I: return 4;
    case CUDA_R_64F: return 8;
    default: missing("matrix product of this type");
  }
}

Matrix factor(const void* at, cudaDataType type, bool transposed, int64_t rows, int64_t columns, int64_t leading,
              int64_t batches = 1, int64_t stride = 0) {
  if (transposed) std::swap(rows, columns);
  return {(char*)at, type, rows, columns, leading, batches, stride};
}

Span all_of(const Matrix& m) {
  int64_t elements = m.stride * (m.batches - 1) + m.leading * (m.columns - 1) + m.rows;
  return {m.at, size_of(m.type) * elements};
}

// Its columns, without what lies between them.
std::vector<Span> columns_of(const Matrix& m) {
  size_t size = size_of(m.type);
  bool dense = m.leading == m.rows && (m.batches == 1 || m.stride == m.rows * m.columns);
  if (dense) return {{m.at, size * m.rows * m.columns * m.batches}};
  std::vector<Span> spans;
  for (int64_t b = 0; b < m.batches; b++) {
    for (int64_t c = 0; c < m.columns; c++) {
      spans.push_back({m.at + size * (b * m.stride + c * m.leading), size * m.rows});
    }
  }
  return spans;
}

int product(cudaStream_t handle, const Matrix& a, const Matrix& b, const Matrix& c, bool adds) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Stream* stream = stream_of(handle);
  counts[stream->device].products++;
  std::vector<Span> made = columns_of(c), read = {all_of(a), all_of(b)};
  if (adds) {
    // What it adds to has been read by then, and stays as it is.
    read.insert(read.end(), made.begin(), made.end());
    made.clear();
  }
  put(stream, settings.kernel_s, std::move(read), made, [made] {
    for (const Span& span : made) memset(span.at, 0, span.bytes);
  });
  return 0;
}

double scale(const void* factor, cudaDataType type) {
  return type == CUDA_R_64F ? *(const double*)factor : *(const float*)factor;
}

}  // namespace

STANDIN_API int cublasCreate_v2(Handle** into) {
  *into = new Handle;
  return 0;
}
STANDIN_API int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}
STANDIN_API int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}
STANDIN_API int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
STANDIN_API int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}
STANDIN_API int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}
STANDIN_API int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}
STANDIN_API int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}

STANDIN_API int cublasGemmStridedBatchedEx(
    Handle* handle, int ta, int tb, int m, int n, int k, const void*, const void* a, cudaDataType a_type, int lda,
    long long stride_a, const void* b, cudaDataType b_type, int ldb, long long stride_b, const void* beta, void* c,
    cudaDataType c_type, int ldc, long long stride_c, int batches, int, int) {
  return product(handle->stream, factor(a, a_type, ta, m, k, lda, batches, stride_a),
                 factor(b, b_type, tb, k, n, ldb, batches, stride_b),
                 {(char*)c, c_type, m, n, ldc, batches, stride_c}, scale(beta, c_type) != 0);
}

STANDIN_API int cublasGemmEx(
    Handle* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, cudaDataType a_type, int lda,
    const void* b, cudaDataType b_type, int ldb, const void* beta, void* c, cudaDataType c_type, int ldc, int compute,
    int algorithm) {
  return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type,
                                    ldc, 0, 1, compute, algorithm);
}

#define SAME_TYPE(letter, kind, type)                                                                                  \
  STANDIN_API int cublas##letter##gemm_v2(Handle* handle, int ta, int tb, int m, int n, int k, const kind* alpha,      \
                                          const kind* a, int lda, const kind* b, int ldb, const kind* beta, kind* c,   \
                                          int ldc) {                                                                   \
    return cublasGemmEx(handle, ta, tb, m, n, k, alpha, a, type, lda, b, type, ldb, beta, c, type, ldc, 0, 0);         \
  }                                                                                                                    \
  STANDIN_API int cublas##letter##gemmStridedBatched(                                                                  \
      Handle* handle, int ta, int tb, int m, int n, int k, const kind* alpha, const kind* a, int lda,                  \
      long long stride_a, const kind* b, int ldb, long long stride_b, const kind* beta, kind* c, int ldc,              \
      long long stride_c, int batches) {                                                                               \
    return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, type, lda, stride_a, b, type, ldb, stride_b,  \
                                      beta, c, type, ldc, stride_c, batches, 0, 0);                                    \
  }                                                                                                                    \
  STANDIN_API int cublas##letter##gemv_v2(Handle* handle, int ta, int m, int n, const kind*, const kind* a, int lda,   \
                                          const kind* x, int step_x, const kind* beta, kind* y, int step_y) {          \
    int64_t shared = ta ? m : n, made = ta ? n : m;                                                                    \
    return product(handle->stream, {(char*)a, type, m, n, lda, 1, 0}, {(char*)x, type, 1, shared, step_x, 1, 0},       \
                   {(char*)y, type, 1, made, step_y, 1, 0}, *beta != 0);                                               \
  }
SAME_TYPE(S, float, CUDA_R_32F)
SAME_TYPE(D, double, CUDA_R_64F)

// -- cuBLASLt

namespace {

enum LayoutAttribute { kType, kOrder, kRows, kColumns, kLeading, kBatches, kStride };  // CUBLASLT_MATRIX_LAYOUT_*

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

struct Opaque {
  int64_t nothing;
};

}  // namespace

STANDIN_API int cublasLtMatmulDescCreate(Opaque** into, int, cudaDataType) {
  *into = new Opaque{};
  return 0;
}
STANDIN_API int cublasLtMatmulDescDestroy(Opaque* made) {
  delete made;
  return 0;
}
STANDIN_API int cublasLtMatmulDescSetAttribute(Opaque*, int, const void*, size_t) { return 0; }
STANDIN_API int cublasLtMatmulPreferenceCreate(Opaque** into) {
  *into = new Opaque{};
  return 0;
}
STANDIN_API int cublasLtMatmulPreferenceDestroy(Opaque* made) {
  delete made;
  return 0;
}
STANDIN_API int cublasLtMatmulPreferenceSetAttribute(Opaque*, int, const void*, size_t) { return 0; }

STANDIN_API int cublasLtMatrixLayoutCreate(Matrix** into, cudaDataType type, uint64_t rows, uint64_t columns, int64_t leading) {
  *into = new Matrix{nullptr, type, (int64_t)rows, (int64_t)columns, leading, 1, 0};
  return 0;
}
STANDIN_API int cublasLtMatrixLayoutDestroy(Matrix* made) {
  delete made;
  return 0;
}
STANDIN_API int cublasLtMatrixLayoutSetAttribute(Matrix* matrix, int name, const void* value, size_t) {
  if (name == kBatches) matrix->batches = *(const int32_t*)value;
  if (name == kStride) matrix->stride = *(const int64_t*)value;
  return 0;
}

STANDIN_API int cublasLtMatmulAlgoGetHeuristic(
    void*, Opaque*, Matrix*, Matrix*, Matrix*, Matrix*, Opaque*, int, Heuristic* into, int* found) {
  memset(into, 0, sizeof *into);
  *found = 1;
  return 0;
}

STANDIN_API int cublasLtMatmul(
    void*, Opaque*, const void*, const void* a, const Matrix* a_layout, const void* b, const Matrix* b_layout,
    const void* beta, const void*, const Matrix*, void* d, const Matrix* d_layout, const void*, void*, size_t,
    cudaStream_t stream) {
  Matrix left = *a_layout, right = *b_layout, made = *d_layout;
  left.at = (char*)a;
  right.at = (char*)b;
  made.at = (char*)d;
  return product(stream, left, right, made, scale(beta, made.type) != 0);
}
