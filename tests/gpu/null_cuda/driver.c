/* libcuda.so.1, as Triton and torch's compiler call it: it loads modules and launches nothing. */
#include "device.h"

static char handle[8];

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int asked, int device) { return attribute(value, asked); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = handle; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "the stand-in has no errors"; return 0; }

int cuCtxGetCurrent(void **context) { *context = handle; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 1048576; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }

int cuModuleLoad(void **module, const char *file) { *module = handle; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = handle; return 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) { *module = handle; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = handle; return 0; }
int cuLinkCreate_v2() { return 0; }
int cuLinkAddData_v2() { return 0; }
int cuLinkComplete() { return 0; }

int cuFuncGetAttribute(int *value, int asked, void *function) {
  *value = asked == 0 ? 1024 : asked == 4 ? 64 : 0; /* threads per block, registers */
  return 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { *count = 1; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int threads, size_t memory) { *count = 2; return 0; }
int cuLaunchKernel() { return 0; }
int cuLaunchKernelEx() { return 0; }
int cuLaunchCooperativeKernel() { return 0; }
int cuTensorMapEncodeTiled() { return 0; }
int cuStreamGetCaptureInfo_v2() { return 0; }

int cuPointerGetAttribute(void *value, int asked, unsigned long long pointer) {
  if (asked == 3) *(void **)value = (void *)pointer; /* its address on the device */
  else *(int *)value = 2;                            /* memory of a device */
  return 0;
}

int cuMemGetAddressRange_v2(void **start, size_t *size, unsigned long long pointer) { *start = (void *)pointer; *size = 0; return 0; }
