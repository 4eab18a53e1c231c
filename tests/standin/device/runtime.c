// A CUDA device that computes nothing: the runtime and cuBLAS. Memory is the host's, and kernels do not run.
// `fake_launches` and `fake_syncs` count launches and waits of the host.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <malloc.h>
#include "cuda_runtime_api.h"
#define OK cudaSuccess
cudaError_t cudaGetDeviceCount(int *n){*n=1;return OK;}
static int current=0;
cudaError_t cudaGetDevice(int *d){*d=0;return OK;}
cudaError_t cudaSetDevice(int d){current=d;return OK;}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p,int d){
 memset(p,0,sizeof *p); strcpy(p->name,"NVIDIA H200"); p->major=9;p->minor=0;p->totalGlobalMem=139ull<<30;p->multiProcessorCount=132;
 p->warpSize=32;p->maxThreadsPerBlock=1024;p->maxThreadsPerMultiProcessor=2048;p->regsPerBlock=65536;p->regsPerMultiprocessor=65536;
 p->sharedMemPerBlock=49152;p->sharedMemPerBlockOptin=232448;p->sharedMemPerMultiprocessor=233472;p->l2CacheSize=62914560;
 p->maxThreadsDim[0]=1024;p->maxThreadsDim[1]=1024;p->maxThreadsDim[2]=64;p->maxGridSize[0]=2147483647;p->maxGridSize[1]=65535;p->maxGridSize[2]=65535;
 p->unifiedAddressing=1;p->concurrentKernels=1;p->pciBusID=1;return OK;}
cudaError_t cudaDeviceGetAttribute(int *v,enum cudaDeviceAttr a,int d){
 switch(a){case cudaDevAttrComputeCapabilityMajor:*v=9;break;case cudaDevAttrComputeCapabilityMinor:*v=0;break;case cudaDevAttrMultiProcessorCount:*v=132;break;
 case cudaDevAttrMaxSharedMemoryPerBlockOptin:*v=232448;break;case cudaDevAttrWarpSize:*v=32;break;case cudaDevAttrMaxThreadsPerMultiProcessor:*v=2048;break;default:*v=1;}return OK;}
cudaError_t cudaDeviceGetPCIBusId(char*s,int n,int d){strncpy(s,"0000:01:00.0",n);return OK;}
cudaError_t cudaDriverGetVersion(int *v){*v=13000;return OK;}
cudaError_t cudaRuntimeGetVersion(int *v){*v=13000;return OK;}
cudaError_t cudaDeviceCanAccessPeer(int*v,int a,int b){*v=0;return OK;}
cudaError_t cudaDeviceGetStreamPriorityRange(int*a,int*b){*a=0;*b=-5;return OK;}
cudaError_t cudaMemGetInfo(size_t*f,size_t*t){*f=130ull<<30;*t=139ull<<30;return OK;}
cudaError_t cudaGetLastError(void){return OK;}
cudaError_t cudaPeekAtLastError(void){return OK;}
cudaError_t cudaDeviceSynchronize(void){return OK;}
cudaError_t cudaMalloc(void**p,size_t n){*p=NULL;if(posix_memalign(p,512,n?n:512))return cudaErrorMemoryAllocation;memset(*p,0,n);return OK;}
cudaError_t cudaFree(void*p){free(p);return OK;}
cudaError_t cudaHostAlloc(void**p,size_t n,unsigned f){return cudaMalloc(p,n);}
cudaError_t cudaFreeHost(void*p){free(p);return OK;}
cudaError_t cudaHostRegister(void*p,size_t n,unsigned f){return OK;}
cudaError_t cudaHostUnregister(void*p){return OK;}
cudaError_t cudaMemcpy(void*d,const void*s,size_t n,enum cudaMemcpyKind k){memcpy(d,s,n);return OK;}
cudaError_t cudaMemcpyAsync(void*d,const void*s,size_t n,enum cudaMemcpyKind k,cudaStream_t st){memcpy(d,s,n);return OK;}
cudaError_t cudaMemset(void*d,int v,size_t n){memset(d,v,n);return OK;}
cudaError_t cudaMemsetAsync(void*d,int v,size_t n,cudaStream_t s){memset(d,v,n);return OK;}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t*s,unsigned f,int p){static long k=16;*s=(cudaStream_t)(k+=16);return OK;}
cudaError_t cudaStreamDestroy(cudaStream_t s){return OK;}
cudaError_t cudaStreamQuery(cudaStream_t s){return OK;}
int fake_syncs=0;
cudaError_t cudaStreamSynchronize(cudaStream_t s){__atomic_add_fetch(&fake_syncs,1,__ATOMIC_RELAXED);return OK;}
cudaError_t cudaStreamWaitEvent(cudaStream_t s,cudaEvent_t e,unsigned f){return OK;}
static int captured=0; static cudaStream_t capturing=NULL;
#define STATUS(s) (captured&&capturing==(s)?cudaStreamCaptureStatusActive:cudaStreamCaptureStatusNone)
cudaError_t cudaStreamBeginCapture(cudaStream_t s,enum cudaStreamCaptureMode m){captured++;capturing=s;return OK;}
cudaError_t cudaStreamEndCapture(cudaStream_t s,cudaGraph_t*g){capturing=(cudaStream_t)-1;*g=(cudaGraph_t)16;return OK;}
cudaError_t cudaStreamIsCapturing(cudaStream_t s,enum cudaStreamCaptureStatus*c){*c=STATUS(s);return OK;}
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s,enum cudaStreamCaptureStatus*c,unsigned long long*id,cudaGraph_t*g,const cudaGraphNode_t**d,const cudaGraphEdgeData**e,size_t*n){*c=STATUS(s);if(id)*id=captured;if(n)*n=0;return OK;}
cudaError_t cudaGraphGetNodes(cudaGraph_t g,cudaGraphNode_t*n,size_t*k){*k=1;return OK;}
#undef cudaGraphInstantiate
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*e,cudaGraph_t g,unsigned long long f){*e=(cudaGraphExec_t)16;return OK;}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t*e,cudaGraph_t g,unsigned long long f){*e=(cudaGraphExec_t)16;return OK;}
cudaError_t cudaGraphDestroy(cudaGraph_t g){return OK;}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e){return OK;}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode*m){return OK;}
cudaError_t cudaEventCreate(cudaEvent_t*e){static long k=16;*e=(cudaEvent_t)(k+=16);return OK;}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*e,unsigned f){return cudaEventCreate(e);}
cudaError_t cudaEventDestroy(cudaEvent_t e){return OK;}
cudaError_t cudaEventQuery(cudaEvent_t e){return OK;}
cudaError_t cudaEventRecord(cudaEvent_t e,cudaStream_t s){return OK;}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e,cudaStream_t s,unsigned f){return OK;}
cudaError_t cudaEventSynchronize(cudaEvent_t e){return OK;}
cudaError_t cudaEventElapsedTime(float*t,cudaEvent_t a,cudaEvent_t b){*t=1;return OK;}
int fake_launches=0;
cudaError_t cudaGraphLaunch(cudaGraphExec_t e,cudaStream_t s){__atomic_add_fetch(&fake_launches,1,__ATOMIC_RELAXED);return OK;}
cudaError_t cudaLaunchKernel(const void*f,dim3 g,dim3 b,void**a,size_t m,cudaStream_t s){__atomic_add_fetch(&fake_launches,1,__ATOMIC_RELAXED);return OK;}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*c,const void*f,void**a){__atomic_add_fetch(&fake_launches,1,__ATOMIC_RELAXED);return OK;}
cudaError_t __cudaLaunchKernel(cudaKernel_t f,dim3 g,dim3 b,void**a,size_t m,cudaStream_t s){__atomic_add_fetch(&fake_launches,1,__ATOMIC_RELAXED);return OK;}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t f,dim3 g,dim3 b,void**a,size_t m,cudaStream_t s){__atomic_add_fetch(&fake_launches,1,__ATOMIC_RELAXED);return OK;}
cudaError_t __cudaGetKernel(cudaKernel_t*k,const void*f){*k=(cudaKernel_t)f;return OK;}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes*a,const void*f){memset(a,0,sizeof *a);a->maxThreadsPerBlock=1024;a->binaryVersion=90;a->ptxVersion=90;a->numRegs=32;return OK;}
cudaError_t cudaFuncSetAttribute(const void*f,enum cudaFuncAttribute a,int v){return OK;}
cudaError_t cudaGetSymbolAddress(void**p,const void*s){*p=(void*)s;return OK;}
cudaError_t cudaMemcpyToSymbol(const void*s,const void*src,size_t n,size_t o,enum cudaMemcpyKind k){return OK;}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*n,const void*f,int b,size_t m,unsigned fl){*n=2;return OK;}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes*a,const void*p){memset(a,0,sizeof *a);a->type=cudaMemoryTypeDevice;a->devicePointer=(void*)p;return OK;}
// cuBLAS
typedef int st;
st cublasCreate_v2(void**h){*h=malloc(64);return 0;}
st cublasDestroy_v2(void*h){return 0;}
st cublasSetStream_v2(void*h,void*s){return 0;}
st cublasSetWorkspace_v2(void*h,void*w,size_t n){return 0;}
st cublasSetMathMode(void*h,int m){return 0;}
st cublasGetMathMode(void*h,int*m){*m=0;return 0;}
st cublasGetPointerMode_v2(void*h,int*m){*m=0;return 0;}
st cublasSetPointerMode_v2(void*h,int m){return 0;}
#define G(n) st n(){__atomic_add_fetch(&fake_launches,1,__ATOMIC_RELAXED);return 0;}
G(cublasSgemm_v2) G(cublasDgemm_v2) G(cublasGemmEx) G(cublasGemmStridedBatchedEx) G(cublasSgemmStridedBatched) G(cublasDgemmStridedBatched) G(cublasSgemv_v2) G(cublasDotEx) G(cublasSdot_v2) G(cublasSgemmEx)
st cublasLtCreate(void**h){*h=malloc(64);return 0;}
st cublasLtMatmulDescCreate(void**d,int a,int b){*d=malloc(256);return 0;}
st cublasLtMatmulDescDestroy(void*d){return 0;}
st cublasLtMatmulDescSetAttribute(){return 0;}
st cublasLtMatrixLayoutCreate(void**d){*d=malloc(256);return 0;}
st cublasLtMatrixLayoutDestroy(void*d){return 0;}
st cublasLtMatrixLayoutSetAttribute(){return 0;}
st cublasLtMatmulPreferenceCreate(void**d){*d=malloc(256);return 0;}
st cublasLtMatmulPreferenceDestroy(void*d){return 0;}
st cublasLtMatmulPreferenceSetAttribute(){return 0;}
st cublasLtMatmulAlgoGetHeuristic(void*h,void*d,void*a,void*b,void*c,void*dd,void*p,int req,void*res,int*n){memset(res,0,req*96);*n=1;return 0;}
G(cublasLtMatmul)
