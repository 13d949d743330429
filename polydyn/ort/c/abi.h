/* abi.h: the part of ONNX Runtime's C interface that the provider uses (docs/adr/0039-onnx-runtime.md).
 *
 * ONNX Runtime passes tables of functions. A table grows only at its end, so a position names the same function in
 * every version since the function was added. The names are those of onnxruntime_c_api.h and onnxruntime_ep_c_api.h;
 * tests/ort/test_ort_abi.py compares positions and names with a header. No foreign header is included.
 */
#ifndef POLYDYN_ORT_ABI_H
#define POLYDYN_ORT_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ORT_API 23 /* version of the tables that the provider requests and fills: ONNX Runtime 1.23 */

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_EP_FAIL = 11 };            /* OrtErrorCode */
enum { LOG_VERBOSE, LOG_INFO, LOG_WARNING, LOG_ERROR, LOG_FATAL };            /* OrtLoggingLevel */
enum { DEVICE_CPU = 0 };                                                      /* OrtHardwareDeviceType */
enum { ATTR_INT = 1, ATTR_INTS, ATTR_FLOAT, ATTR_FLOATS, ATTR_STRING, ATTR_STRINGS, ATTR_GRAPH, ATTR_TENSOR };
enum { TYPE_STRING = 8 };                                                     /* ONNXTensorElementDataType */
enum { COMPILED_OPTIMAL = 1, COMPILED_UNSUPPORTED = 3 };                      /* OrtCompiledModelCompatibility */

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;
typedef struct OrtTypeInfo OrtTypeInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorInfo;
typedef struct OrtGraph OrtGraph;
typedef struct OrtNode OrtNode;
typedef struct OrtValueInfo OrtValueInfo;
typedef struct OrtOpAttr OrtOpAttr;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtHardwareDevice OrtHardwareDevice;
typedef struct OrtEpDevice OrtEpDevice;
typedef struct OrtKeyValuePairs OrtKeyValuePairs;
typedef struct OrtLogger OrtLogger;
typedef struct OrtEpGraphSupportInfo OrtEpGraphSupportInfo;
typedef struct OrtNodeComputeContext OrtNodeComputeContext;

typedef void (*any_function)(void);

typedef struct {
    const any_function *(*get_api)(uint32_t version);
    const char *(*version_string)(void);
} OrtApiBase;

/* Functions of OrtApi: X(position, name, result, arguments). */
#define ORT_API_FUNCTIONS(X)                                                                                           \
    X(0, CreateStatus, OrtStatus *, (int code, const char *text))                                                      \
    X(1, GetErrorCode, int, (const OrtStatus *))                                                                       \
    X(2, GetErrorMessage, const char *, (const OrtStatus *))                                                           \
    X(3, CreateEnv, OrtStatus *, (int level, const char *name, OrtEnv **))                                             \
    X(7, CreateSession, OrtStatus *, (const OrtEnv *, const char *path, const OrtSessionOptions *, OrtSession **))     \
    X(9, Run, OrtStatus *, (OrtSession *, const OrtRunOptions *, const char *const *, const OrtValue *const *, size_t, \
                            const char *const *, size_t, OrtValue **))                                                 \
    X(10, CreateSessionOptions, OrtStatus *, (OrtSessionOptions **))                                                   \
    X(22, SetSessionLogSeverityLevel, OrtStatus *, (OrtSessionOptions *, int))                                         \
    X(24, SetIntraOpNumThreads, OrtStatus *, (OrtSessionOptions *, int))                                               \
    X(51, GetTensorMutableData, OrtStatus *, (OrtValue *, void **))                                                    \
    X(53, GetStringTensorDataLength, OrtStatus *, (const OrtValue *, size_t *))                                        \
    X(54, GetStringTensorContent, OrtStatus *, (const OrtValue *, void *, size_t, size_t *offsets, size_t count))      \
    X(55, CastTypeInfoToTensorInfo, OrtStatus *, (const OrtTypeInfo *, const OrtTensorInfo **))                        \
    X(60, GetTensorElementType, OrtStatus *, (const OrtTensorInfo *, int *))                                           \
    X(61, GetDimensionsCount, OrtStatus *, (const OrtTensorInfo *, size_t *))                                          \
    X(62, GetDimensions, OrtStatus *, (const OrtTensorInfo *, int64_t *, size_t))                                      \
    X(63, GetSymbolicDimensions, OrtStatus *, (const OrtTensorInfo *, const char **, size_t))                          \
    X(65, GetTensorTypeAndShape, OrtStatus *, (const OrtValue *, OrtTensorInfo **))                                    \
    X(90, KernelContext_GetInput, OrtStatus *, (const OrtKernelContext *, size_t, const OrtValue **))                  \
    X(91, KernelContext_GetOutput, OrtStatus *, (OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **))    \
    X(92, ReleaseEnv, void, (OrtEnv *))                                                                                \
    X(93, ReleaseStatus, void, (OrtStatus *))                                                                          \
    X(95, ReleaseSession, void, (OrtSession *))                                                                        \
    X(96, ReleaseValue, void, (OrtValue *))                                                                            \
    X(99, ReleaseTensorTypeAndShapeInfo, void, (OrtTensorInfo *))                                                      \
    X(100, ReleaseSessionOptions, void, (OrtSessionOptions *))                                                         \
    X(130, AddSessionConfigEntry, OrtStatus *, (OrtSessionOptions *, const char *, const char *))                      \
    X(211, CreateOpAttr, OrtStatus *, (const char *name, const void *, int length, int type, OrtOpAttr **))            \
    X(212, ReleaseOpAttr, void, (OrtOpAttr *))                                                                         \
    X(247, Logger_LogMessage, OrtStatus *,                                                                             \
      (const OrtLogger *, int level, const char *text, const char *file, int line, const char *function))              \
    X(272, ReadOpAttr, OrtStatus *, (const OrtOpAttr *, int type, void *, size_t, size_t *))                           \
    X(289, GetValueInfoName, OrtStatus *, (const OrtValueInfo *, const char **))                                       \
    X(290, GetValueInfoTypeInfo, OrtStatus *, (const OrtValueInfo *, const OrtTypeInfo **))                            \
    X(291, GetModelEditorApi, const any_function *, (void))                                                            \
    X(298, GetKeyValuePairs, void,                                                                                     \
      (const OrtKeyValuePairs *, const char *const **, const char *const **, size_t *))                                \
    X(300, ReleaseKeyValuePairs, void, (OrtKeyValuePairs *))                                                           \
    X(303, GetEpDevices, OrtStatus *, (const OrtEnv *, const OrtEpDevice *const **, size_t *))                         \
    X(304, SessionOptionsAppendExecutionProvider_V2, OrtStatus *,                                                      \
      (OrtSessionOptions *, OrtEnv *, const OrtEpDevice *const *, size_t, const char *const *, const char *const *,    \
       size_t))                                                                                                        \
    X(307, HardwareDevice_Type, int, (const OrtHardwareDevice *))                                                      \
    X(312, EpDevice_EpName, const char *, (const OrtEpDevice *))                                                       \
    X(317, GetEpApi, const any_function *, (void))                                                                     \
    X(318, GetTensorSizeInBytes, OrtStatus *, (const OrtValue *, size_t *))                                            \
    X(326, ValueInfo_GetInitializerValue, OrtStatus *, (const OrtValueInfo *, const OrtValue **))                      \
    X(331, ValueInfo_IsConstantInitializer, OrtStatus *, (const OrtValueInfo *, bool *))                               \
    X(334, Graph_GetModelPath, OrtStatus *, (const OrtGraph *, const char **))                                         \
    X(335, Graph_GetOnnxIRVersion, OrtStatus *, (const OrtGraph *, int64_t *))                                         \
    X(336, Graph_GetNumOperatorSets, OrtStatus *, (const OrtGraph *, size_t *))                                        \
    X(337, Graph_GetOperatorSets, OrtStatus *, (const OrtGraph *, const char **, int64_t *, size_t))                   \
    X(338, Graph_GetNumInputs, OrtStatus *, (const OrtGraph *, size_t *))                                              \
    X(339, Graph_GetInputs, OrtStatus *, (const OrtGraph *, const OrtValueInfo **, size_t))                            \
    X(340, Graph_GetNumOutputs, OrtStatus *, (const OrtGraph *, size_t *))                                             \
    X(341, Graph_GetOutputs, OrtStatus *, (const OrtGraph *, const OrtValueInfo **, size_t))                           \
    X(342, Graph_GetNumInitializers, OrtStatus *, (const OrtGraph *, size_t *))                                        \
    X(343, Graph_GetInitializers, OrtStatus *, (const OrtGraph *, const OrtValueInfo **, size_t))                      \
    X(344, Graph_GetNumNodes, OrtStatus *, (const OrtGraph *, size_t *))                                               \
    X(345, Graph_GetNodes, OrtStatus *, (const OrtGraph *, const OrtNode **, size_t))                                  \
    X(346, Graph_GetParentNode, OrtStatus *, (const OrtGraph *, const OrtNode **))                                     \
    X(349, Node_GetName, OrtStatus *, (const OrtNode *, const char **))                                                \
    X(350, Node_GetOperatorType, OrtStatus *, (const OrtNode *, const char **))                                        \
    X(351, Node_GetDomain, OrtStatus *, (const OrtNode *, const char **))                                              \
    X(353, Node_GetNumInputs, OrtStatus *, (const OrtNode *, size_t *))                                                \
    X(354, Node_GetInputs, OrtStatus *, (const OrtNode *, const OrtValueInfo **, size_t))                              \
    X(355, Node_GetNumOutputs, OrtStatus *, (const OrtNode *, size_t *))                                               \
    X(356, Node_GetOutputs, OrtStatus *, (const OrtNode *, const OrtValueInfo **, size_t))                             \
    X(357, Node_GetNumImplicitInputs, OrtStatus *, (const OrtNode *, size_t *))                                        \
    X(358, Node_GetImplicitInputs, OrtStatus *, (const OrtNode *, const OrtValueInfo **, size_t))                      \
    X(359, Node_GetNumAttributes, OrtStatus *, (const OrtNode *, size_t *))                                            \
    X(360, Node_GetAttributes, OrtStatus *, (const OrtNode *, const OrtOpAttr **, size_t))                             \
    X(361, Node_GetAttributeByName, OrtStatus *, (const OrtNode *, const char *, const OrtOpAttr **))                  \
    X(362, OpAttr_GetTensorAttributeAsOrtValue, OrtStatus *, (const OrtOpAttr *, OrtValue **))                         \
    X(363, OpAttr_GetType, OrtStatus *, (const OrtOpAttr *, int *))                                                    \
    X(364, OpAttr_GetName, OrtStatus *, (const OrtOpAttr *, const char **))                                            \
    X(365, Node_GetNumSubgraphs, OrtStatus *, (const OrtNode *, size_t *))                                             \
    X(366, Node_GetSubgraphs, OrtStatus *, (const OrtNode *, const OrtGraph **, size_t, const char **))                \
    X(378, GetTensorData, OrtStatus *, (const OrtValue *, const void **))                                              \
    X(379, GetSessionOptionsConfigEntries, OrtStatus *, (const OrtSessionOptions *, OrtKeyValuePairs **))              \
    X(390, TensorTypeAndShape_HasShape, bool, (const OrtTensorInfo *))                     /* since 1.24 */            \
    X(414, GetTensorElementTypeAndShapeDataReference, OrtStatus *,                         /* since 1.24 */            \
      (const OrtValue *, int *, const int64_t **, size_t *))

#define ORT_DECLARE(position, name, result, arguments)                                                                 \
    typedef result(*Fn##name) arguments;                                                                               \
    enum { At##name = position };
ORT_API_FUNCTIONS(ORT_DECLARE)
#undef ORT_DECLARE

extern const any_function *ort_api;
extern int ort_minor; /* minor version of the running ONNX Runtime: 32 for 1.32.0 */
#define ORT(name) ((Fn##name)ort_api[At##name])

/* Functions of OrtEpApi, by position. */
typedef struct OrtEpFactory OrtEpFactory;
typedef struct {
    uint32_t ort_version_supported;
    bool drop_constant_initializers;
} OrtNodeFusionOptions;
#define EP_API_FUNCTIONS(X)                                                                                            \
    X(0, CreateEpDevice, OrtStatus *, (OrtEpFactory *, const OrtHardwareDevice *, const OrtKeyValuePairs *,            \
                                       const OrtKeyValuePairs *, OrtEpDevice **))                                      \
    X(2, EpGraphSupportInfo_AddNodesToFuse, OrtStatus *,                                                               \
      (OrtEpGraphSupportInfo *, const OrtNode *const *, size_t, const OrtNodeFusionOptions *))
#define ORT_DECLARE(position, name, result, arguments)                                                                 \
    typedef result(*Fn##name) arguments;                                                                               \
    enum { At##name = position };
EP_API_FUNCTIONS(ORT_DECLARE)

/* Functions of OrtModelEditorApi, by position. */
#define EDITOR_API_FUNCTIONS(X)                                                                                        \
    X(6, CreateNode, OrtStatus *, (const char *type, const char *domain, const char *name, const char *const *,        \
                                   size_t, const char *const *, size_t, OrtOpAttr **, size_t, OrtNode **))
EDITOR_API_FUNCTIONS(ORT_DECLARE)
#undef ORT_DECLARE

/* Structures that the provider fills. `ort_version_supported` tells ONNX Runtime which members exist. */
typedef struct OrtNodeComputeInfo OrtNodeComputeInfo;
struct OrtNodeComputeInfo {
    uint32_t ort_version_supported;
    OrtStatus *(*CreateState)(OrtNodeComputeInfo *, OrtNodeComputeContext *, void **);
    OrtStatus *(*Compute)(OrtNodeComputeInfo *, void *, OrtKernelContext *);
    void (*ReleaseState)(OrtNodeComputeInfo *, void *);
};

typedef struct OrtEp OrtEp;
struct OrtEp {
    uint32_t ort_version_supported;
    const char *(*GetName)(const OrtEp *);
    OrtStatus *(*GetCapability)(OrtEp *, const OrtGraph *, OrtEpGraphSupportInfo *);
    OrtStatus *(*Compile)(OrtEp *, const OrtGraph **, const OrtNode **, size_t, OrtNodeComputeInfo **, OrtNode **);
    void (*ReleaseNodeComputeInfos)(OrtEp *, OrtNodeComputeInfo **, size_t);
    any_function GetPreferredDataLayout, ShouldConvertDataLayoutForOp, SetDynamicOptions, OnRunStart, OnRunEnd,
        CreateAllocator, CreateSyncStreamForDevice;
    const char *(*GetCompiledModelCompatibilityInfo)(OrtEp *, const OrtGraph *);
};

struct OrtEpFactory {
    uint32_t ort_version_supported;
    const char *(*GetName)(const OrtEpFactory *);
    const char *(*GetVendor)(const OrtEpFactory *);
    OrtStatus *(*GetSupportedDevices)(OrtEpFactory *, const OrtHardwareDevice *const *, size_t, OrtEpDevice **, size_t,
                                      size_t *);
    OrtStatus *(*CreateEp)(OrtEpFactory *, const OrtHardwareDevice *const *, const OrtKeyValuePairs *const *, size_t,
                           const OrtSessionOptions *, const OrtLogger *, OrtEp **);
    void (*ReleaseEp)(OrtEpFactory *, OrtEp *);
    uint32_t (*GetVendorId)(const OrtEpFactory *);
    const char *(*GetVersion)(const OrtEpFactory *);
    OrtStatus *(*ValidateCompiledModelCompatibilityInfo)(OrtEpFactory *, const OrtHardwareDevice *const *, size_t,
                                                         const char *, int *);
    OrtStatus *(*CreateAllocator)(OrtEpFactory *, const void *, const OrtKeyValuePairs *, void **);
    void (*ReleaseAllocator)(OrtEpFactory *, void *);
    OrtStatus *(*CreateDataTransfer)(OrtEpFactory *, void **);
    bool (*IsStreamAware)(const OrtEpFactory *);
    OrtStatus *(*CreateSyncStreamForDevice)(OrtEpFactory *, const void *, const OrtKeyValuePairs *, void **);
};

#endif
