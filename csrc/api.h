// The C ABI of the native library: what Python (through ctypes) may call.
//
// Nothing here knows torch. Pointers are host memory, counts are elements. The layout of
// tf_segment and tf_packing is mirrored field by field in src/twinflow/native/library.py, and
// tf_segment_size() and tf_packing_size() let the loader refuse a library that disagrees.
#pragma once
#include <stdint.h>

#define TF_API_VERSION 3
#ifdef TF_BUILDING
#define TF_PUBLIC __attribute__((visibility("default")))
#else
#define TF_PUBLIC
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum tf_dtype { TF_NONE = 0, TF_F32 = 1, TF_BF16 = 2, TF_F16 = 3 };
enum tf_format { TF_STATE_F32 = 0, TF_STATE_BF16 = 1, TF_STATE_INT8 = 2 };

// One run of consecutive elements of one parameter, with its own hyper-parameters.
// In place: every *_in pointer equals its partner. Out of place: none of them does.
typedef struct tf_segment {
  const void* grad;          // grad_type
  const void* weight_in;     // read only when the master is split: its upper halves (bf16)
  void* weight;              // weight_type; NULL when weight_type is TF_NONE
  const void* master_in;     // float, or int16 lower halves when the master is split
  void* master;              //
  const void* state_in[2];   // first and second state; NULL where the rule has none
  void* state[2];            //
  const float* scale_in[2];  // one float per 128 elements, int8 format only
  float* scale[2];           //
  int64_t numel;
  int64_t first_index;  // position of element 0 in its parameter: a multiple of 128
  int32_t rule, format, grad_type, weight_type;
  int32_t split_master;  // not 0: the master is in two halves, the upper one in the weight, which is bf16
  float factor;          // multiplies the gradient: unscale and clip in one number
  float hyper[7];        // meaning: rules.h
  uint32_t key[2];       // randomness of (step, parameter) for stochastic rounding
} tf_segment;

// Numbers that travel packed; src/twinflow/codes/code.py says how a row of them lies in memory. `exponents` is NULL, or
// holds k + 127 for each element of `values`, 0 for those left out.
typedef struct tf_packing {
  void* packed;              // num_rows rows, one after the other: written by tf_encode, read by the others
  void* values;              // values_type: read by tf_encode, written by the others
  const void* base;          // base_type; NULL when base_type is TF_NONE
  float* error;              // NULL: what the codes do not say is dropped
  const uint8_t* exponents;  //
  int64_t num_rows;
  int64_t numel;  // of one row
  int32_t bits;   // 1, 4 or 8
  int32_t values_type, base_type;
  int32_t is_scaled;  // not 0: by 2^k; else exponents only say what is left out
  int32_t is_added;   // tf_decode: not 0 adds to what is there
  float factor;       // of values in tf_encode; tf_mean and tf_decode: of what is found
  float base_factor;
} tf_packing;

// All calls are thread safe, run on the library's own pool and return when the work is done.
TF_PUBLIC void tf_update(const tf_segment* segments, int64_t num_segments);
// sums[i] = sum of squares of tensor i in fp64, the same for any thread count and ISA; not finite
// if and only if the tensor holds a NaN or an infinity.
TF_PUBLIC void tf_sum_squares(const void* const* tensors, const int64_t* numels, const int32_t* dtypes,
                              int64_t num_tensors, double* sums);
TF_PUBLIC void tf_accumulate(float* into, const void* from, int32_t from_type, int64_t numel);
TF_PUBLIC void tf_cast(void* into, int32_t into_type, const void* from, int32_t from_type, int64_t numel);
// The split master: upper (bf16) and lower (int16) halves of fp32 values, and back.
TF_PUBLIC void tf_split(const float* values, uint16_t* upper, int16_t* lower, int64_t numel);
TF_PUBLIC void tf_join(const uint16_t* upper, const int16_t* lower, float* values, int64_t numel);
// Packs (base * base_factor + values * factor) * 2^k + error, and leaves in error what the codes do not say.
TF_PUBLIC void tf_encode(const tf_packing* packing);
// values = (the sum of all rows, in their order) * factor * 2^-k.
TF_PUBLIC void tf_mean(const tf_packing* packing);
// values = what the rows say, one after the other, * factor * 2^-k; or values + that.
TF_PUBLIC void tf_decode(const tf_packing* packing);
// For benchmarks: values[i] = values[i] * factor in place, the read-modify-write that is the memory's ceiling.
TF_PUBLIC void tf_scale_in_place(float* values, float factor, int64_t numel);

TF_PUBLIC void tf_set_threads(int32_t num_threads);
TF_PUBLIC int32_t tf_get_threads(void);
// Variants this CPU can run, best first, separated by spaces; the one in use; force one (0 on success).
TF_PUBLIC const char* tf_isa_available(void);
TF_PUBLIC const char* tf_isa(void);
TF_PUBLIC int32_t tf_set_isa(const char* name);
// Names of the update rules, separated by spaces, in the order of their codes: what tf_segment.rule counts.
TF_PUBLIC const char* tf_rules(void);
TF_PUBLIC int32_t tf_api_version(void);
TF_PUBLIC int64_t tf_segment_size(void);
TF_PUBLIC int64_t tf_packing_size(void);
// Ask for huge pages under a buffer that has not been touched yet; a hint, never an error.
TF_PUBLIC void tf_advise_huge(void* buffer, int64_t num_bytes);

#ifdef __cplusplus
}
#endif
