/* CUDA's runtime and libraries, as far as they must do something: memory is the host's, events are the host's clock, kernels do not run.
 *
 * What is not here does nothing and succeeds; build.py writes those functions. Result 0 is success everywhere. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <sys/mman.h>
#include "device.h"

#define OUT_OF_MEMORY 2
#define LARGE (1u << 28) /* copies beyond it would only take time */

/* the device */

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
int cudaDeviceGetAttribute(int *value, int asked, int device) { return attribute(value, asked); }
int cudaDeviceGetPCIBusId(char *id, int size, int device) { strncpy(id, "0000:01:00.0", size); return 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, NAME);
  for (int i = 0; i < 16; i++) found->uuid.bytes[i] = (char)(i + 1);
  found->totalGlobalMem = MEMORY;
  found->sharedMemPerBlock = SHARED_MEMORY;
  found->sharedMemPerBlockOptin = SHARED_MEMORY_OPT_IN;
  found->sharedMemPerMultiprocessor = SHARED_MEMORY_PER_PROCESSOR;
  found->regsPerBlock = found->regsPerMultiprocessor = REGISTERS;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->totalConstMem = 65536;
  found->major = 9;
  found->textureAlignment = 512;
  found->multiProcessorCount = PROCESSORS;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->l2CacheSize = L2_CACHE;
  found->memoryBusWidth = 5120;
  found->concurrentKernels = found->streamPrioritiesSupported = found->managedMemory = found->unifiedAddressing = 1;
  return 0;
}

/* streams and events */

static int capturing;
static void *graph;

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamCreate(void **stream) { *stream = malloc(8); return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = capturing; return 0; }

int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **captured, const void ***nodes,
                             const void **edges, size_t *count) {
  *status = capturing;
  if (id) *id = 7;
  if (captured) *captured = graph;
  if (count) *count = 0;
  return 0;
}

int cudaStreamBeginCapture(void *stream, int mode) { capturing = 1; graph = malloc(8); return 0; }
int cudaStreamEndCapture(void *stream, void **captured) { capturing = 0; *captured = graph; return 0; }
int cudaGraphInstantiateWithFlags(void **executable, void *captured, unsigned long long flags) { *executable = malloc(8); return 0; }
int cudaGraphGetNodes(void *captured, void **nodes, size_t *count) { *count = 1; return 0; }

int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = calloc(1, sizeof(double)); return 0; }
int cudaEventCreate(void **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventRecord(void *event, void *stream) { *(double *)event = seconds(); return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventDestroy(void *event) { free(event); return 0; }

int cudaEventElapsedTime(float *ms, void *from, void *to) {
  *ms = 1e3 * (*(double *)to - *(double *)from) + 0.002; /* a kernel takes time, and 0 ms would be no timing */
  return 0;
}

/* memory */

typedef struct block { void *start; size_t size; struct block *next; } block;
static block *blocks;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int cudaMalloc(void **start, size_t size) {
  pthread_mutex_lock(&lock);
  void *pages = MAP_FAILED;
  if (used + size <= MEMORY - CONTEXT)
    pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages != MAP_FAILED) {
    block *made = malloc(sizeof *made);
    *made = (block){pages, size, blocks};
    blocks = made;
    used += size;
    *start = pages;
  }
  pthread_mutex_unlock(&lock);
  return pages == MAP_FAILED ? OUT_OF_MEMORY : 0;
}

int cudaFree(void *start) {
  pthread_mutex_lock(&lock);
  for (block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == start) {
      block *freed = *at;
      *at = freed->next;
      used -= freed->size;
      munmap(freed->start, freed->size);
      free(freed);
      break;
    }
  pthread_mutex_unlock(&lock);
  return 0;
}

int cudaMemGetInfo(size_t *left, size_t *total) { *left = MEMORY - CONTEXT - used; *total = MEMORY; return 0; }
int cudaHostAlloc(void **start, size_t size, unsigned flags) { *start = malloc(size); return 0; }
int cudaFreeHost(void *start) { free(start); return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  if (size < LARGE) memcpy(to, from, size);
  return 0;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, 32);
  found->type = cudaMemoryTypeDevice;
  found->devicePointer = found->hostPointer = (void *)pointer;
  return 0;
}

/* kernels */

int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }

int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  memset(found, 0, 64);
  found->maxThreadsPerBlock = 1024;
  found->ptxVersion = found->binaryVersion = 90; /* by which CUB chooses its kernels */
  return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads, size_t memory, unsigned flags) {
  *count = 2;
  return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads, size_t memory) {
  *count = 2;
  return 0;
}

static int does_nothing(void) { return 0; }

int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long long flags, int *status) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY), *found = driver ? dlsym(driver, name) : NULL;
  *entry = found ? found : (void *)does_nothing;
  if (status) *status = 0;
  return 0;
}

/* libraries: handles that can be freed, and answers that are read */

#define HANDLE(name) int name(void **made) { *made = calloc(1, 512); return 0; }
HANDLE(cublasCreate_v2)
HANDLE(cublasLtMatmulPreferenceCreate)
HANDLE(cudnnCreate)
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = calloc(1, 512); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) { *made = calloc(1, 512); return 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int asked,
                                   void *results, int *found) {
  memset(results, 0, 64);
  *found = 1;
  return 0;
}

size_t cublasLtGetVersion(void) { return 130100; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }

int ncclGetUniqueId(void *id) { memset(id, 1, 128); return 0; }
int ncclCommInitRank(void **made, int ranks, ...) { *made = malloc(64); return 0; }
int ncclCommInitRankConfig(void **made, int ranks, ...) { *made = malloc(64); return 0; }
int ncclCommInitRankScalable(void **made, int ranks, ...) { *made = malloc(64); return 0; }
int ncclCommGetAsyncError(void *communicator, int *error) { *error = 0; return 0; }
int ncclCommCount(void *communicator, int *count) { *count = 1; return 0; }
int ncclCommUserRank(void *communicator, int *rank) { *rank = 0; return 0; }
