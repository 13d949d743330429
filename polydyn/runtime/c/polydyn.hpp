// polydyn.hpp: compiled programs from C++17, on top of the C interface of polydyn.h. Header only; link with -ldl.
//
//     polydyn::Program program("libbert.so", "bert.polydyn");   // the library, and the artifact with the weights
//     polydyn::Context context(program, 2);                     // threads
//     std::vector<polydyn::Tensor> out = context.run({{ids.data(), {4, 61}}, {mask.data(), {4, 61}}});
//
// Each program is loaded with dlopen, so a process may have many. A program may be used by many threads; a context
// serves one call at a time. All failures throw polydyn::Error with the text of pd_error().
#ifndef POLYDYN_HPP
#define POLYDYN_HPP

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "polydyn.h"

namespace polydyn {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The element type for a C++ type. 16-bit floats have none: pass their PD_<dtype>.
template <class T> constexpr int32_t dtype_of() {
    if constexpr (std::is_same_v<T, float>) return PD_FLOAT32;
    else if constexpr (std::is_same_v<T, double>) return PD_FLOAT64;
    else if constexpr (std::is_same_v<T, int8_t>) return PD_INT8;
    else if constexpr (std::is_same_v<T, int16_t>) return PD_INT16;
    else if constexpr (std::is_same_v<T, int32_t>) return PD_INT32;
    else if constexpr (std::is_same_v<T, int64_t>) return PD_INT64;
    else if constexpr (std::is_same_v<T, uint8_t>) return PD_UINT8;
    else if constexpr (std::is_same_v<T, uint16_t>) return PD_UINT16;
    else if constexpr (std::is_same_v<T, uint32_t>) return PD_UINT32;
    else if constexpr (std::is_same_v<T, uint64_t>) return PD_UINT64;
    else {
        static_assert(std::is_same_v<T, bool>, "no element type of polydyn");
        return PD_BOOL;
    }
}

inline int64_t item_bytes(int32_t dtype) {
    constexpr int64_t bytes[] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1};  // in the order of PD_<dtype>
    if (dtype < 0 || dtype > PD_BOOL) throw Error("no element type: " + std::to_string(dtype));
    return bytes[dtype];
}

// A read-only array of the caller. Strides in bytes; none: dense row-major.
struct View {
    const void *data;
    std::vector<int64_t> shape;
    int32_t dtype;
    std::vector<int64_t> strides;

    template <class T>
    View(const T *array, std::vector<int64_t> sizes, std::vector<int64_t> steps = {})
        : data(array), shape(std::move(sizes)), dtype(dtype_of<T>()), strides(std::move(steps)) {}
    // An array whose element type has no C++ type (PD_FLOAT16, PD_BFLOAT16) or is only known at run time.
    static View untyped(const void *array, std::vector<int64_t> sizes, int32_t type, std::vector<int64_t> steps = {}) {
        return View(static_cast<const char *>(array), std::move(sizes), type, std::move(steps));
    }

private:
    View(const char *array, std::vector<int64_t> sizes, int32_t type, std::vector<int64_t> steps)
        : data(array), shape(std::move(sizes)), dtype(type), strides(std::move(steps)) {}
};

// A dense array that owns its memory, aligned to 64 bytes.
class Tensor {
public:
    Tensor(std::vector<int64_t> sizes, int32_t type) : shape_(std::move(sizes)), dtype_(type), size_(1) {
        for (int64_t n : shape_) size_ *= n;
        const auto bytes = static_cast<size_t>(size_ * item_bytes(dtype_) + 63) / 64 * 64;
        data_.reset(std::aligned_alloc(64, bytes ? bytes : 64));
        if (!data_) throw std::bad_alloc();
    }
    const std::vector<int64_t> &shape() const { return shape_; }
    int32_t dtype() const { return dtype_; }
    int64_t size() const { return size_; }  // elements
    void *data() { return data_.get(); }
    const void *data() const { return data_.get(); }
    // The elements, after a check of the element type.
    template <class T> T *as() {
        check(dtype_of<T>());
        return static_cast<T *>(data_.get());
    }
    template <class T> const T *as() const {
        check(dtype_of<T>());
        return static_cast<const T *>(data_.get());
    }
    View view() const { return View::untyped(data_.get(), shape_, dtype_); }

private:
    void check(int32_t asked) const {
        if (asked != dtype_)
            throw Error("the tensor has element type " + std::to_string(dtype_) + ", not " + std::to_string(asked));
    }
    struct Free {
        void operator()(void *p) const { std::free(p); }
    };
    std::vector<int64_t> shape_;
    int32_t dtype_;
    int64_t size_;
    std::unique_ptr<void, Free> data_;
};

struct Argument {
    std::string name, shape;  // the shape as text, as in "[B, L]"
    int32_t dtype;
    int32_t rank;
};

class Program {
public:
    // `library`: lib.so of the artifact. `weights`: the artifact itself, from which the weights are mapped.
    Program(const std::string &library, const std::string &weights) {
        library_.reset(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL));
        if (!library_) throw Error(dlerror());
        load(abi_version, "pd_abi_version"), load(error, "pd_error"), load(open, "pd_open"), load(close, "pd_close");
        load(get_inputs, "pd_inputs"), load(get_outputs, "pd_outputs"), load(weight_bytes, "pd_weight_bytes");
        load(verify, "pd_verify_weights");
        load(context_new, "pd_context_new"), load(context_free, "pd_context_free");
        load(shapes, "pd_shapes"), load(run, "pd_run"), load(result, "pd_result");
        if (abi_version() != PD_ABI_VERSION) throw Error(library + " has another version of the C interface");
        check(open(weights.c_str(), nullptr, 4096, weight_bytes(nullptr), &program));
        inputs_ = arguments(get_inputs), outputs_ = arguments(get_outputs);
    }
    ~Program() {
        if (program) close(program);
    }
    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;
    const std::vector<Argument> &inputs() const { return inputs_; }
    const std::vector<Argument> &outputs() const { return outputs_; }
    // Reads all weights, about 4 s per GB; throws if they are damaged. The constructor only checks that they belong to
    // the library.
    void verify_weights() const { check(verify(program)); }

private:
    friend class Context;
    struct Unload {
        void operator()(void *p) const { dlclose(p); }
    };
    template <class F> void load(F *&function, const char *name) {
        function = reinterpret_cast<F *>(dlsym(library_.get(), name));
        if (!function) throw Error(std::string("the library has no ") + name);
    }
    void check(int32_t code) const {
        if (code != PD_OK) throw Error(error());
    }
    std::vector<Argument> arguments(decltype(pd_inputs) *list) const {
        int32_t count = 0;
        const pd_io *io = list(program, &count);
        std::vector<Argument> found;
        for (int32_t k = 0; k < count; k++) found.push_back({io[k].name, io[k].shape, io[k].dtype, io[k].rank});
        return found;
    }
    std::unique_ptr<void, Unload> library_;
    pd_program *program = nullptr;
    std::vector<Argument> inputs_, outputs_;
    decltype(pd_abi_version) *abi_version;
    decltype(pd_error) *error;
    decltype(pd_open) *open;
    decltype(pd_close) *close;
    decltype(pd_inputs) *get_inputs;
    decltype(pd_outputs) *get_outputs;
    decltype(pd_weight_bytes) *weight_bytes;
    decltype(pd_verify_weights) *verify;
    decltype(pd_context_new) *context_new;
    decltype(pd_context_free) *context_free;
    decltype(pd_shapes) *shapes;
    decltype(pd_run) *run;
    decltype(pd_result) *result;
};

class Context {
public:
    // `threads`: for every call, including the caller's. The program must outlive the context.
    explicit Context(const Program &program, int32_t threads = 1) : program_(program) {
        program_.check(program_.context_new(program_.program, threads, &context_));
    }
    ~Context() { program_.context_free(context_); }
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    // Returns the shapes of the outputs for these inputs, in the program's order. Checks every dim and guard. PD_LATE:
    // the size depends on the data.
    std::vector<std::vector<int64_t>> shapes(const std::vector<View> &inputs) {
        if (inputs.size() != program_.inputs().size())
            throw Error("the program has " + std::to_string(program_.inputs().size()) + " inputs, the call " +
                        std::to_string(inputs.size()));
        std::vector<pd_tensor> tensors;
        for (const View &v : inputs) {
            if (!v.strides.empty() && v.strides.size() != v.shape.size()) throw Error("a stride for every axis, or none");
            const int64_t *strides = v.strides.empty() ? nullptr : v.strides.data();
            tensors.push_back({v.shape.data(), strides, v.dtype, static_cast<int32_t>(v.shape.size())});
        }
        size_t dims = 0;
        for (const Argument &o : program_.outputs()) dims += static_cast<size_t>(o.rank);
        std::vector<int64_t> all(dims + 1);
        program_.check(program_.shapes(context_, tensors.data(), nullptr, all.data()));
        std::vector<std::vector<int64_t>> found;
        auto next = all.begin();
        for (const Argument &o : program_.outputs()) {
            found.emplace_back(next, next + o.rank);
            next += o.rank;
        }
        return found;
    }

    // Computes the outputs; returns them in the program's order.
    std::vector<Tensor> run(const std::vector<View> &inputs) {
        const auto sizes = shapes(inputs);
        std::vector<Tensor> out;
        std::vector<const void *> from;
        std::vector<void *> to;
        for (size_t k = 0; k < sizes.size(); k++) {
            const bool late = std::find(sizes[k].begin(), sizes[k].end(), PD_LATE) != sizes[k].end();
            out.emplace_back(late ? std::vector<int64_t>{0} : sizes[k], program_.outputs()[k].dtype);
            to.push_back(late ? nullptr : out.back().data());
        }
        for (const View &v : inputs) from.push_back(v.data);
        program_.check(program_.run(context_, from.data(), to.data()));
        for (size_t k = 0; k < out.size(); k++)
            if (!to[k]) out[k] = result(static_cast<int32_t>(k));
        return out;
    }

private:
    // Returns a copy of an output whose size depends on the data.
    Tensor result(int32_t k) const {
        const Argument &o = program_.outputs()[static_cast<size_t>(k)];
        std::vector<int64_t> dims(static_cast<size_t>(o.rank));
        const void *found = program_.result(context_, k, dims.data());
        Tensor made(std::move(dims), o.dtype);
        if (made.size()) std::memcpy(made.data(), found, static_cast<size_t>(made.size() * item_bytes(o.dtype)));
        return made;
    }
    const Program &program_;
    pd_context *context_ = nullptr;
};

}  // namespace polydyn
#endif
