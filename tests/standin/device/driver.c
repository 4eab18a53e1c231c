// The driver of the same device: what Triton and Inductor ask for before they compile and launch. `fake_triton` counts
// their launches.
#include <string.h>
#include <stdlib.h>
#define F(n) int n(){return 0;}
int cuDevicePrimaryCtxGetState(int d,unsigned*f,int*a){*f=0;*a=1;return 0;}
int cuGetErrorString(int e,const char**s){*s="fake";return 0;}
int cuGetErrorName(int e,const char**s){*s="fake";return 0;}
int cuInit(unsigned f){return 0;}
int cuDriverGetVersion(int*v){*v=13000;return 0;}
int cuDeviceGetCount(int*n){*n=1;return 0;}
int cuDeviceGet(int*d,int o){*d=0;return 0;}
int cuCtxGetCurrent(void**c){*c=(void*)16;return 0;}
int cuDevicePrimaryCtxRetain(void**c,int d){*c=(void*)16;return 0;}
int cuDeviceGetAttribute(int*v,int a,int d){switch(a){case 75:*v=9;break;case 76:*v=0;break;case 16:*v=132;break;case 97:*v=232448;break;case 10:*v=32;break;default:*v=1;}return 0;}
int cuPointerGetAttribute(void*v,int a,unsigned long long p){*(unsigned long long*)v=p;return 0;}
int cuModuleLoadData(void**m,const void*i){*m=malloc(8);return 0;}
int cuModuleLoadDataEx(void**m,const void*i){*m=malloc(8);return 0;}
int cuModuleLoad(void**m,const char*i){*m=malloc(8);return 0;}
int cuModuleGetFunction(void**f,void*m,const char*n){*f=malloc(8);return 0;}
int cuFuncGetAttribute(int*v,int a,void*f){*v=(a==0)?1024:(a==4?32:0);return 0;}
F(cuCtxSetCurrent) F(cuFuncSetAttribute) F(cuFuncSetCacheConfig)   F(cuLinkAddData_v2) F(cuLinkComplete) F(cuLinkCreate_v2) F(cuModuleUnload) F(cuOccupancyMaxActiveBlocksPerMultiprocessor) F(cuTensorMapEncodeTiled) F(cuOccupancyMaxActiveClusters) F(cuStreamGetCtx)
F(cuCtxSetLimit) F(cuCtxGetLimit) F(cuCtxGetDevice) F(cuCtxPushCurrent_v2) F(cuCtxPopCurrent_v2) F(cuMemcpyHtoD_v2) F(cuMemcpyDtoH_v2) F(cuStreamSynchronize)
int cuMemAlloc_v2(unsigned long long*p,unsigned long n){*p=(unsigned long long)malloc(n);return 0;}
F(cuMemFree_v2)
int fake_triton=0;
#define G(n) int n(){__atomic_add_fetch(&fake_triton,1,__ATOMIC_RELAXED);return 0;}
G(cuLaunchKernel) G(cuLaunchKernelEx) G(cuLaunchCooperativeKernel)
