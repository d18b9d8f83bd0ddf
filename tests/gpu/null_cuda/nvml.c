/* libnvidia-ml.so.1: one H100 that takes 300 W, whatever it does. */
#include "device.h"

#define WATTS 300.0
#define NOT_SUPPORTED 3

static char gpu[8];

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == NOT_SUPPORTED ? "Not Supported" : "Success"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.159.04", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **found) { *found = gpu; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) { *found = gpu; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **found) { *found = gpu; return 0; }
int nvmlDeviceGetUUID(void *of, char *text, unsigned size) { strncpy(text, UUID, size); return 0; }
int nvmlDeviceGetName(void *of, char *text, unsigned size) { strncpy(text, NAME, size); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *of, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *of, unsigned long long *mj) { *mj = seconds() * WATTS * 1e3; return 0; }
int nvmlDeviceGetPowerUsage(void *of, unsigned *mw) { *mw = WATTS * 1e3; return 0; }
int nvmlDeviceGetFieldValues(void *of, int count, void *values) { return NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(void *of, int clock, unsigned *mhz) { *mhz = 1980; return 0; }
int nvmlDeviceGetTemperature(void *of, int sensor, unsigned *celsius) { *celsius = 40; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *of, unsigned long long *reasons) { *reasons = 0; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *of, unsigned long long *reasons) { *reasons = 0; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *of, unsigned *mw) { *mw = 700000; return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *of, unsigned *mw) { *mw = 700000; return 0; }
int nvmlDeviceGetUtilizationRates(void *of, unsigned *percent) { percent[0] = percent[1] = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *of, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *of, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
