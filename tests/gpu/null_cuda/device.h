/* The GPU that the stand-in pretends to be: an H100 with 80 GB. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NAME "NVIDIA H100 80GB HBM3"
#define UUID "GPU-01020304-0506-0708-090a-0b0c0d0e0f10" /* the bytes 1 to 16, as torch spells them */
#define MEMORY 85017493504ull
#define CONTEXT 600000000ull /* what a CUDA context takes */
#define L2_CACHE 52428800
#define PROCESSORS 132
#define SHARED_MEMORY 49152
#define SHARED_MEMORY_OPT_IN 232448
#define SHARED_MEMORY_PER_PROCESSOR 233472
#define REGISTERS 65536
#define CUDA_VERSION 13000

static inline double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec / 1e9;
}

/* cudaDeviceAttr and CUdevice_attribute have the same numbers. */
static inline int attribute(int *value, int asked) {
  switch (asked) {
    case 1: case 2: case 3: *value = 1024; break;         /* threads per block, along x and y */
    case 4: *value = 64; break;                           /* and along z */
    case 5: *value = 2147483647; break;                   /* blocks per grid, along x */
    case 6: case 7: *value = 65535; break;                /* and along y and z */
    case 8: *value = SHARED_MEMORY; break;
    case 10: *value = 32; break;                          /* threads per warp */
    case 12: case 82: *value = REGISTERS; break;
    case 13: *value = 1980000; break;                     /* clock, kHz */
    case 16: *value = PROCESSORS; break;
    case 36: *value = 2619000; break;                     /* memory clock, kHz */
    case 37: *value = 5120; break;                        /* memory bus, bits */
    case 38: *value = L2_CACHE; break;
    case 39: *value = 2048; break;                        /* threads per processor */
    case 75: *value = 9; break;                           /* compute capability 9.0 */
    case 76: *value = 0; break;
    case 81: *value = SHARED_MEMORY_PER_PROCESSOR; break;
    case 97: *value = SHARED_MEMORY_OPT_IN; break;
    default: *value = 0;
  }
  return 0;
}
